"""How good predicted distributions of numbers are.

Every function takes a :class:`~pyro_vsd.prediction.RegressionPrediction` and targets ``y`` shaped as its mean,
``(N,)`` or ``(N, D)``; with several outputs, each counts by itself, except in the log-likelihood, which is joint.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_vsd.metrics.inputs import Array, as_tensor, gaussians, mean, targets
from pyro_vsd.prediction import Prediction

__all__ = ["calibration_error", "coverage", "crps", "log_likelihood", "rmse"]


def rmse(prediction: Prediction | Array, y: Array) -> float:
    """Root mean squared error of the predictive mean, in the units of y. Lower is better.

    :param prediction: any prediction with a mean, or the means themselves.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) ** 2
    2.0000000000000004
    """
    means = prediction.mean if isinstance(prediction, Prediction) else as_tensor("prediction", prediction)
    return math.sqrt(mean((means - targets(means, y)).square()))


def log_likelihood(prediction: Prediction, y: Array) -> float:
    r"""Mean over rows of :math:`\log \frac1S \sum_s p(y_n \mid x_n, W_s)`, in nats. Higher is better.

    Few samples bias it downwards, most where the noise is small: use the same number for all methods compared.

    >>> from pyro_vsd.prediction import RegressionPrediction
    >>> prediction = RegressionPrediction.from_samples(torch.zeros(1, 2), torch.tensor(1.0))
    >>> round(log_likelihood(prediction, torch.zeros(2)), 4)
    -0.9189
    """
    if not isinstance(prediction, Prediction):
        raise TypeError(f"expected a Prediction, got {type(prediction).__name__}. For probabilities use nll.")
    return mean(row_log_likelihood(prediction, y))


def coverage(prediction: Prediction, y: Array, level: float = 0.95) -> float:
    """Share of targets inside the central predictive interval. Near ``level`` is right; below, the model is too sure.

    >>> from pyro_vsd.prediction import RegressionPrediction
    >>> prediction = RegressionPrediction.from_samples(torch.zeros(1, 4), torch.tensor(1.0))
    >>> coverage(prediction, torch.tensor([-3.0, -1.0, 1.0, 1.9]), level=0.95)
    0.75
    """
    return mean(inside(row_cdf(prediction, y, "coverage"), level))


def crps(prediction: Prediction, y: Array) -> float:
    r"""Continuous ranked probability score :math:`\int (F(t) - 1[t \ge y])^2 dt`, in the units of y. Lower is better.

    Of the Gaussian mixture itself, not of draws from it: :math:`E|Y - y| - \frac12 E|Y - Y'|` to rounding. For a
    certain prediction it is the absolute error.

    >>> from pyro_vsd.prediction import RegressionPrediction
    >>> prediction = RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(1.0))
    >>> round(crps(prediction, torch.zeros(1)), 4)
    0.2337
    """
    return mean(row_crps(prediction, y))


def calibration_error(prediction: Prediction, y: Array, num_levels: int = 99) -> float:
    r"""Mean over levels p of :math:`|\frac1N \sum_n 1[F_n(y_n) \le p] - p|`. Lower is better; from 0 to 1/2.

    Levels are :math:`1/(L+1), \dots, L/(L+1)`. Below a right quantile must lie that share of targets, so the error
    sees too narrow, too wide and shifted predictions alike.

    >>> from pyro_vsd.prediction import RegressionPrediction
    >>> prediction = RegressionPrediction.from_samples(torch.zeros(1, 2), torch.tensor(1.0))
    >>> round(calibration_error(prediction, torch.tensor([9.0, 9.0])), 4)
    0.5
    """
    counts = below_levels(row_cdf(prediction, y, "calibration_error"), num_levels)
    return level_gap(counts, prediction.mean.numel())


def row_log_likelihood(prediction: Prediction, y: Array) -> Tensor:
    """Log-density of every row, ``(N,)``."""
    if not len(prediction):
        raise ValueError("expected a prediction with at least one row, got none.")
    rows = prediction.log_prob(y)
    if bool(rows.isnan().any()):
        raise ValueError(f"expected finite log-densities, got NaN in {int(rows.isnan().sum())} of {len(rows)} rows.")
    return rows


def row_cdf(prediction: Prediction, y: Array, needs: str) -> Tensor:
    """Predictive probability of a value below each target, shaped as y."""
    checked = gaussians(prediction, needs)
    return checked.cdf(targets(checked.mean, y))


def inside(cdf: Tensor, level: float) -> Tensor:
    """1 where a target lies in the central interval of that level, else 0."""
    if not 0 < level < 1:
        raise ValueError(f"expected level strictly between 0 and 1, got {level}.")
    return (cdf - 0.5).abs().le(level / 2).double()


def below_levels(cdf: Tensor, num_levels: int) -> Tensor:
    """Number of targets at or below each predicted quantile, ``(L,)``."""
    if num_levels < 1:
        raise ValueError(f"expected num_levels of at least 1, got {num_levels}.")
    levels = torch.arange(1, num_levels + 1, dtype=cdf.dtype, device=cdf.device) / (num_levels + 1)
    return torch.bincount(torch.bucketize(cdf.flatten(), levels), minlength=num_levels + 1)[:-1].cumsum(0)


def level_gap(counts: Tensor, total: int) -> float:
    """Mean distance of observed shares, ``counts / total``, from their levels."""
    levels = torch.arange(1, len(counts) + 1, dtype=torch.float64, device=counts.device) / (len(counts) + 1)
    return float((counts / total - levels).abs().mean())


def row_crps(prediction: Prediction, y: Array) -> Tensor:
    """Score of every target, shaped as y."""
    checked = gaussians(prediction, "crps")
    target, out = targets(checked.mean, y), torch.empty_like(checked.mean)
    samples, scales = checked.require_samples("crps")
    for rows in checked.row_blocks():
        loc, scale = samples[:, rows], scales[:, rows]
        out[rows] = _mean_abs(target[rows] - loc, scale).mean(0) - _half_pair_distance(loc, scale)
    return out


def _mean_abs(loc: Tensor, scale: Tensor) -> Tensor:
    """E|X| of N(loc, scale^2)."""
    z = loc / scale
    return scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + loc * torch.erf(z / math.sqrt(2))


def _half_pair_distance(loc: Tensor, scale: Tensor) -> Tensor:
    r"""E|Y - Y'| / 2 of two independent draws of a mixture, by whichever of two ways is cheaper; memory is O(S).

    As :math:`\int F (1 - F)` by the trapezoidal rule, whose error for so smooth a function vanishes like
    exp(-const / step^2); or, where narrow components lie far apart, in closed form over all pairs, by S/2 shifts.
    """
    num = len(loc)
    # beyond 9 standard deviations nothing is left in float64; with steps of half the smallest the error is below 1e-14
    start, stop = (loc - 9 * scale).amin(0), (loc + 9 * scale).amax(0)
    num_points = int(((stop - start) / (0.5 * scale.amin(0))).amax().ceil())
    if num_points < num:
        step, total, inverse = (stop - start) / num_points, torch.zeros_like(start), math.sqrt(0.5) / scale
        for point in range(1, num_points):
            odd = torch.erf((start + point * step - loc) * inverse).mean(0)  # 2 F - 1, several times faster than ndtr
            total += 1 - odd.square()
        return 0.25 * total * step
    total = scale.mean(0) / math.sqrt(math.pi)
    for shift in range(1, num // 2 + 1):
        pairs = _mean_abs(loc - loc.roll(shift, 0), torch.hypot(scale, scale.roll(shift, 0))).mean(0)
        total += 0.5 * pairs if 2 * shift == num else pairs
    return total / num
