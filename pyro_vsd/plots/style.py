"""Axes, colours and line styles that all figures share. Nothing global is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["GREY", "Look", "array", "finish", "look", "named", "new_axes", "one_axes"]

GREY = "#666666"

# The colours of Okabe and Ito, which colour-blind people tell apart, without the yellow that white paper swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Five styles against seven colours: 35 series until a pair returns, and neighbours differ in both, also in grey.
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 1.5, 1, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v")
_HATCHES = ("", "///", "...", "\\\\\\", "xxx")

LineStyle = str | tuple[int, tuple[float, ...]]


class Look(NamedTuple):
    """How one of several series is drawn."""

    colour: str
    line: LineStyle
    marker: str
    hatch: str


def look(index: int) -> Look:
    """The look of the series of that index."""
    return Look(
        _COLOURS[index % len(_COLOURS)],
        _LINES[index % len(_LINES)],
        _MARKERS[index % len(_MARKERS)],
        _HATCHES[index % len(_HATCHES)],
    )


def new_axes(ax: Axes | None) -> Axes:
    """The given axes, or those of a new figure that notebooks show."""
    if ax is not None:
        return one_axes("ax", ax)
    _, fresh = plt.subplots(figsize=(5.0, 3.6), layout="constrained")
    return fresh


def one_axes(name: str, ax: Any) -> Axes:
    """Axes, or an error that names the argument: ``plt.subplots`` gives an array of them where there are several."""
    if not isinstance(ax, Axes):
        size = getattr(ax, "shape", None)
        got = f"an array of shape {size}. Take one of them: {name}.flat[0]" if size is not None else f"{ax!r}"
        raise TypeError(f"expected {name} as one matplotlib Axes, got {got}.")
    return ax


def array(tensor: Tensor) -> NDArray[Any]:
    """Numbers that matplotlib can draw."""
    return tensor.detach().cpu().numpy()


def named(things: Any) -> dict[str, Any]:
    """Things by name; a single one has the empty name, which no legend shows."""
    if isinstance(things, Mapping):
        if not things:
            raise ValueError("expected at least one entry to draw, got an empty dict.")
        return dict(things)
    return {"": things}


def finish(ax: Axes, xlabel: str, ylabel: str, legend: bool | None = None) -> Axes:
    """Labels, a frame of two sides, and a legend where something has a name."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    if legend or (legend is None and ax.get_legend_handles_labels()[1]):
        ax.legend(frameon=False, fontsize="small")
    return ax
