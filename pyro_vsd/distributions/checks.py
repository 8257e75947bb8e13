"""Checks of shapes and values that the distributions share; each message says what was expected and what came."""

import numbers
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_vectors",
    "broadcast_noise",
    "event_axis",
    "expanded_batch",
    "finite",
    "floating",
    "positive_finite",
    "unit_shaped",
]


def floating(name: str, value: Any) -> None:
    """Raises where a value is not a tensor of real floating-point numbers, or is one without entries."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}.")
    if not value.is_floating_point():
        raise ValueError(f"{name}: expected floating-point numbers, got {value.dtype}.")
    if value.numel() == 0:
        raise ValueError(f"{name}: expected at least one entry, got shape {tuple(value.shape)}.")


def as_vectors(vectors: Tensor | None, alpha: Tensor) -> Tensor:
    """``vectors (..., T, K)`` that fit ``alpha (..., K)``; ``None`` means T = 0."""
    floating("alpha", alpha)
    if alpha.dim() < 1:
        raise ValueError(
            f"alpha: expected a shape (..., K), got {tuple(alpha.shape)}. Give one droprate per noise unit, for "
            "instance alpha.expand(K)."
        )
    K = alpha.shape[-1]
    if vectors is None:
        return alpha.new_zeros(0, K)
    if not isinstance(vectors, Tensor) or vectors.shape[-2:-1] != (0,):
        floating("vectors", vectors)
    if vectors.dim() < 2 or vectors.shape[-1] != K:
        raise ValueError(
            f"vectors: expected a shape (..., T, {K}) to fit alpha of shape {tuple(alpha.shape)}, got "
            f"{tuple(vectors.shape)}. T = 0 (no reflection) is vectors of shape (0, {K}), or None."
        )
    if 0 in vectors.shape[:-2]:
        raise ValueError(f"vectors: expected a batch shape without zeros, got shape {tuple(vectors.shape)}.")
    if vectors.dtype != alpha.dtype:
        raise ValueError(f"vectors: expected the dtype of alpha, {alpha.dtype}, got {vectors.dtype}.")
    return vectors


def broadcast_noise(alpha: Tensor, vectors: Tensor) -> torch.Size:
    """The batch shape of ``alpha (..., K)`` and ``vectors (..., T, K)``."""
    try:
        return torch.broadcast_shapes(alpha.shape[:-1], vectors.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got alpha {tuple(alpha.shape)} and vectors {tuple(vectors.shape)}."
        ) from None


def expanded_batch(old: torch.Size, new: Any) -> torch.Size:
    """``new``, the argument of ``expand``, as a Size that a law of batch shape ``old`` can be expanded to."""
    new = torch.Size(new)
    fits = len(new) >= len(old) and all(o in (1, n) for o, n in zip(reversed(old), reversed(new), strict=False))
    if not fits:
        raise ValueError(f"expand: expected a batch shape that {tuple(old)} broadcasts to, got {tuple(new)}.")
    return new


def event_axis(noise_dim: int, event_dim: int, shape: torch.Size, name: str = "noise_dim") -> int:
    """``noise_dim`` as a negative axis of an event of ``event_dim`` dimensions."""
    if (
        not isinstance(noise_dim, numbers.Integral)
        or isinstance(noise_dim, bool)
        or not -event_dim <= noise_dim < event_dim
    ):
        raise ValueError(
            f"{name}: expected an axis of the event {tuple(shape[len(shape) - event_dim:])}, from {-event_dim} to "
            f"{event_dim - 1}, got {noise_dim!r}."
        )
    return int(noise_dim) - event_dim if noise_dim >= 0 else int(noise_dim)


def unit_shaped(noise: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """A per-unit tensor ``(..., K)`` shaped to multiply events of rank ``event_dim`` along their axis ``noise_dim``."""
    shape = [1] * event_dim
    shape[noise_dim] = noise.shape[-1]
    return noise.reshape(noise.shape[:-1] + tuple(shape))


def positive_finite(name: str, value: Tensor) -> None:
    """Raises where a value is not positive and finite; NaN is neither."""
    _refuse(name, value, ~(torch.isfinite(value) & (value > 0)), "positive finite values")


def finite(name: str, value: Tensor) -> None:
    """Raises where a value is NaN or infinite."""
    _refuse(name, value, ~torch.isfinite(value), "finite values")


def _refuse(name: str, value: Tensor, bad: Tensor, expected: str) -> None:
    if bool(bad.any()):
        raise ValueError(
            f"{name}: expected {expected}, got {value[bad][0].item()} in a tensor of shape {tuple(value.shape)}."
        )
