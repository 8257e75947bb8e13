"""Quality of predicted distributions of regression targets.

Every function takes a :class:`~pyro_vsd.prediction.RegressionPrediction` and targets ``y`` shaped as its mean,
``(N,)`` or ``(N, D)``. Several outputs count one by one, except in the log-likelihood, which is joint.
"""

import math

import torch
from torch import Tensor

from pyro_vsd._utils import check_integer
from pyro_vsd.metrics.base import as_tensor, check_finite, mean, metric, per_target, targets, total
from pyro_vsd.prediction import Prediction, RegressionPrediction
from pyro_vsd.prediction.base import Array

__all__ = ["calibration_error", "coverage", "crps", "log_likelihood", "rmse"]


@metric(
    "regression", "lower",
    lambda batch: total(batch.errors.square()), lambda squares, seen: math.sqrt(per_target(squares, seen)),
)  # fmt: skip
def rmse(prediction: Prediction | Array, y: Array) -> float:
    """Root mean squared error of the predictive mean, in the units of y. Lower is better.

    :param prediction: any prediction with a mean, or the means themselves.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) ** 2
    2.0000000000000004
    """
    means = prediction.mean if isinstance(prediction, Prediction) else as_tensor("prediction", prediction)
    return math.sqrt(mean((means - targets(means, y)).square()))


@metric("density", "higher", lambda batch: total(_row_log_likelihood(batch.prediction, batch.y)))
def log_likelihood(prediction: Prediction, y: Array) -> float:
    r"""Mean over rows of the log of the predictive density, in nats. Higher is better.

    .. math:: \frac1N \sum_n \log \frac1S \sum_s p(y_n \mid x_n, W_s)

    Few samples bias it downwards: compare methods with the same number.

    >>> prediction = vsd.RegressionPrediction.from_samples(torch.zeros(1, 2), torch.tensor(1.0))
    >>> round(log_likelihood(prediction, torch.zeros(2)), 4)
    -0.9189
    """
    if not isinstance(prediction, Prediction):
        raise TypeError(f"prediction must be a Prediction, not {type(prediction).__name__}. For probabilities use nll.")
    return mean(_row_log_likelihood(prediction, y))


@metric("mixture", "lower", lambda batch: total(_row_crps(batch.prediction, batch.y)), per_target)
def crps(prediction: Prediction, y: Array) -> float:
    r"""Continuous ranked probability score, in the units of y. Lower is better.

    .. math:: \int (F(t) - 1[t \ge y])^2 dt = E|Y - y| - \tfrac12 E|Y - Y'|

    Of the Gaussian mixture itself, exact to rounding. For a certain prediction it is the absolute error.

    >>> prediction = vsd.RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(1.0))
    >>> round(crps(prediction, torch.zeros(1)), 4)
    0.2337
    """
    return mean(_row_crps(prediction, y))


@metric("mixture", "level", lambda batch: total(_inside(batch.cdf, batch.level)), per_target)
def coverage(prediction: Prediction, y: Array, level: float = 0.95) -> float:
    """Share of targets inside the central predictive interval. Best near ``level``; below it, the model is too sure.

    >>> prediction = vsd.RegressionPrediction.from_samples(torch.zeros(1, 4), torch.tensor(1.0))
    >>> coverage(prediction, torch.tensor([-3.0, -1.0, 1.0, 1.9]), level=0.95)
    0.75
    """
    return mean(_inside(_row_cdf(prediction, y, "coverage"), level))


@metric(
    "mixture", "lower",
    lambda batch: _below_levels(batch.cdf, 99), lambda counts, seen: _level_gap(counts, seen.num_targets),
)  # fmt: skip
def calibration_error(prediction: Prediction, y: Array, num_levels: int = 99) -> float:
    r"""Mean error of the predicted quantiles' levels. Lower is better; from 0 to 1/2.

    .. math:: \frac1L \sum_{p} \Bigl|\frac1N \sum_n 1[F_n(y_n) \le p] - p\Bigr|, \qquad
              p = \tfrac1{L+1}, \dots, \tfrac L{L+1}

    It sees predictions that are too narrow, too wide or shifted.

    >>> prediction = vsd.RegressionPrediction.from_samples(torch.zeros(1, 2), torch.tensor(1.0))
    >>> round(calibration_error(prediction, torch.tensor([9.0, 9.0])), 4)
    0.5
    """
    counts = _below_levels(_row_cdf(prediction, y, "calibration_error"), num_levels)
    return _level_gap(counts, prediction.mean.numel())


def _gaussians(prediction: Prediction, needs: str) -> RegressionPrediction:
    """The prediction, finite and with samples; ``needs`` names the metric for the error."""
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"{needs} needs a RegressionPrediction as prediction, not {type(prediction).__name__}.")
    prediction.require_samples(needs)
    check_finite("prediction", prediction.mean)
    return prediction


def _row_log_likelihood(prediction: Prediction, y: Array) -> Tensor:
    """Log-density of every row, ``(N,)``."""
    if not len(prediction):
        raise ValueError("prediction is empty: it has no rows.")
    rows = prediction.log_prob(y)
    if num := int(rows.isnan().sum()):
        raise ValueError(f"the log-density is NaN in {num} of {len(rows)} rows. Check prediction and y for NaN.")
    return rows


def _row_cdf(prediction: Prediction, y: Array, needs: str) -> Tensor:
    checked = _gaussians(prediction, needs)
    return checked.cdf(targets(checked.mean, y))


def _inside(cdf: Tensor, level: float) -> Tensor:
    """1 where a target lies in the central interval of that level, else 0."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, not {level}.")
    return (cdf - 0.5).abs().le(level / 2).double()


def _below_levels(cdf: Tensor, num_levels: int) -> Tensor:
    """Targets at or below each predicted quantile, ``(L,)``."""
    check_integer("num_levels", num_levels, 1)
    levels = torch.arange(1, num_levels + 1, dtype=cdf.dtype, device=cdf.device) / (num_levels + 1)
    return torch.bincount(torch.bucketize(cdf.flatten(), levels), minlength=num_levels + 1)[:-1].cumsum(0)


def _level_gap(counts: Tensor, num_targets: int) -> float:
    """Mean distance of the observed shares from their levels."""
    levels = torch.arange(1, len(counts) + 1, dtype=torch.float64, device=counts.device) / (len(counts) + 1)
    return float((counts / num_targets - levels).abs().mean())


def _row_crps(prediction: Prediction, y: Array) -> Tensor:
    """Score of every target, shaped as y."""
    checked = _gaussians(prediction, "crps")
    target, out = targets(checked.mean, y), torch.empty_like(checked.mean)
    samples, scales = checked.require_samples("crps")
    for rows in checked.row_blocks():
        loc, scale = samples[:, rows], scales[:, rows]
        distance = checked.average(_mean_abs(target[rows] - loc, scale))
        out[rows] = distance - _half_pair_distance(loc, scale, checked)
    return out


def _mean_abs(loc: Tensor, scale: Tensor) -> Tensor:
    """E|X| of N(loc, scale^2)."""
    z = loc / scale
    return scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + loc * torch.erf(z / math.sqrt(2))


def _half_pair_distance(loc: Tensor, scale: Tensor, prediction: Prediction) -> Tensor:
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
            # 2 F - 1, several times faster than ndtr
            odd = prediction.average(torch.erf((start + point * step - loc) * inverse))
            total += 1 - odd.square()
        return 0.25 * total * step
    weights = torch.full((num,), 1 / num, dtype=torch.float64) if prediction.weights is None else prediction.weights
    weights = weights.to(loc).reshape(-1, *[1] * (loc.dim() - 1))
    total = (weights.square() * scale).sum(0) / math.sqrt(math.pi)
    for shift in range(1, num // 2 + 1):
        distances = _mean_abs(loc - loc.roll(shift, 0), torch.hypot(scale, scale.roll(shift, 0)))
        pairs = (weights * weights.roll(shift, 0) * distances).sum(0)
        total += 0.5 * pairs if 2 * shift == num else pairs
    return total
