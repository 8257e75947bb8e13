"""What a prediction accepts, checked: targets as tensors or arrays, and tensors that fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_labels", "check_numbers", "check_target", "real", "shaped", "to_tensor"]


def to_tensor(values: Tensor | NDArray[Any], device: torch.device | None = None) -> Tensor:
    """A tensor of an array, copied only where torch cannot share it: read-only (as pandas gives them), reversed."""
    if not isinstance(values, Tensor):
        array = numpy.require(values, requirements=["C", "W"])
        if array.dtype.kind not in "biufc":
            raise TypeError(f"expected a tensor or an array of numbers, got {type(values).__name__} ({array.dtype}).")
        values = torch.as_tensor(array)
    return values.detach().to(device)


def check_target(y: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse targets that are not of the expected shape, before broadcasting turns ``(N, 1)`` into ``(N, N)``."""
    shape = tuple(y.shape)
    if shape == expected:
        return
    remedy = "Give one target for each row of the prediction."
    if shape == (*expected, 1):
        remedy = "Use y.squeeze(-1)."
    elif (*shape, 1) == expected:
        remedy = "Use y.unsqueeze(-1)."
    raise ValueError(f"expected y of shape {expected}, got {shape}. {remedy}")


def check_labels(y: Tensor, num_rows: int, num_classes: int) -> Tensor:
    """Labels ``(N,)`` as int64, or an error where the shape, the dtype or the range is wrong."""
    check_target(y, (num_rows,))
    if y.is_floating_point() or y.is_complex():
        raise ValueError(f"expected integer labels y, got {y.dtype}. Use y.long().")
    labels = y.long()
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ValueError(
            f"expected labels y between 0 and {num_classes - 1}, got {int(labels.min())} to {int(labels.max())}. "
            "Number the classes from 0, and leave out rows without a label."
        )
    return labels


def check_numbers(name: str, value: Any) -> None:
    """Refuse what is no tensor of floating-point numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected {name} as a tensor, got {type(value).__name__}.")
    if not value.is_floating_point():
        raise ValueError(f"expected {name} of floating-point numbers, got {value.dtype}.")


def real(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Targets that can be subtracted from: none of complex numbers, and truth values as numbers."""
    if target.is_complex():
        raise ValueError(f"expected real targets y, got {target.dtype}.")
    return target.to(dtype) if target.dtype == torch.bool else target


def shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A detached tensor, or an error where it is not of that shape."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)}, got {tuple(value.shape)}.")
    return value.detach()
