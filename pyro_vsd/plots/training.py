"""Figures of a training run: the terms of its objective, and its diagnosis."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pyro_vsd.plots.noise import noise_variances
from pyro_vsd.plots.style import GREY, finish, look, new_axes, one_axes

__all__ = ["diagnosis", "elbo_terms"]


def elbo_terms(
    history: Sequence[Mapping[str, Any]], *, sites: bool = False, window: int = 1, ax: Axes | None = None
) -> Axes:
    """Loss over a training run and its parts: negative log-likelihood plus the weighted KL.

    On a log scale where all values are positive.

    :param history: ``elbo.terms`` of every step: ``loss``, ``log_likelihood``, ``kl_weight`` and ``kl`` by site.
    :param sites: draw the weighted KL of every site too.
    :param window: draw means over this many steps, on top of the values in pale.

    >>> steps = [{"loss": 3.0 / t, "log_likelihood": -2.0 / t, "kl_weight": 1.0, "kl": {"w": 1.0 / t}} for t in (1, 2)]
    >>> [line.get_label() for line in elbo_terms(steps).get_lines()]
    ['loss', 'negative log-likelihood', 'weighted KL']
    """
    if not len(history):
        raise ValueError("history is empty. Append elbo.terms after each step.")
    missing = {"loss", "log_likelihood", "kl_weight", "kl"} - set(history[0])
    if missing:
        raise ValueError(f"history must hold elbo.terms of every step; {sorted(missing)} are missing.")
    # for each step, by site
    weighted = [{name: float(step["kl_weight"]) * float(kl) for name, kl in step["kl"].items()} for step in history]
    lines = {
        "loss": [float(step["loss"]) for step in history],
        "negative log-likelihood": [-float(step["log_likelihood"]) for step in history],
        "weighted KL": [sum(step.values()) for step in weighted],
    }
    if sites:
        lines |= {f"weighted KL of {name}": [step[name] for step in weighted] for name in weighted[0]}
    if not 1 <= window <= len(history):
        raise ValueError(f"window must lie between 1 and the {len(history)} steps of history, not {window}.")
    axes, steps = new_axes(ax), np.arange(1, len(history) + 1)
    for index, (name, values) in enumerate(lines.items()):
        style, width = look(index), 1.6 if index < 3 else 0.9
        if window > 1:
            axes.plot(steps, values, color=style.colour, linewidth=0.5, alpha=0.3, label="_values")
        means = np.convolve(values, np.full(window, 1 / window), "valid")
        axes.plot(steps[window - 1 :], means, label=name, **style.stroke(width))
    if min(min(values) for values in lines.values()) > 0:
        axes.set_yscale("log")
    return finish(axes, "step", "nats, full data")


def diagnosis(report: Any, *, axes: Sequence[Axes] | NDArray[Any] | None = None) -> list[Axes]:
    """Four panels: noise variances, the objective's terms per example, the noise against the best, and NLL by samples.

    :param report: of ``vsd.diagnose``.
    :param axes: four axes, in a sequence or an array; a new figure without.

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
        _nothing(ax, "not measured")
        return
    bars = {"negative log-likelihood": -values["log_likelihood"]}
    if values["constant"] is not None:
        bars["of a constant"] = -values["constant"]
    kl = {name: site["kl"] for name, site in report.sites.items() if site["kl"] is not None}
    bars |= {f"weighted KL of {name}": values["kl_weight"] * value for name, value in kl.items()}
    for row, (name, value) in enumerate(bars.items()):
        colour = GREY if name == "of a constant" else look(0 if row < 2 else 1).colour
        ax.barh(row, value, color=colour, height=0.6)
    ax.set_yticks(range(len(bars)), list(bars), fontsize="small")
    ax.invert_yaxis()
    finish(ax, "nats per example", "", legend=False)


def _noise(ax: Axes, report: Any) -> None:
    known = {name: site["better_noise"] for name, site in report.sites.items() if site.get("better_noise")}
    if not known:
        _nothing(ax, "no weight whose best covariance is known")
        return
    parts = {"now": "this guide", "rescaled": "this guide, best size"}
    parts |= {"best_diagonal": "best independent noise", "best": "best noise"}
    for row, loss in enumerate(known.values()):
        above = {key: (loss[key] - loss["best"]) / report.objective["num_data"] for key in parts}
        ax.plot([0, max(above.values())], [row, row], color=GREY, linewidth=0.8, label="_range")
        for index, (key, label) in enumerate(parts.items()):
            style = look(index)
            ax.plot(
                above[key], row, style.marker, color=style.colour, markersize=8 - index,
                label=label if row == 0 else "_again", markerfacecolor="none" if key == "rescaled" else style.colour,
            )  # fmt: skip
    ax.set_yticks(range(len(known)), list(known), fontsize="small")
    ax.set_ylim(len(known) - 0.4, -0.6 - 0.5 * len(known))  # room for the legend
    finish(ax, "loss above that of the best noise, nats per example", "")


def _samples(ax: Axes, report: Any) -> None:
    curve = report.prediction.get("nll_by_samples")
    if not curve:
        _nothing(ax, "no predictions")
        return
    style = look(0)
    ax.plot(list(curve), list(curve.values()), color=style.colour, marker=style.marker, markersize=4, linewidth=1.4)
    ax.set_xscale("log")
    finish(ax, "posterior samples", f"NLL, {report.prediction['on']}", legend=False)


def _nothing(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)
    ax.set_axis_off()
