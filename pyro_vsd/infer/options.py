"""Checks of a guide's options."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyro_vsd.infer.vectors import VECTORS

__all__ = ["check_choice", "check_options", "check_positive"]


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    # an array compared with a word gives an array
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {choices}"
        raise ValueError(f"{name}: expected {expected}, got {value!r}.")


def check_positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a positive number, got {value!r}.")


def check_options(
    num_reflections: int, vectors: str, rank: int | None, conv_noise: str, example_dim: int, noise_dim: Any
) -> None:
    if not isinstance(num_reflections, int) or isinstance(num_reflections, bool) or num_reflections < 0:
        raise ValueError(f"num_reflections: expected an integer >= 0, got {num_reflections!r}.")
    check_choice("vectors", vectors, VECTORS)
    if vectors == "low_rank" and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        raise ValueError(f"rank: expected a positive integer with vectors='low_rank', got {rank!r}.")
    if vectors != "low_rank" and rank is not None:
        raise ValueError(f"rank: expected None unless vectors='low_rank', got {rank!r} with vectors={vectors!r}.")
    check_choice("conv_noise", conv_noise, ("out", "in"))
    if not isinstance(example_dim, int) or example_dim not in (0, 1):
        raise ValueError(f"example_dim: expected 0 or 1, got {example_dim!r}.")
    if noise_dim is not None and not (
        isinstance(noise_dim, Mapping) and all(isinstance(axis, int) for axis in noise_dim.values())
    ):
        raise ValueError(f"noise_dim: expected a dict {{site: axis}}, got {noise_dim!r}.")
