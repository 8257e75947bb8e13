"""The figure of a diagnosis, read back from its artists."""

import matplotlib.pyplot as plt
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd import plots
from pyro_vsd.diagnosis import diagnose


@pytest.fixture
def report():
    x = torch.randn(60, 3)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=60)
    return diagnose(model, vsd.VSDGuide(model), (x, x[:, 0]), num_samples=8)


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
    gain = report.sites["net.0.weight"]["gain"]
    assert drawn["this guide"] == pytest.approx((gain["now"] - gain["best"]) / 60)
    assert drawn["best"] == 0


def test_samples_are_those_of_the_report(report):
    (line,) = plots.diagnosis(report)[3].get_lines()
    assert list(line.get_xdata()) == list(report.prediction["nll_by_samples"])


def test_a_panel_says_that_it_was_not_measured(report):
    report.prediction = {}
    report.objective["log_likelihood"] = None
    for site in report.sites.values():
        site["gain"] = None
    texts = [ax.texts[0].get_text() for ax in plots.diagnosis(report)[1:]]
    assert texts == ["not measured", "no weight whose best covariance is known", "no predictions"]


def test_draws_on_given_axes(report):
    _, grid = plt.subplots(1, 4)
    assert report.plot(list(grid)) == list(grid)
    with pytest.raises(ValueError, match=r"\baxes\b"):
        report.plot([grid[0]])


def test_draws_on_an_array_of_axes(report):
    _, grid = plt.subplots(2, 2)
    assert report.plot(grid) == list(grid.flat)


def test_wrong_axes(report):
    _, grid = plt.subplots(2, 2)
    with pytest.raises(ValueError, match=r"\baxes\b"):
        report.plot(grid[0, 0])
    with pytest.raises(TypeError, match=r"\baxes\b"):
        report.plot([None] * 4)
