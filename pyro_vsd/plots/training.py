"""Figures of a training run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_vsd.plots.style import finish, look, new_axes

__all__ = ["elbo_terms"]


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
    weighted = [
        {name: float(step["kl_weight"]) * float(kl) for name, kl in step["kl"].items()} for step in history
    ]  # for each step, by site
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
        style = look(index)
        width = 1.6 if index < 3 else 0.9
        if window > 1:
            axes.plot(steps, values, color=style.colour, linewidth=0.5, alpha=0.3, label="_values")
        means = np.convolve(values, np.full(window, 1 / window), "valid")
        axes.plot(steps[window - 1 :], means, color=style.colour, linestyle=style.line, linewidth=width, label=name)
    if min(min(values) for values in lines.values()) > 0:
        axes.set_yscale("log")
    return finish(axes, "step", "nats, full data")
