import sys

import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits

from pyro_vsd.datasets import diabetes, digits


def test_digits_are_scaled_and_split_without_loss():
    train, test = digits()
    both = torch.cat([train.x, test.x])
    assert both.min() == 0
    assert both.max() == 1
    original = torch.from_numpy(load_digits().data) / 16
    torch.testing.assert_close(both.sum(0), original.sum(0))
    assert len(both) == len(original)
    assert len(both.unique(dim=0)) == len(original.unique(dim=0))


def test_digits_split_is_stratified():
    train, test = digits()
    shares = test.y.bincount() / (train.y.bincount() + test.y.bincount())
    assert ((shares - 0.2).abs() < 0.01).all()


def test_digits_as_images_are_the_same_pixels():
    flat, images = digits()[0], digits(flatten=False)[0]
    assert images.x.shape[1:] == (1, 8, 8)
    assert torch.equal(images.x.flatten(1), flat.x)


@pytest.mark.parametrize("load", [digits, diabetes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype(load, dtype):
    assert load(dtype=dtype)[0].x.dtype == dtype
    torch.set_default_dtype(dtype)
    assert load()[1].x.dtype == dtype


def test_two_calls_give_the_same_split_whatever_the_seed():
    torch.manual_seed(1)
    first = digits()[1].y
    torch.manual_seed(2)
    assert torch.equal(digits()[1].y, first)


def test_diabetes_is_standardised_by_the_training_rows():
    train, test = diabetes()
    torch.testing.assert_close(train.x.mean(0), torch.zeros(10))
    torch.testing.assert_close(train.x.std(0, correction=0), torch.ones(10))
    torch.testing.assert_close(train.y.mean(), torch.tensor(0.0))
    torch.testing.assert_close(train.y.std(correction=0), torch.tensor(1.0))
    assert test.x.mean(0).abs().max() > 1e-3


def test_diabetes_targets_can_be_had_in_their_own_units():
    own = torch.cat([part.y * part.y_std + part.y_mean for part in diabetes()])
    torch.testing.assert_close(own.sort().values, torch.from_numpy(load_diabetes().target).sort().values)


@pytest.mark.parametrize("load", [digits, diabetes])
def test_without_scikit_learn_the_error_names_the_extra(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro_vsd\[sklearn\]'"):
        load()
