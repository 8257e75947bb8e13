"""Spectral norm and stable rank: by hand, against NumPy, at their limits."""

import math

import numpy
import pytest
import torch

from pyro_vsd import metrics


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 3, 2, 2), (1, 7), (7, 1)])
def test_against_numpy(shape):
    weight = torch.randn(shape)
    values = numpy.linalg.svd(weight.reshape(shape[0], -1).numpy(), compute_uv=False)
    assert metrics.spectral_norm(weight) == pytest.approx(values[0], rel=1e-10)
    assert metrics.stable_rank(weight) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-10)


def test_limits():
    assert metrics.spectral_norm(torch.eye(4)) == pytest.approx(1)
    assert metrics.stable_rank(torch.eye(4)) == pytest.approx(4)
    rank_one = torch.outer(torch.randn(5), torch.randn(3))
    assert metrics.stable_rank(rank_one) == pytest.approx(1)
    assert metrics.spectral_norm(torch.zeros(2, 3)) == 0
    assert metrics.stable_rank(torch.zeros(2, 3)) == 0


def test_scale_moves_the_norm_alone():
    weight = torch.randn(4, 6)
    assert metrics.spectral_norm(10 * weight) == pytest.approx(10 * metrics.spectral_norm(weight))
    assert metrics.stable_rank(1e-200 * weight) == pytest.approx(metrics.stable_rank(weight))


def test_takes_a_layer_an_array_and_single_precision():
    layer = torch.nn.Conv2d(3, 4, 2)
    expected = math.sqrt(torch.linalg.eigvalsh(layer.weight.flatten(1) @ layer.weight.flatten(1).mT)[-1].item())
    assert metrics.spectral_norm(layer) == pytest.approx(expected)
    assert metrics.spectral_norm(layer.weight.detach().numpy()) == pytest.approx(expected)
    value = metrics.spectral_norm(layer.weight.float())
    assert type(value) is float
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["spectral_norm", "stable_rank"])
@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.ones(3), r"expected a weight of shape \(out, ...\), two dimensions or more, got \(3,\)"),
        (torch.ones(0, 3), r"got \(0, 3\)"),
        (torch.tensor([[1.0, torch.nan]]), "expected a finite weight, got 1 NaN"),
    ],
)
def test_refuses(name, weight, match):
    with pytest.raises(ValueError, match=match):
        getattr(metrics, name)(weight)
