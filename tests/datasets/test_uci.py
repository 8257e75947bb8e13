import numpy as np
import pytest
import torch

from pyro_vsd.datasets import uci


@pytest.fixture
def root(tmp_path):
    """A set of 10 rows with three inputs, the middle one constant, two splits, and a second target that is not used."""
    folder = tmp_path / "UCI_Datasets" / "naval-propulsion-plant" / "data"
    folder.mkdir(parents=True)
    table = np.random.default_rng(0).normal(5.0, 3.0, (10, 5))
    table[:, 1] = 7.0
    np.savetxt(folder / "data.txt", table)
    np.savetxt(folder / "index_features.txt", [0, 1, 2])
    np.savetxt(folder / "index_target.txt", [3])
    np.savetxt(folder / "n_splits.txt", [2])
    for split in (0, 1):
        np.savetxt(folder / f"index_test_{split}.txt", [split])  # a single row: still one dimension
        np.savetxt(folder / f"index_train_{split}.txt", [i for i in range(10) if i != split])
    return tmp_path


@pytest.mark.parametrize("name", ["naval", "naval-propulsion-plant"])
@pytest.mark.parametrize("split", [0, 1])
def test_rows_and_columns(root, name, split):
    train, test = uci(name, root, split)
    assert (train.x.shape, train.y.shape) == ((9, 3), (9,))
    table = torch.from_numpy(np.loadtxt(root / "UCI_Datasets/naval-propulsion-plant/data/data.txt"))
    torch.testing.assert_close(test.y * test.y_std + test.y_mean, table[split : split + 1, 3])


def test_standardised_by_the_training_rows(root):
    train, _ = uci("naval", str(root))
    torch.testing.assert_close(train.x.mean(0), torch.zeros(3))
    torch.testing.assert_close(train.x.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))  # the constant is centred
    torch.testing.assert_close(train.y.std(correction=0), torch.tensor(1.0))


def test_dtype(root):
    assert uci("naval", root)[0].x.dtype == torch.float64
    assert uci("naval", root, dtype=torch.float32)[1].y.dtype == torch.float32


def test_missing_set_says_where_to_get_it(root):
    with pytest.raises(FileNotFoundError, match=r"\broot\b"):
        uci("boston", root)


def test_unknown_name(root):
    with pytest.raises(ValueError, match=r"\bname\b"):
        uci("protein", root)


@pytest.mark.parametrize("split", [-1, 2])
def test_unknown_split(root, split):
    with pytest.raises(ValueError, match=r"\bsplit\b"):
        uci("naval", root, split)
