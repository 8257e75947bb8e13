"""What all figures share: the axes to draw on."""

import matplotlib.pyplot as plt
import pytest
import torch

from pyro_vsd import plots
from pyro_vsd.prediction import RegressionPrediction, Stacking

PROBS, Y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
NUMBERS = RegressionPrediction.from_samples(torch.zeros(1, 2), torch.tensor(1.0))
TERMS = [{"loss": 3.0, "log_likelihood": -2.0, "kl_weight": 1.0, "kl": {"w": 1.0}}]
FIGURES = {
    "band": lambda ax: plots.band(torch.zeros(2), NUMBERS, ax=ax),
    "noise_variances": lambda ax: plots.noise_variances(torch.ones(3), ax=ax),
    "elbo_terms": lambda ax: plots.elbo_terms(TERMS, ax=ax),
    "entropy_cdf": lambda ax: plots.entropy_cdf(PROBS, ax=ax),
    "entropy_histogram": lambda ax: plots.entropy_histogram(PROBS, ax=ax),
    "members": lambda ax: plots.members(Stacking(torch.ones(2) / 2, torch.ones(2), 9, torch.zeros(2), 0.0, 0.1), ax=ax),
    "noise_covariance": lambda ax: plots.noise_covariance(torch.eye(2), ax=ax),
    "ood_roc": lambda ax: plots.ood_roc(PROBS, PROBS, ax=ax),
    "reliability": lambda ax: plots.reliability(PROBS, Y, ax=ax),
    "risk_coverage": lambda ax: plots.risk_coverage(PROBS, Y, ax=ax),
}


def test_no_figure_is_forgotten():
    assert {*FIGURES, "diagnosis", "droprates"} == set(plots.__all__)


@pytest.mark.parametrize("name", FIGURES)
def test_an_array_of_axes_raises(name):
    _, axes = plt.subplots(2, 2)
    with pytest.raises(TypeError, match=r"\bax\b.*ax\.flat\[0\]"):
        FIGURES[name](axes)


def test_a_figure_is_no_axes():
    with pytest.raises(TypeError, match=r"\bax\b"):
        plots.reliability(PROBS, Y, ax=plt.figure())


def test_the_remedy_works():
    _, ax = plt.subplots(2, 2)
    assert plots.reliability(PROBS, Y, ax=ax.flat[0]) is ax[0, 0]
