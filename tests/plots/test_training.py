"""ELBO terms, read back from their artists."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_vsd import plots


def history(sign=1):
    return [
        {
            "loss": torch.tensor(sign * 10.0 / step),
            "log_likelihood": torch.tensor(-sign * 7.0 / step),
            "kl_weight": 0.1 * step,
            "kl": {"0.weight": torch.tensor(2.0), "2.weight": 3.0},
        }
        for step in range(1, 6)
    ]


def test_terms():
    ax = plots.elbo_terms(history())
    lines = {line.get_label(): line for line in ax.get_lines()}
    steps = np.arange(1, 6)
    np.testing.assert_allclose(lines["loss"].get_xdata(), steps)
    np.testing.assert_allclose(lines["loss"].get_ydata(), 10 / steps)
    np.testing.assert_allclose(lines["negative log-likelihood"].get_ydata(), 7 / steps)
    np.testing.assert_allclose(lines["weighted KL"].get_ydata(), 0.5 * steps)
    assert len(lines) == 3
    assert ax.get_yscale() == "log"


def test_sites():
    ax = plots.elbo_terms(history(), sites=True)
    lines = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_allclose(lines["weighted KL of 0.weight"].get_ydata(), 0.2 * np.arange(1, 6))
    np.testing.assert_allclose(lines["weighted KL of 2.weight"].get_ydata(), 0.3 * np.arange(1, 6))


def test_window():
    ax = plots.elbo_terms(history(), window=3)
    lines = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_allclose(lines["weighted KL"].get_xdata(), [3, 4, 5])
    np.testing.assert_allclose(lines["weighted KL"].get_ydata(), [1.0, 1.5, 2.0])
    assert len(ax.get_lines()) == 6


@pytest.mark.parametrize("window", [0, 6])
def test_wrong_windows(window):
    with pytest.raises(ValueError, match=r"\bwindow\b"):
        plots.elbo_terms(history(), window=window)


def test_negative_values_stay_on_a_linear_scale():
    assert plots.elbo_terms(history(-1)).get_yscale() == "linear"


def test_draws_on_the_given_axes():
    figure, ax = plt.subplots()
    assert plots.elbo_terms(history(), ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()


@pytest.mark.parametrize("steps", [[], [{"loss": 1.0, "kl": {}}]], ids=["empty", "terms missing"])
def test_wrong_histories(steps):
    with pytest.raises(ValueError, match=r"\bhistory\b"):
        plots.elbo_terms(steps)
