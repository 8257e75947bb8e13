"""Size of a layer's weight, as the paper's generalisation bound counts it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_vsd.metrics.inputs import Array
from pyro_vsd.prediction.checks import to_tensor

__all__ = ["spectral_norm", "stable_rank"]


def spectral_norm(weight: Array | nn.Module) -> float:
    r"""Largest singular value :math:`\|\Theta\|_2` of a weight: the most it stretches an input. Lower is better.

    :param weight: a weight ``(out, ...)`` or a layer that has one; flattened to ``(out, -1)``.

    >>> spectral_norm(torch.diag(torch.tensor([3.0, 4.0])))
    4.0
    """
    return float(torch.linalg.matrix_norm(_matrix(weight), 2))


def stable_rank(weight: Array | nn.Module) -> float:
    r""":math:`\|\Theta\|_F^2 / \|\Theta\|_2^2`: how many directions matter, from 1 to the rank. Lower is better.

    0 for a weight of zeros.

    :param weight: a weight ``(out, ...)`` or a layer that has one; flattened to ``(out, -1)``.

    >>> stable_rank(torch.diag(torch.tensor([3.0, 4.0])))
    1.5625
    """
    matrix = _matrix(weight)
    top = torch.linalg.matrix_norm(matrix, 2)
    return float((matrix / top).square().sum()) if top > 0 else 0.0


def _matrix(weight: Array | nn.Module) -> Tensor:
    matrix = to_tensor(weight.get_parameter("weight") if isinstance(weight, nn.Module) else weight).double()
    if matrix.dim() < 2 or not matrix.numel():
        raise ValueError(f"expected a weight of shape (out, ...), two dimensions or more, got {tuple(matrix.shape)}.")
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"expected a finite weight, got {int((~matrix.isfinite()).sum())} NaN or infinite entries.")
    return matrix.flatten(1)
