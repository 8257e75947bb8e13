"""Figures of classifiers, read back from their artists."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
import torch
from matplotlib.container import ErrorbarContainer

from pyro_vsd import metrics, plots
from pyro_vsd.prediction import ClassificationPrediction, RegressionPrediction


def classes(num_rows=300, scale=2.0, dtype=torch.float64):
    logits = scale * torch.randn(num_rows, 4, dtype=dtype)
    y = (logits + torch.randn(num_rows, 4)).argmax(-1)
    return ClassificationPrediction.from_samples((logits + torch.randn(5, num_rows, 4, dtype=dtype)).softmax(-1)), y


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def line(ax, label):
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]
    return found.get_xdata(), found.get_ydata()


# reliability


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reliability_bars_are_accuracies_and_gaps(dtype):
    prediction, y = classes(dtype=dtype)
    ax = plots.reliability(prediction, y, num_bins=10)
    bins = metrics.reliability_bins(prediction, y, 10)
    kept = bins.size >= 5
    accuracy_bars, gap_bars = (box for box in ax.containers if not isinstance(box, ErrorbarContainer))
    np.testing.assert_allclose([bar.get_height() for bar in accuracy_bars], bins.accuracy[kept], rtol=1e-6)
    np.testing.assert_allclose([bar.get_x() for bar in accuracy_bars], bins.edges[:-1][kept], atol=1e-6)
    ends = [bar.get_y() + bar.get_height() for bar in gap_bars]
    np.testing.assert_allclose(ends, bins.confidence[kept], rtol=1e-5)
    assert labels(ax) == [f"ECE {metrics.ece(prediction, y, 10):.3f}", "gap to confidence"]


def test_reliability_of_several_is_lines_at_the_mean_confidence():
    (one, y), (two, _) = classes(), classes(scale=0.5)
    ax = plots.reliability({"MAP": one, "VSD": two.probs}, y, num_bins=5)
    for name, prediction, box in zip(["MAP", "VSD"], [one, two], ax.containers, strict=True):
        bins = metrics.reliability_bins(prediction, y, 5)
        kept = bins.size >= 5
        x, height = box.lines[0].get_data()
        np.testing.assert_allclose(x, bins.confidence[kept])
        np.testing.assert_allclose(height, bins.accuracy[kept])
        assert box.get_label() == f"{name}, ECE {metrics.ece(prediction, y, 5):.3f}"


def test_reliability_intervals_are_wilson_intervals():
    y = torch.tensor([0] * 7 + [1] * 3)
    ax = plots.reliability(torch.tensor([[0.8, 0.2]]).expand(10, 2), y, num_bins=5)
    (errors,) = [box for box in ax.containers if isinstance(box, ErrorbarContainer)]
    ((_, low), (_, high)) = errors.lines[2][0].get_segments()[0]
    expected = scipy.stats.binomtest(7, 10).proportion_ci(0.95, "wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-4)


def test_reliability_of_a_perfect_predictor():
    y = torch.arange(8) % 4
    ax = plots.reliability(torch.eye(4)[y], y)
    assert [bar.get_height() for bar in ax.containers[0]] == [1.0]
    assert labels(ax)[0] == "ECE 0.000"


@pytest.mark.parametrize(("min_rows", "drawn"), [(1, ["1", "4", "5"]), (5, ["5"])])
def test_reliability_leaves_out_bins_of_few_rows(min_rows, drawn):
    """The numbers at the bottom are the rows of the bins that are drawn; the ECE is that of all rows."""
    confidence = torch.tensor([0.55] + [0.75] * 4 + [0.95] * 5)
    probs, y = torch.stack([confidence, 1 - confidence], -1), torch.zeros(10).long()
    ax = plots.reliability({"a": probs}, y, num_bins=10, min_rows=min_rows)
    assert [text.get_text() for text in ax.texts] == drawn
    assert labels(ax)[0] == f"a, ECE {metrics.ece(probs, y, 10):.3f}"


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (4500, "4.5k"), (12_345, "12k"), (250_000, "250k")])
def test_reliability_numbers_are_short(count, text):
    ax = plots.reliability(torch.tensor([[0.9, 0.1]]).expand(count, 2), torch.zeros(count).long())
    assert ax.texts[0].get_text() == text


@pytest.mark.parametrize("min_rows", [0, 1.5])
def test_reliability_needs_a_count_of_rows(min_rows):
    with pytest.raises((TypeError, ValueError), match=r"\bmin_rows\b"):
        plots.reliability(torch.eye(2), torch.arange(2), min_rows=min_rows)


# entropies


def test_entropy_histogram_densities():
    (inside, _), (outside, _) = classes(scale=4.0), classes(scale=0.5)
    ax = plots.entropy_histogram({"in": inside, "out": outside}, bins=20)
    outlines = [patch for patch in ax.patches if not patch.get_label().startswith("_")]
    assert labels(ax) == ["in", "out"]
    for patch, prediction in zip(outlines, [inside, outside], strict=True):
        values, edges, _ = patch.get_data()
        expected, ends = np.histogram(prediction.entropy, 20, (0, math.log(4)), density=True)
        np.testing.assert_allclose(values, expected)
        np.testing.assert_allclose(edges, ends)
        assert (values * np.diff(edges)).sum() == pytest.approx(1)


def test_entropy_histogram_of_one_has_no_legend():
    ax = plots.entropy_histogram(classes()[0])
    assert ax.get_legend() is None
    assert len(ax.patches) == 2


def test_series_differ_in_colour_and_in_style():
    prediction, _ = classes()
    ax = plots.entropy_cdf({str(index): prediction for index in range(7)})
    lines = ax.get_lines()
    assert len({one.get_color() for one in lines}) == 7
    styles = [(one.get_color(), one.get_linestyle(), one._dash_pattern) for one in lines]
    assert all(a[2] != b[2] for a, b in zip(styles, styles[1:], strict=False))


@pytest.mark.parametrize("num_rows", [5, 300])
def test_entropy_cdf_is_the_empirical_one(num_rows):
    prediction, _ = classes(num_rows)
    ax = plots.entropy_cdf({"VSD": prediction})
    x, share = line(ax, "VSD")
    expected = scipy.stats.ecdf(prediction.entropy.numpy()).cdf
    np.testing.assert_allclose(x[1:-1], expected.quantiles)
    np.testing.assert_allclose(share[1:-1], expected.probabilities)
    assert (x[0], share[0], share[-1]) == (0, 0, 1)
    assert x[-1] == pytest.approx(math.log(4))


def test_entropy_cdf_of_many_rows_is_thinned():
    prediction, _ = classes(20_000)
    x, share = line(plots.entropy_cdf({"VSD": prediction}), "VSD")
    assert len(x) < 5000
    expected = scipy.stats.ecdf(prediction.entropy.numpy()).cdf
    np.testing.assert_allclose(share[1:-1], expected.evaluate(x[1:-1]))


# detection


def test_ood_roc_curves():
    (inside, _), (outside, _) = classes(scale=4.0), classes(scale=0.5)
    ax = plots.ood_roc({"a": inside, "b": inside}, {"a": outside, "b": outside.samples}, score="entropy")
    score = metrics.ood_score(inside, "entropy"), metrics.ood_score(outside, "entropy")
    curve = metrics.roc_curve(*score)
    for name in "ab":
        fpr, tpr = line(ax, f"{name}, AUROC {metrics.auroc(*score):.3f}")
        np.testing.assert_allclose(fpr, curve.fpr)
        np.testing.assert_allclose(tpr, curve.tpr)
    assert labels(ax) == [f"{name}, AUROC {metrics.auroc(*score):.3f}" for name in "ab"]


def test_ood_roc_takes_scores():
    fpr, tpr = line(plots.ood_roc(np.array([2.0, 3.0]), torch.tensor([1.0])), "AUROC 1.000")
    assert (list(fpr), list(tpr)) == ([0, 0, 0, 1], [0, 0.5, 1, 1])


def test_ood_roc_of_different_names():
    with pytest.raises(ValueError, match=r"\binside and outside\b"):
        plots.ood_roc({"a": torch.rand(3)}, {"b": torch.rand(3)})


@pytest.mark.parametrize("draw", [plots.entropy_histogram, plots.entropy_cdf])
def test_an_empty_dict_raises(draw):
    with pytest.raises(ValueError, match="empty"):
        draw({})


# selective prediction


def test_risk_coverage_is_the_curve_of_the_metrics():
    prediction, y = classes()
    ax = plots.risk_coverage(prediction, y)
    curve = metrics.risk_coverage(prediction, y)
    (drawn,) = [one for one in ax.get_lines() if one.get_label().startswith("AURC")]
    assert drawn.get_xdata()[1:] == pytest.approx(curve.coverage.numpy())
    assert drawn.get_ydata()[1:] == pytest.approx(curve.risk.numpy())
    assert ax.get_ylabel() == "error rate of the rows kept"


def test_risk_coverage_of_several_shares_the_axes():
    (one, y), (two, _) = classes(), classes()
    ax = plots.risk_coverage({"a": one, "b": two.probs}, y)
    assert [text.split(",")[0] for text in labels(ax)] == ["a", "b", "kept at random"]


@pytest.mark.parametrize(("loss", "label"), [(None, "squared error"), (lambda p, y: (p.mean - y).abs(), "loss")])
def test_risk_coverage_of_a_regression_names_its_loss(loss, label):
    prediction = RegressionPrediction.from_samples(torch.randn(5, 30), torch.rand(5, 30) + 0.1)
    ax = plots.risk_coverage(prediction, torch.randn(30), loss=loss)
    assert ax.get_ylabel() == f"{label} of the rows kept"


# all of them


DRAWN = {
    "reliability": lambda ax: plots.reliability(*classes(), ax=ax),
    "entropy_histogram": lambda ax: plots.entropy_histogram(classes()[0], ax=ax),
    "entropy_cdf": lambda ax: plots.entropy_cdf(classes()[0], ax=ax),
    "ood_roc": lambda ax: plots.ood_roc(classes()[0], classes()[0], ax=ax),
    "risk_coverage": lambda ax: plots.risk_coverage(*classes(), ax=ax),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_on_the_given_axes_and_changes_no_settings(name):
    settings = dict(plt.rcParams)
    figure, (left, right) = plt.subplots(1, 2)
    assert DRAWN[name](right) is right
    assert not left.has_data()
    assert plt.get_fignums() == [figure.number]
    assert dict(plt.rcParams) == settings
    assert right.get_xlabel()
    assert right.get_ylabel()
    figure.canvas.draw()
