"""How many plain networks a prediction is worth."""

import math

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.metrics import deep_ensemble_equivalent


def plain(number=6, rows=400):
    """Networks that err by independent noise around the truth, 0."""
    means = torch.randn(number, 1, rows)
    return [vsd.RegressionPrediction.from_samples(mean, torch.tensor(1.0)) for mean in means]


@pytest.mark.parametrize("size", [2, 4])
def test_a_mixture_of_plain_networks_is_worth_its_size(size):
    networks, y = plain(), torch.randn(400)
    found = deep_ensemble_equivalent(vsd.ensemble.mixture(networks[:size]), networks, y)
    assert found == pytest.approx(size, abs=1.2)


def test_ends():
    networks, y = plain(), torch.randn(400)
    worst = min(networks, key=lambda p: vsd.metrics.log_likelihood(p, y))
    assert deep_ensemble_equivalent(worst, networks, y) == 1
    truth = vsd.RegressionPrediction.from_samples(torch.zeros(1, 400), torch.tensor(1.0))
    assert deep_ensemble_equivalent(truth, networks, y) == math.inf


def test_one_network_is_no_ensemble():
    with pytest.raises(ValueError, match="plain"):
        deep_ensemble_equivalent(plain()[0], plain()[:1], torch.zeros(400))


def test_a_network_that_excludes_a_target():
    wrong, right, unsure = (torch.tensor([[[1 - p, p]]]) for p in (0.0, 1.0, 0.3))
    networks = [vsd.ClassificationPrediction.from_samples(p) for p in (wrong, right)]
    prediction = vsd.ClassificationPrediction.from_samples(unsure)
    assert deep_ensemble_equivalent(prediction, networks, torch.ones(1).long()) == 2
