"""Terms of the objective and the figure of a diagnosis, read back from their artists."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import pyro_vsd as vsd
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


# ---- the figure of a diagnosis


@pytest.fixture
def report():
    x = torch.randn(60, 3)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=60)
    return vsd.diagnose(model, vsd.VSDGuide(model), (x, x[:, 0]), num_samples=8)


def test_four_panels(report):
    axes = report.plot()
    assert [ax.get_title("left") for ax in axes] == ["noise variances", "objective", "noise", "samples"]
    axes[0].figure.canvas.draw()


def test_bars_are_the_terms_of_the_objective(report):
    ax = plots.diagnosis(report)[1]
    heights = [bar.get_width() for bar in ax.patches]
    expected = [-report.objective["log_likelihood"], -report.objective["constant"]]
    assert heights == pytest.approx([*expected, *(site["kl"] for site in report.sites.values())])


def test_noise_is_measured_from_the_best(report):
    ax = plots.diagnosis(report)[2]
    drawn = {line.get_label(): line.get_xdata()[0] for line in ax.get_lines() if not line.get_label().startswith("_")}
    loss = report.sites["net.0.weight"]["better_noise"]
    assert drawn["this guide"] == pytest.approx((loss["now"] - loss["best"]) / 60)
    assert drawn["best noise"] == 0


def test_samples_are_those_of_the_report(report):
    (line,) = plots.diagnosis(report)[3].get_lines()
    assert list(line.get_xdata()) == list(report.prediction["nll_by_samples"])


def test_a_panel_says_that_it_was_not_measured(report):
    report.prediction = {}
    report.objective["log_likelihood"] = None
    for site in report.sites.values():
        site["better_noise"] = None
    texts = [ax.texts[0].get_text() for ax in plots.diagnosis(report)[1:]]
    assert texts == ["not measured", "no weight whose best covariance is known", "no predictions"]


def test_a_diagnosis_draws_on_given_axes(report):
    _, grid = plt.subplots(1, 4)
    assert report.plot(list(grid)) == list(grid)
    with pytest.raises(ValueError, match=r"\baxes\b"):
        report.plot([grid[0]])


def test_a_diagnosis_draws_on_an_array_of_axes(report):
    _, grid = plt.subplots(2, 2)
    assert report.plot(grid) == list(grid.flat)


def test_wrong_axes(report):
    _, grid = plt.subplots(2, 2)
    with pytest.raises(ValueError, match=r"\baxes\b"):
        report.plot(grid[0, 0])
    with pytest.raises(TypeError, match=r"\baxes\b"):
        report.plot([None] * 4)
