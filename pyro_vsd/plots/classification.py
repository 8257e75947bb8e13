"""Figures of predicted classes: calibration, entropies, out-of-distribution detection, selective prediction."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_vsd import metrics
from pyro_vsd._utils import check_integer
from pyro_vsd.metrics.base import Classes, has_classes, probabilities
from pyro_vsd.metrics.out_of_distribution import Score
from pyro_vsd.metrics.selective import Certainty, Loss
from pyro_vsd.plots.style import GREY, array, finish, look, named, new_axes
from pyro_vsd.prediction import Prediction
from pyro_vsd.prediction.base import Array, to_tensor

__all__ = ["entropy_cdf", "entropy_histogram", "ood_roc", "reliability", "risk_coverage"]

# More points of a curve than a page can show.
_MAX_POINTS = 4096


def reliability(
    prediction: Classes | Mapping[str, Classes],
    y: Array,
    *,
    num_bins: int = 15,
    min_rows: int = 5,
    ax: Axes | None = None,
) -> Axes:
    """Accuracy against confidence, in bins, with 95 % Wilson intervals; below the diagonal a model is too sure.

    One prediction is drawn as bars with its gaps to the confidence, several as lines. Small numbers at the bottom are
    the rows of each bin.

    :param prediction: one, in any form the metrics take, or several by name, on the same inputs.
    :param y: labels, ``(N,)``.
    :param min_rows: bins of fewer rows are not drawn, since their accuracy is chance; they count in the ECE.

    >>> ax = reliability(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1]), min_rows=1)
    >>> ax.get_xlabel()
    'confidence'
    """
    check_integer("min_rows", min_rows, 1)
    axes, series = new_axes(ax), named(prediction)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":", label="_diagonal")
    for index, (name, one) in enumerate(series.items()):
        style, bins = look(index), metrics.reliability_bins(one, y, num_bins)
        middle = (bins.edges[1:] + bins.edges[:-1]) / 2
        low, high = _wilson(bins.accuracy, bins.size)
        shown = bins.size >= min_rows
        error = array(torch.stack([bins.accuracy - low, high - bins.accuracy]).clamp(min=0)[:, shown])
        at, accuracy, confidence = (array(v[shown]) for v in (middle, bins.accuracy, bins.confidence))
        label = f"{name}, ECE {metrics.ece(one, y, num_bins):.3f}".removeprefix(", ")
        if len(series) == 1:
            width = 1 / num_bins
            axes.bar(at, accuracy, width, color=style.colour, edgecolor="white", alpha=0.55, label=label)
            hatched: dict[str, Any] = {"fill": False, "edgecolor": "#D55E00", "linewidth": 0.8, "hatch": "////"}
            axes.bar(at, confidence - accuracy, width, bottom=accuracy, label="gap to confidence", **hatched)
            axes.errorbar(at, accuracy, error, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        else:
            points: dict[str, Any] = {"marker": style.marker, "markersize": 4, "elinewidth": 0.7}
            axes.errorbar(confidence, accuracy, error, label=label, **style.stroke(1.4), **points)
        colour = "black" if len(series) == 1 else style.colour
        for place, size in zip(at, bins.size[shown].long().tolist(), strict=True):
            height = 0.015 + 0.045 * (len(series) - 1 - index)  # the first series on top, as in the legend
            axes.text(place, height, _short(size), ha="center", color=colour, fontsize="xx-small")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return finish(axes, "confidence", "accuracy")


def entropy_histogram(prediction: Classes | Mapping[str, Classes], *, bins: int = 30, ax: Axes | None = None) -> Axes:
    """Density of the predictive entropy: best near zero in distribution, and spread out outside of it.

    :param prediction: one, or several by name, such as in- and out-of-distribution inputs, or several methods.

    >>> probs = torch.rand(100, 3).softmax(-1)
    >>> entropy_histogram({"in": probs, "out": probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)}).get_ylabel()
    'density'
    """
    axes, series = new_axes(ax), named(prediction)
    top = _largest_entropy(series)
    for index, (name, one) in enumerate(series.items()):
        style = look(index)
        density, edges = np.histogram(array(metrics.predictive_entropy(one)), bins, (0, top), density=True)
        axes.stairs(density, edges, fill=True, color=style.colour, alpha=0.18, label="_fill")
        hatch = style.hatch if len(series) <= 2 else None  # more than two would cover each other
        axes.stairs(density, edges, hatch=hatch, label=name or "_single", **style.stroke(1.4))
    axes.set_xlim(0, top)
    return finish(axes, "predictive entropy (nats)", "density")


def entropy_cdf(prediction: Classes | Mapping[str, Classes], *, ax: Axes | None = None) -> Axes:
    """Share of rows with at most that predictive entropy; out of distribution, lower lines are better.

    :param prediction: one, or several by name.

    >>> entropy_cdf(torch.rand(100, 3).softmax(-1)).get_ylabel()
    'share of rows'
    """
    axes, series = new_axes(ax), named(prediction)
    top = _largest_entropy(series)
    for index, (name, one) in enumerate(series.items()):
        entropy = array(metrics.predictive_entropy(one).sort().values)
        ranks = array(_thin(torch.arange(1, len(entropy) + 1)))
        x, share = entropy[ranks - 1], ranks / len(entropy)
        # from (0, 0) to the right edge, also where all entropies are equal
        x, share = np.concatenate([[0], x, [max(top, x[-1])]]), np.concatenate([[0], share, [1]])
        axes.step(x, share, where="post", label=name or "_single", **look(index).stroke())
    axes.set(xlim=(0, top), ylim=(0, 1.02))
    return finish(axes, "predictive entropy (nats)", "share of rows")


def ood_roc(
    inside: Classes | Mapping[str, Classes],
    outside: Classes | Mapping[str, Classes],
    *,
    score: Score = "max_probability",
    ax: Axes | None = None,
) -> Axes:
    """Accepted in-distribution rows against accepted out-of-distribution rows; the upper left corner is best.

    :param inside: prediction on in-distribution inputs, or scores ``(N,)``; or several methods by name.
    :param outside: the same on out-of-distribution inputs, with the same names.
    :param score: the score that ranks the rows of predictions.

    >>> ood_roc(torch.tensor([3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0])).get_lines()[-1].get_label()
    'AUROC 0.917'
    """
    axes, positives, negatives = new_axes(ax), named(inside), named(outside)
    if positives.keys() != negatives.keys():
        raise ValueError(f"inside and outside must have the same names, not {[*positives]} and {[*negatives]}.")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":", label="_chance")
    for index, name in enumerate(positives):
        scores = _scores(positives[name], score), _scores(negatives[name], score)
        fpr, tpr = (array(_thin(part)) for part in metrics.roc_curve(*scores))
        label = f"{name}, AUROC {metrics.auroc(*scores):.3f}".removeprefix(", ")
        axes.plot(fpr, tpr, label=label, **look(index).stroke())
    axes.set(xlim=(-0.01, 1), ylim=(0, 1.01))
    return finish(axes, "accepted out of distribution (FPR)", "accepted in distribution (TPR)")


def risk_coverage(
    prediction: Classes | Mapping[str, Classes],
    y: Array,
    *,
    score: Certainty | None = None,
    loss: Loss | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Loss of the rows that are kept, against their share; lower is better. Dotted: rows kept at random.

    :param prediction: one of classes or of a regression, or several by name, on the same inputs.
    :param y: their targets.
    :param score: the ranking of rows, as in :func:`pyro_vsd.metrics.risk_coverage`.
    :param loss: from prediction and y to one loss for each row; by default the error or the squared error.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> risk_coverage(probs, torch.tensor([0, 1, 1])).get_lines()[1].get_label()
    'AURC 0.111'
    """
    axes, series = new_axes(ax), named(prediction)
    for index, (name, one) in enumerate(series.items()):
        style, curve = look(index), metrics.risk_coverage(one, y, score=score, loss=loss)
        label = f"{name}, AURC {metrics.aurc(one, y, score=score, loss=loss):.3g}".removeprefix(", ")
        axes.axhline(float(curve.risk[-1]), color=style.colour, linewidth=0.8, linestyle=":", label="_random")
        # left of its first point the most certain rows are kept or rejected together
        coverage, risk = torch.cat([curve.coverage[:1] * 0, curve.coverage]), torch.cat([curve.risk[:1], curve.risk])
        axes.step(array(coverage), array(risk), where="pre", label=label, **style.stroke())
    axes.plot([], [], color=GREY, linewidth=0.8, linestyle=":", label="kept at random")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0 if axes.get_ylim()[1] > 0 else None)
    what = "loss" if loss else "error rate" if all(map(has_classes, series.values())) else "squared error"
    return finish(axes, "coverage (share of rows kept)", f"{what} of the rows kept")


def _short(count: int) -> str:
    """A count in at most four signs: 4,500 rows are 4.5k."""
    return str(count) if count < 1000 else f"{count / 1000:.2g}k" if count < 99_500 else f"{count / 1000:.0f}k"


def _scores(prediction: Classes, score: Score) -> Tensor:
    if not isinstance(prediction, Prediction) and prediction.ndim == 1:
        return to_tensor(prediction)
    return metrics.ood_score(prediction, score)


def _largest_entropy(series: Mapping[str, Classes]) -> float:
    """Entropy of equally probable classes, of the largest number of classes."""
    return math.log(max(probabilities(one).shape[-1] for one in series.values()))


def _thin(points: Tensor) -> Tensor:
    """At most ``_MAX_POINTS`` of the points, evenly spaced, with the first and the last."""
    number = min(len(points), _MAX_POINTS)
    return points[torch.linspace(0, len(points) - 1, number, dtype=torch.float64).round().long()]


def _wilson(share: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """95 % interval of a share of ``size`` rows; unlike the standard error it is not zero at a share of 0 or 1."""
    z = 1.96
    centre = (share + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * (share * (1 - share) / size + z**2 / (4 * size**2)).sqrt()
    return centre - half, centre + half
