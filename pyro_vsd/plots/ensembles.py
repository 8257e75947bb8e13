"""A figure of an ensemble: the members' weights and scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_vsd.plots.style import GREY, array, finish, look, new_axes
from pyro_vsd.prediction import Stacking

__all__ = ["members"]


def members(ensemble: Any, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Weights of an ensemble's members as bars, and on a second axis their log-density of held-out rows, each alone
    with its own best σ or temperature; dotted lines for the mixture as fitted, dashed with equal weights as trained.

    A member far below the others is a triangle at the lower edge with its number.

    :param ensemble: a :class:`~pyro_vsd.Ensemble`, or a :class:`~pyro_vsd.prediction.Stacking`.
    :param names: of the members; by default their λ, or numbers.

    >>> stacking = vsd.ensemble.Stacking.equal(3)
    >>> len(members(stacking).patches)
    3
    """
    stacking = getattr(ensemble, "stacking", ensemble)
    if not isinstance(stacking, Stacking):
        raise TypeError(f"ensemble must be a vsd.Ensemble or a Stacking, not a {type(ensemble).__name__}.")
    weights = getattr(ensemble, "kl_weight", range(len(stacking.weights)))
    label = "λ of the member" if names is None and hasattr(ensemble, "kl_weight") else "member"
    if names is None:
        names = ["plain" if w is None else "schedule" if callable(w) else f"{w:.3g}" for w in weights]
    if len(names) != len(stacking.weights):
        raise ValueError(f"names must be {len(stacking.weights)}, one of each member, not {len(names)}.")
    axes, places = new_axes(ax), range(len(names))
    axes.bar(places, array(stacking.weights), color=look(0).colour, alpha=0.6, width=0.7)
    axes.set_xticks(list(places), names)
    finish(axes, label, "weight")
    if stacking.scores is not None:
        scores, style, values = axes.twinx(), look(1), array(stacking.scores)
        top = max(stacking.after, stacking.before, float(values.max()))
        floor = top - 4 * max(top - float(np.median(values)), 1e-3)
        near = values >= floor
        scores.plot(np.flatnonzero(near), values[near], style.marker, color=style.colour, label="member alone")
        for place in np.flatnonzero(~near):
            scores.plot(place, floor, "v", color=style.colour, label="_below")
            scores.annotate(f"{values[place]:.3g}", (place, floor), (6, 0), textcoords="offset points", va="center")
        scores.axhline(stacking.after, color=style.colour, linestyle=":", label="mixture, fitted")
        scores.axhline(stacking.before, color=GREY, linestyle="--", label="mixture, equal")
        finish(scores, "", "held-out log-density", legend=False)
        # above the axes: inside there is no place that bars and points leave free
        scores.legend(frameon=False, fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        scores.spines["right"].set_visible(True)
    return axes
