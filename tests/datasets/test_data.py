import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from pyro_vsd.datasets import Data


@pytest.fixture
def data():
    return Data(torch.arange(14.0).reshape(7, 2), torch.arange(7), y_mean=1.0, y_std=2.0)


def labels(batches):
    return [y.tolist() for _, y in batches]


def test_rows_stay_together(data):
    for x, y in data.batches(3):
        torch.testing.assert_close(x[:, 0], 2.0 * y)


def test_a_pass_sees_every_row_once(data):
    assert sorted(sum(labels(data.batches(3)), [])) == list(range(7))


@pytest.mark.parametrize(
    ("size", "drop_last", "sizes"),
    [(3, False, [3, 2, 2]), (3, True, [3, 3]), (7, False, [7]), (7, True, [7]), (10, False, [7]), (10, True, [])],
)
def test_batch_sizes(data, size, drop_last, sizes):
    assert [len(y) for _, y in data.batches(size, drop_last=drop_last)] == sizes


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [100, 138, 690, 691])
def test_batches_differ_by_at_most_one_row(size, shuffle):
    """A last batch of one row would weigh as much as one of 138."""
    batches = labels(Data(torch.zeros(691, 1), torch.arange(691)).batches(size, shuffle=shuffle))
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == -(-691 // size)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= size
    assert sorted(sum(batches, [])) == list(range(691))


def test_a_seed_gives_the_permutation_of_its_generator(data):
    expected = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    assert sum(labels(data.batches(3, seed=3)), []) == expected


def test_order_without_shuffle(data):
    assert labels(data.batches(3, shuffle=False)) == [[0, 1, 2], [3, 4], [5, 6]]


def test_seed_fixes_the_order_and_leaves_the_global_generator_alone(data):
    state = torch.get_rng_state()
    assert labels(data.batches(3, seed=1)) == labels(data.batches(3, seed=1))
    assert labels(data.batches(7, seed=1)) != labels(data.batches(7, seed=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_manual_seed_governs_without_a_seed(data):
    torch.manual_seed(5)
    first, second = labels(data.batches(7)), labels(data.batches(7))
    assert first != second
    torch.manual_seed(5)
    assert labels(data.batches(7)) == first


def test_works_in_a_data_loader(data):
    batches = list(DataLoader(data, batch_size=3))
    assert labels(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[0][0].shape == (3, 2)


def test_iterates_over_pairs(data):
    pairs = list(data)
    assert len(pairs) == len(data) == 7
    assert pairs[2][1] == 2


@pytest.mark.parametrize("index", [2, -5, torch.tensor(2)])
def test_a_number_gives_a_pair(data, index):
    x, y = data[index]
    assert x.tolist() == [4.0, 5.0]
    assert y == 2


@pytest.mark.parametrize("index", [slice(2, 4), torch.tensor([2, 3]), torch.tensor([0, 0, 1, 1, 0, 0, 0]).bool()])
def test_rows_give_data_with_the_same_units(data, index):
    part = data[index]
    assert part.y.tolist() == [2, 3]
    assert (part.y_mean, part.y_std) == (1.0, 2.0)


def test_index_beyond_the_end(data):
    with pytest.raises(IndexError):
        data[7]


@pytest.mark.parametrize("arguments", [{"dtype": torch.float32}, {"device": torch.float32}])
def test_to_dtype_keeps_integers(data, arguments):
    moved = data.to(**arguments)
    assert (moved.x.dtype, moved.y.dtype) == (torch.float32, torch.int64)
    assert (moved.y_mean, moved.y_std) == (1.0, 2.0)
    assert data.x.dtype == torch.float64


def test_to_device(data):
    assert data.to("meta").x.device.type == "meta"
    assert data.to("cpu", torch.float32).x.dtype == torch.float32


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copies(data, clone):
    other = clone(data)
    assert torch.equal(other.x, data.x)
    assert other.y_std == data.y_std


def test_is_frozen(data):
    with pytest.raises(AttributeError):
        data.x = torch.zeros(7, 2)


@pytest.mark.parametrize(("x", "y"), [((3, 2), (4,)), ((), ()), ((1,), ())])
def test_mismatched_rows(x, y):
    with pytest.raises(ValueError, match=r"\bx and y\b"):
        Data(torch.zeros(x), torch.zeros(y))


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_bad_batch_size_is_an_error_at_once(data, size):
    with pytest.raises(ValueError, match=r"\bsize\b"):
        data.batches(size)


def test_seed_without_shuffle(data):
    with pytest.raises(ValueError, match=r"\bseed\b"):
        data.batches(3, seed=0, shuffle=False)
