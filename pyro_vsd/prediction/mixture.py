"""Normal distributions and mixtures of them: what torch does not have, or not exact in the tails."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["mixture_quantile", "normal_cdf"]


def normal_cdf(z: Tensor) -> Tensor:
    """Probability that a standard Normal number is at most z."""
    return 0.5 * torch.erfc(-math.sqrt(0.5) * z)  # exact far below zero too, and over twice as fast as ndtr


def mixture_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    """Root in x of mean_s Phi((x - loc_s) / scale_s) = level, by Newton steps that a bracket keeps in bounds."""
    if level > 0.5:  # Phi is exact relative to itself in the lower tail only
        return -mixture_quantile(1 - level, -loc, scale)
    ends = loc + scale * torch.special.ndtri(loc.new_tensor(level))  # (S, ...)
    lower, upper = ends.amin(0), ends.amax(0)  # the mixture's quantile lies between those of its components
    x, step, eps = (lower + upper) / 2, upper - lower, torch.finfo(loc.dtype).eps
    # every step at least halves the last Newton step or the bracket, each of which 64 halvings bring to nothing
    for _ in range(128):
        z = (x - loc) / scale
        excess = normal_cdf(z).mean(0) - level
        density = (torch.exp(-0.5 * z.square()) / scale).mean(0) / math.sqrt(2 * math.pi)
        lower, upper = torch.where(excess < 0, x, lower), torch.where(excess < 0, upper, x)
        newton = x - excess / density
        good = (newton >= lower) & (newton <= upper) & ((newton - x).abs() <= 0.5 * step.abs())
        following = torch.where(good, newton, (lower + upper) / 2)
        # at rounding level a step need not be smaller than the last, and bisecting would jump away from the root
        following = torch.where(excess.abs() <= 4 * eps * level, x, following)
        step, x = following - x, following
        if bool((step.abs() <= 4 * eps * (x.abs() + scale.amin(0))).all()):
            break
    return x
