"""Figures of a layer's noise: its covariance, and its variances."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_vsd.plots.style import GREY, array, finish, look, named, new_axes
from pyro_vsd.prediction.base import to_tensor

__all__ = ["droprates", "noise_covariance", "noise_variances"]


def noise_covariance(noise: Any, site: str | None = None, *, correlation: bool = False, ax: Axes | None = None) -> Axes:
    """Heat map of a layer's noise covariance: light is positive, dark negative, the middle zero.

    The colours end at the largest entry off the diagonal: on a scale for the diagonal it would be invisible.

    :param noise: a guide; a distribution with a ``covariance_matrix``, such as ``guide.noise(site)``; or the matrix
        itself, ``(K, K)``.
    :param site: the weight, for a guide that has several.
    :param correlation: divide by the standard deviations.

    >>> noise_covariance(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), correlation=True).images[0].get_array()[0, 1].item()
    0.5
    """
    if hasattr(noise, "sites"):
        weights = list(_variances(noise))
        if site is None and len(weights) != 1:
            raise ValueError(f"site must be one of the guide's weights, {weights}.")
        noise = noise.noise(site or weights[0])
    matrix = to_tensor(getattr(noise, "covariance_matrix", noise), name="noise").cpu()
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.numel():
        raise ValueError(f"noise must be a covariance of shape (K, K), not {tuple(matrix.shape)}.")
    if correlation:
        scale = matrix.diagonal().sqrt()
        matrix = matrix / scale.unsqueeze(-1) / scale
    axes = new_axes(ax)
    off_diagonal = float((matrix - matrix.diagonal().diag()).abs().max())
    limit = off_diagonal or float(matrix.abs().max())
    # cividis rises evenly in lightness, so signs survive greyscale, and it looks the same to colour-blind readers
    image = axes.imshow(array(matrix), cmap="cividis", vmin=-limit, vmax=limit, interpolation="nearest")
    label = "correlation" if correlation else "covariance"
    # inside the axes, so that the bar is as tall as the square image and its label belongs to the panel
    bar = axes.inset_axes((1.04, 0.0, 0.05, 1.0))
    axes.figure.colorbar(image, cax=bar, label=label, extend="max" if off_diagonal else "neither")
    axes.set(xlabel="noise unit", ylabel="noise unit")
    return axes


def noise_variances(alpha: Tensor | Mapping[str, Tensor], *, ax: Axes | None = None) -> Axes:
    """Noise variances of a layer's units, on a log scale; at 1, the dotted line, noise is as large as the signal.

    One layer is drawn unit by unit; several, of different widths, as sorted curves over the share of units.

    :param alpha: a guide; or noise variances ``(K,)`` of one layer, or of several by name.

    >>> noise_variances({"first": torch.tensor([0.1, 0.3]), "second": torch.tensor([0.5])}).get_xlabel()
    'share of units'
    """
    axes, layers = new_axes(ax), named(_variances(alpha) if hasattr(alpha, "sites") else alpha)
    for index, (name, values) in enumerate(layers.items()):
        variances = to_tensor(values, name="alpha").cpu()
        if variances.dim() != 1 or not len(variances) or not bool((variances > 0).all()):
            raise ValueError(f"alpha{' of ' + name if name else ''} must be positive of shape (K,), not {variances}.")
        style = look(index)
        if len(layers) == 1:
            units, heights = range(len(variances)), array(variances)
            # stems only where there is room for them
            if len(variances) <= 100:
                axes.vlines(units, heights.min() / 1.5, heights, color=style.colour, linewidth=0.8, alpha=0.5)
            axes.plot(units, heights, style.marker, color=style.colour, markersize=3.5, label=name or "_single")
        else:
            heights, edges = array(variances.sort().values), array(torch.linspace(0, 1, len(variances) + 1))
            label = f"{name} ({len(variances)} units)"
            axes.stairs(heights, edges, baseline=None, label=label, **style.stroke())
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":", label="_one")
    axes.set_yscale("log")
    return finish(axes, "unit" if len(layers) == 1 else "share of units", "noise variance α")


def _variances(guide: Any) -> dict[str, Tensor]:
    """The noise variances of a guide's weights."""
    return {name: guide.alpha(name).flatten() for name, site in guide.sites.items() if site.kind == "weight"}


def droprates(alpha: Tensor | Mapping[str, Tensor], *, ax: Axes | None = None) -> Axes:
    """The old name of :func:`noise_variances`."""
    warnings.warn("plots.droprates is now plots.noise_variances.", DeprecationWarning, stacklevel=2)
    return noise_variances(alpha, ax=ax)
