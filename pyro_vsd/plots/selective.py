"""Pictures of deciding or abstaining."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.axes import Axes

from pyro_vsd.metrics import aurc
from pyro_vsd.metrics import risk_coverage as points
from pyro_vsd.metrics.base import Classes
from pyro_vsd.metrics.selective import Loss, Certainty
from pyro_vsd.plots.style import array, finish, look, named, new_axes
from pyro_vsd.prediction import ClassificationPrediction, Prediction

__all__ = ["risk_coverage"]


def risk_coverage(
    prediction: Classes | Mapping[str, Classes],
    y: Array,
    *,
    score: Certainty | None = None,
    loss: Loss | None = None,
    ax: Axes | None = None,
) -> Axes:
    """What loss remains on the rows that are kept, against their share; lower is better, and so is a steeper rise.

    Each curve steps where a threshold lets more rows in. The dotted lines are what refusing at random would leave.

    :param prediction: one, in any form the metrics take, or several by name, on the same inputs.
    :param y: their targets.
    :param score: what rows are ranked by, as in :func:`pyro_vsd.metrics.risk_coverage`.
    :param loss: from prediction and y to one loss for each row; the error or the squared error without.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> risk_coverage(probs, torch.tensor([0, 1, 1])).get_lines()[-1].get_label()
    'AURC 0.111'
    """
    axes, series = new_axes(ax), named(prediction)
    for index, (name, one) in enumerate(series.items()):
        style, curve = look(index), points(one, y, score=score, loss=loss)
        label = f"{name}, AURC {aurc(one, y, score=score, loss=loss):.3g}".removeprefix(", ")
        axes.axhline(float(curve.risk[-1]), color=style.colour, linewidth=0.8, linestyle=":", label="_random")
        # left of its first point the surest rows are kept or refused together
        coverage, risk = torch.cat([curve.coverage[:1] * 0, curve.coverage]), torch.cat([curve.risk[:1], curve.risk])
        axes.step(
            array(coverage), array(risk), where="pre",
            color=style.colour, linestyle=style.line, linewidth=1.6, label=label,
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0 if axes.get_ylim()[1] > 0 else None)
    numbers = any(isinstance(p, Prediction) and not isinstance(p, ClassificationPrediction) for p in series.values())
    what = "loss" if loss is not None else "squared error" if numbers else "error rate"
    return finish(axes, "coverage (share of rows kept)", f"{what} of the rows kept")
