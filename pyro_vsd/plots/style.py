"""Axes, colours and line styles of all figures. No global setting changes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["GREY", "Look", "array", "finish", "look", "named", "new_axes", "one_axes"]

GREY = "#666666"

# The colours of Okabe and Ito for colour-blind readers, without yellow, which is invisible on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Five styles and seven colours: 35 series before a pair repeats, and neighbours differ in both, also in grey.
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 1.5, 1, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v")
_HATCHES = ("", "///", "...", "\\\\\\", "xxx")


class Look(NamedTuple):
    """How one of several series is drawn."""

    colour: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str
    hatch: str

    def stroke(self, width: float = 1.6) -> dict[str, Any]:
        """Options of a line."""
        return {"color": self.colour, "linestyle": self.line, "linewidth": width}


def look(index: int) -> Look:
    """The look of the series of that index."""
    number = index % len(_LINES)
    return Look(_COLOURS[index % len(_COLOURS)], _LINES[number], _MARKERS[number], _HATCHES[number])


def new_axes(ax: Axes | None) -> Axes:
    """The given axes, or those of a new figure."""
    return one_axes("ax", plt.subplots(figsize=(5.0, 3.6), layout="constrained")[1] if ax is None else ax)


def one_axes(name: str, ax: Any) -> Axes:
    """Axes; raises where it is none, such as the array that ``plt.subplots`` returns for several."""
    if not isinstance(ax, Axes):
        remedy = f" Take one of the array: {name}.flat[0]" if hasattr(ax, "shape") else ""
        raise TypeError(f"{name} must be one matplotlib Axes, not a {type(ax).__name__}.{remedy}")
    return ax


def array(tensor: Tensor) -> NDArray[Any]:
    """The array that matplotlib draws."""
    return tensor.detach().cpu().numpy()


def named(things: Any) -> dict[str, Any]:
    """Series by name; a single one has the empty name, without a legend."""
    if not isinstance(things, Mapping):
        return {"": things}
    if not things:
        raise ValueError("there is nothing to draw: the dict is empty.")
    return dict(things)


def finish(ax: Axes, xlabel: str, ylabel: str, legend: bool | None = None) -> Axes:
    """Labels, a frame of two sides, and a legend where a series has a name."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    if legend or (legend is None and ax.get_legend_handles_labels()[1]):
        ax.legend(frameon=False, fontsize="small")
    return ax
