"""A figure of an ensemble: the members' weights and scores."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from pyro_vsd.plots.style import GREY, array, finish, look, new_axes
from pyro_vsd.prediction import Stacking

__all__ = ["members"]


def members(ensemble: Any, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Weights of an ensemble's members as bars, and on a second axis their log-density of held-out rows, each alone;
    dotted lines for the mixture as fitted, dashed with equal weights and members as trained.

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
    if names is None:
        names = ["plain" if w is None else "schedule" if callable(w) else f"{w:.3g}" for w in weights]
    if len(names) != len(stacking.weights):
        raise ValueError(f"names must be {len(stacking.weights)}, one of each member, not {len(names)}.")
    axes, places = new_axes(ax), range(len(names))
    axes.bar(places, array(stacking.weights), color=look(0).colour, alpha=0.6, width=0.7)
    axes.set_xticks(list(places), names)
    label = "member" if weights is not getattr(ensemble, "kl_weight", None) else "λ of the member"
    finish(axes, label, "weight")
    if stacking.scores is not None:
        scores, style = axes.twinx(), look(1)
        scores.plot(places, array(stacking.scores), style.marker, color=style.colour, label="member alone")
        scores.axhline(stacking.after, color=style.colour, linestyle=":", label="mixture, fitted")
        scores.axhline(stacking.before, color=GREY, linestyle="--", label="mixture, equal")
        finish(scores, "", "held-out log-density", legend=True)
        scores.spines["right"].set_visible(True)
    return axes
