"""Checks of shapes and values that the distributions share."""

import numbers
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_vectors",
    "broadcast_batches",
    "check_finite",
    "check_floating",
    "check_positive_finite",
    "event_axis",
    "expanded_batch",
    "unit_shaped",
]


def check_floating(name: str, value: Any) -> None:
    """Raises unless ``value`` is a tensor of real floating-point numbers with at least one entry."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}.")
    if not value.is_floating_point():
        raise ValueError(f"{name} must hold floating-point numbers, not {value.dtype}.")
    if value.numel() == 0:
        raise ValueError(f"{name} must have at least one entry; its shape is {tuple(value.shape)}.")


def as_vectors(vectors: Tensor | None, alpha: Tensor) -> Tensor:
    """``vectors (..., T, K)`` that fit ``alpha (..., K)``; ``None`` means T = 0."""
    check_floating("alpha", alpha)
    if alpha.dim() < 1:
        raise ValueError("alpha must have a shape (..., K), one noise variance per unit: try alpha.expand(K).")
    K = alpha.shape[-1]
    if vectors is None:
        return alpha.new_zeros(0, K)
    if not isinstance(vectors, Tensor) or vectors.shape[-2:-1] != (0,):
        check_floating("vectors", vectors)
    if vectors.dim() < 2 or vectors.shape[-1] != K or 0 in vectors.shape[:-2]:
        raise ValueError(
            f"vectors must have a shape (..., T, {K}) to fit alpha of shape {tuple(alpha.shape)}, not "
            f"{tuple(vectors.shape)}. For T = 0 (no reflection) pass None."
        )
    if vectors.dtype != alpha.dtype:
        raise ValueError(f"vectors must have the dtype of alpha, {alpha.dtype}, not {vectors.dtype}.")
    return vectors


def broadcast_batches(**batches: Any) -> torch.Size:
    """The batch shape of named parameters, each given as ``name=(tensor, number of its event dimensions)``."""
    try:
        return torch.broadcast_shapes(*(tensor.shape[: tensor.dim() - dims] for tensor, dims in batches.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in batches.items())
        raise ValueError(f"the batch shapes of these do not broadcast: {shapes}.") from None


def expanded_batch(old: torch.Size, new: Any, name: str = "expand") -> torch.Size:
    """``new``, the argument of ``expand``, as a Size that a distribution of batch shape ``old`` can be expanded to."""
    new = torch.Size(new)
    fits = len(new) >= len(old) and all(o in (1, n) for o, n in zip(reversed(old), reversed(new), strict=False))
    if not fits:
        raise ValueError(f"{name}: the shape {tuple(old)} does not broadcast to {tuple(new)}.")
    return new


def event_axis(noise_dim: int, event_dim: int, shape: torch.Size, name: str = "noise_dim") -> int:
    """``noise_dim`` as a negative axis of an event of ``event_dim`` dimensions."""
    if not isinstance(noise_dim, numbers.Integral) or not -event_dim <= noise_dim < event_dim:
        raise ValueError(
            f"{name} must be an axis of the event {tuple(shape[len(shape) - event_dim :])}, from {-event_dim} to "
            f"{event_dim - 1}, not {noise_dim!r}."
        )
    return int(noise_dim) - event_dim if noise_dim >= 0 else int(noise_dim)


def unit_shaped(noise: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """A per-unit tensor ``(..., K)`` shaped to multiply events of rank ``event_dim`` along their axis ``noise_dim``."""
    shape = [1] * event_dim
    shape[noise_dim] = noise.shape[-1]
    return noise.reshape(noise.shape[:-1] + tuple(shape))


def check_positive_finite(name: str, value: Tensor) -> None:
    """Raises where a value is not positive and finite; NaN is neither."""
    _check(name, value, torch.isfinite(value) & (value > 0), "positive and finite")


def check_finite(name: str, value: Tensor) -> None:
    """Raises where a value is NaN or infinite."""
    _check(name, value, torch.isfinite(value), "finite")


def _check(name: str, value: Tensor, good: Tensor, word: str) -> None:
    if not bool(good.all()):
        raise ValueError(f"{name} must be {word}; one of {value.numel()} entries is {value[~good][0].item()}.")
