"""Figures of predicted regression targets."""

from typing import Literal

from matplotlib.axes import Axes
from torch import Tensor

from pyro_vsd._utils import check_choice, check_integer
from pyro_vsd.plots.style import array, finish, look, new_axes
from pyro_vsd.prediction import RegressionPrediction
from pyro_vsd.prediction.base import Array, to_tensor

__all__ = ["band"]


def band(
    x: Array,
    prediction: RegressionPrediction,
    *,
    data: tuple[Array, Array] | None = None,
    part: Literal["total", "aleatoric", "epistemic"] = "total",
    num_sigmas: int = 3,
    ax: Axes | None = None,
) -> Axes:
    """Predictive mean over one input, with bands of 1 to ``num_sigmas`` standard deviations.

    The bands show ``part``; with the total, dashed lines show how much of the widest band is epistemic.

    :param x: inputs ``(N,)`` or ``(N, 1)``, in any order.
    :param prediction: of one output, ``(N,)`` or ``(N, 1)``.
    :param data: training inputs and targets, drawn as points.

    >>> x = torch.linspace(-1, 1, 20)
    >>> prediction = RegressionPrediction.from_samples(torch.stack([x, -x]), torch.tensor(0.1))
    >>> len(band(x, prediction).collections)  # three bands
    3
    """
    check_choice("part", part, ("total", "aleatoric", "epistemic"))
    check_integer("num_sigmas", num_sigmas, 1)
    inputs = _column("x", to_tensor(x, name="x"))
    mean = _column("prediction", prediction.mean)
    if len(inputs) != len(mean):
        raise ValueError(f"x has {len(inputs)} rows, the prediction {len(mean)}. Give the inputs of the prediction.")
    variance = prediction.variance if part == "total" else getattr(prediction, part)
    scale, epistemic = _column("prediction", variance).sqrt(), _column("prediction", prediction.epistemic).sqrt()
    order = inputs.argsort()
    at, centre, sigma, own = (array(values[order]) for values in (inputs, mean, scale, epistemic))

    axes, main, second = new_axes(ax), look(0), look(1)
    for sigmas in range(num_sigmas, 0, -1):
        # each band lies on the wider ones, so the shades add up
        label = f"±{', '.join(str(k) for k in range(1, num_sigmas + 1))} σ {part}" if sigmas == num_sigmas else "_inner"
        low, high = centre - sigmas * sigma, centre + sigmas * sigma
        axes.fill_between(at, low, high, color=main.colour, alpha=0.16, linewidth=0, label=label)
    axes.plot(at, centre, color=main.colour, linewidth=1.8, label="mean")
    if part == "total":
        for sign, label in ((1, f"±{num_sigmas} σ epistemic"), (-1, "_lower")):
            axes.plot(at, centre + sign * num_sigmas * own, label=label, **second.stroke(1.2))
    if data is not None:
        points = (array(_column("data", to_tensor(values, name="data"))) for values in data)
        axes.plot(*points, "k.", markersize=4, label="data", zorder=3)
    return finish(axes, "x", "y")


def _column(name: str, values: Tensor) -> Tensor:
    values = values.detach().cpu()
    if values.dim() == 2 and values.shape[-1] == 1:
        values = values.squeeze(-1)
    if values.dim() != 1:
        raise ValueError(f"{name} must have shape (N,) or (N, 1), one input or output, not {tuple(values.shape)}.")
    return values
