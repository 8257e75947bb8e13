"""Elsewhere weights start at the median of a wide prior, which is nonsense (pyro#2047), wrong for matrices (pyro#2081)
or erratic (pyro#2156), and the posterior's scale starts so small that predictions have no spread (blitz#50). Here
weights start where their layers do, droprates where the guide says, and a trained network goes on from where it is.

More of it: ``tests/infer/test_guide.py``.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_weights_start_at_their_layers_whatever_the_prior(scale):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net, vsd.nn.GaussianPrior(scale)), num_data=12)
    guide = vsd.VSDGuide(model)
    for i in (0, 2):
        assert torch.equal(guide.posterior(f"net.{i}.weight").theta, net[i].weight)


@pytest.mark.parametrize("make", [models.HandWritten, lambda: models.HandWritten(100.0)], ids=["narrow", "wide"])
def test_weights_of_a_hand_written_model_start_neither_at_zero_nor_at_the_prior(make):
    guide = vsd.VSDGuide(make()).setup(*models.data())
    bound = (6 / (3 + 4)) ** 0.5  # Xavier's
    theta = guide.posterior("first.weight").theta.detach()
    assert 0.2 * bound < float(theta.std())
    assert float(theta.abs().max()) <= bound


@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_droprates_start_as_told(alpha):
    model = models.regressor(sizes=(3, 400, 1))
    guide = vsd.VSDGuide(model, init_alpha=alpha)
    assert float(guide.alpha("net.2.weight").detach().log().mean().exp()) == pytest.approx(alpha, rel=0.25)


def test_predictions_have_a_spread_from_the_start():
    """blitz#50: there the spread of a fresh posterior is a thousandth of the outputs."""
    model, (x, _) = models.regressor(sizes=(3, 50, 1)), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=200, seed=0)
    assert float((prediction.epistemic.sqrt() / prediction.mean.abs().clamp(min=0.1)).median()) > 0.05


def test_a_trained_network_is_the_start_in_one_argument():
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    for parameter in net.parameters():
        parameter.data.mul_(3.0)  # "trained"
    model, (x, _) = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=12), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model, init_alpha=1e-10), x, num_samples=5, seed=0)
    assert_close(prediction.mean, net(x).squeeze(-1), rtol=1e-3, atol=1e-3)
