"""The figure of a diagnosis."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pyro_vsd.plots.noise import noise_variances
from pyro_vsd.plots.style import GREY, finish, look, one_axes

__all__ = ["diagnosis"]


def diagnosis(report: Any, *, axes: Sequence[Axes] | NDArray[Any] | None = None) -> list[Axes]:
    """Four panels: noise variances, the objective's terms per example, the noise against the best, and NLL by samples.

    :param report: of ``vsd.diagnose``.
    :param axes: four axes to draw on, in a sequence or an array; a new figure without.

    >>> x = torch.randn(50, 3)
    >>> model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=50)
    >>> [ax.get_title('left') for ax in diagnosis(vsd.diagnose(model, vsd.VSDGuide(model), (x, x[:, 0])))]
    ['noise variances', 'objective', 'noise', 'samples']
    """
    if axes is None:
        axes = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained")[1]
    panels = [one_axes("axes", ax) for ax in np.atleast_1d(np.asarray(axes, dtype=object)).flat]
    if len(panels) != 4:
        raise ValueError(f"axes must be four, not {len(panels)}. Use plt.subplots(2, 2)[1].")
    draws = {"noise variances": _variances, "objective": _objective, "noise": _noise, "samples": _samples}
    for panel, (title, draw) in zip(panels, draws.items(), strict=True):
        draw(panel, report)
        panel.set_title(title, loc="left", fontsize="medium")
    return panels


def _variances(ax: Axes, report: Any) -> None:
    noise_variances({name: alpha.clamp(min=1e-30) for name, alpha in report.alpha.items()}, ax=ax)
    for level, name in ((1e-4, "collapsed"), (10.0, "exploded")):
        ax.axhline(level, color=GREY, linewidth=0.8, linestyle="--", label="_limit")
        below = level < 1
        ax.annotate(
            f"{name} {'below' if below else 'above'}", (1, level), xycoords=("axes fraction", "data"),
            xytext=(-2, -2 if below else 2), textcoords="offset points", ha="right", va="top" if below else "bottom",
            fontsize="x-small", color=GREY,
        )  # fmt: skip
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 1e-5), 100 * max(high, 10.0))  # room for the legend


def _objective(ax: Axes, report: Any) -> None:
    values = report.objective
    if values["log_likelihood"] is None:
        return _nothing(ax, "not measured")
    weight = values["kl_weight"]
    bars = {"negative log-likelihood": -values["log_likelihood"]}
    if values["constant"] is not None:
        bars["of a constant"] = -values["constant"]
    kl = {name: site["kl"] for name, site in report.sites.items() if site["kl"] is not None}
    bars |= {f"weighted KL of {name}": weight * value for name, value in kl.items()}
    _bars(ax, bars)
    finish(ax, "nats per example", "", legend=False)
    return None


def _noise(ax: Axes, report: Any) -> None:
    gains = {name: site["gain"] for name, site in report.sites.items() if site.get("gain")}
    if not gains:
        return _nothing(ax, "no weight whose best covariance is known")
    parts = {"now": "this guide", "rescaled": "its best size", "best_diagonal": "best independent", "best": "best"}
    for row, gain in enumerate(gains.values()):
        above = {key: (gain[key] - gain["best"]) / report.objective["num_data"] for key in parts}
        ax.plot([0, max(above.values())], [row, row], color=GREY, linewidth=0.8, label="_range")
        for index, (key, label) in enumerate(parts.items()):
            style = look(index)
            ax.plot(
                above[key], row, style.marker, color=style.colour, markersize=8 - index,
                label=label if row == 0 else "_again", markerfacecolor="none" if key == "rescaled" else style.colour,
            )  # fmt: skip
    ax.set_yticks(range(len(gains)), list(gains), fontsize="small")
    ax.set_ylim(len(gains) - 0.4, -0.6)
    finish(ax, "above the best covariance, nats per example", "")
    return None


def _samples(ax: Axes, report: Any) -> None:
    curve = report.prediction.get("nll_by_samples")
    if not curve:
        return _nothing(ax, "no predictions")
    style = look(0)
    ax.plot(list(curve), list(curve.values()), color=style.colour, marker=style.marker, markersize=4, linewidth=1.4)
    ax.set_xscale("log")
    finish(ax, "posterior samples", f"NLL, {report.prediction['on']}", legend=False)
    return None


def _bars(ax: Axes, bars: dict[str, float]) -> None:
    for row, (name, value) in enumerate(bars.items()):
        style = look(0 if row < 2 else 1)
        ax.barh(row, value, color=GREY if name == "of a constant" else style.colour, height=0.6)
    ax.set_yticks(range(len(bars)), list(bars), fontsize="small")
    ax.invert_yaxis()


def _nothing(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)
    ax.set_axis_off()
