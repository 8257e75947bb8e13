"""The prediction of regression targets."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_vsd.prediction.base import Array, Prediction, check_floats, check_shape, check_target, not_kept, to_tensor

if TYPE_CHECKING:
    from typing import Self

__all__ = ["RegressionPrediction"]

# Samples times rows processed at once: 32 MB of float64, large enough to hide Python's overhead per block.
_BLOCK = 2**22


class RegressionPrediction(Prediction):
    r"""Predicted regression targets: a mixture of one Normal per sample.

    .. math:: \sum_s w_s N(\mu_s, \sigma_s^2), \qquad
              \mathrm{Var} = \underbrace{\textstyle\sum_s w_s \sigma_s^2}_{\text{aleatoric}}
              + \underbrace{\textstyle\sum_s w_s (\mu_s - \bar\mu)^2}_{\text{epistemic}}, \qquad
              w_s = \tfrac1S \text{ by default}

    :param mean: predictive means, ``(N,)`` or ``(N, D)``; the other tensors without samples are shaped as this.
    :param aleatoric: mean over samples of the noise variance.
    :param epistemic: variance over samples of the mean.
    :param num_samples: number ``S`` of posterior samples.
    :param samples: mean of each sample's Normal, ``(S, N)`` or ``(S, N, D)``.
    :param scales: standard deviation of each sample's Normal, shaped as ``samples`` or broadcast to it.
    :param weights: the weight of each sample, ``(S,)``, where they differ.

    >>> prediction = RegressionPrediction.from_samples(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
    >>> prediction.epistemic, prediction.aleatoric, prediction.variance
    (tensor([1.]), tensor([0.2500]), tensor([1.2500]))
    >>> prediction.quantile([0.25, 0.5, 0.75])
    tensor([[-1.0000],
            [ 0.0000],
            [ 1.0000]])
    """

    def __init__(
        self,
        mean: Tensor,
        aleatoric: Tensor,
        epistemic: Tensor,
        num_samples: int,
        *,
        samples: Tensor | None = None,
        scales: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if mean.dim() not in (1, 2):
            raise ValueError(f"mean must have shape (N,) or (N, D), not {tuple(mean.shape)}.")
        #: variance of the observation noise, shaped as ``mean``: more data does not lower it
        self.aleatoric = check_shape("aleatoric", aleatoric, mean.shape)
        #: variance over samples of their means, shaped as ``mean``: more data lowers it
        self.epistemic = check_shape("epistemic", epistemic, mean.shape)
        super().__init__(mean, self.aleatoric + self.epistemic, num_samples, samples=samples, weights=weights)
        if (samples is None) != (scales is None):
            raise ValueError("samples and scales must be given together: one of them is missing.")
        #: standard deviation of each sample's Normal, shaped as ``samples``, or None where not kept
        self.scales = None if samples is None or scales is None else _broadcast_scales(scales, samples)

    @classmethod
    def from_samples(cls, samples: Tensor, scales: Tensor, weights: Tensor | None = None) -> "RegressionPrediction":
        """From each sample's mean, ``(S, N)`` or ``(S, N, D)``, and standard deviation, broadcast to it. Keeps both.

        :param weights: of the samples, ``(S,)``; equal by default.
        """
        check_floats("samples", samples)
        if samples.dim() not in (2, 3) or len(samples) < 1:
            raise ValueError(f"samples must have shape (S, N) or (S, N, D) with S >= 1, not {tuple(samples.shape)}.")
        samples, scales = samples.detach(), _broadcast_scales(scales, samples)
        average = Prediction(samples[0], samples[0], len(samples), weights=weights).average
        mean = average(samples)
        epistemic = average((samples - mean).square())  # var() would warn of a prediction without rows
        moments = mean, average(scales.square()), epistemic
        return cls(*moments, len(samples), samples=samples, scales=scales, weights=weights)

    def log_prob(self, y: Array) -> Tensor:
        r"""Log of the mean density :math:`\log \frac1S \sum_s \prod_d N(y_d; \mu_{sd}, \sigma_{sd}^2)`, ``(N,)``.

        :param y: targets, shaped as ``mean``.
        """
        (samples, scales), target = self.require_samples("log_prob"), self._target(y)
        out = self.mean.new_empty(len(self))
        for rows in self.row_blocks():
            z = (target[rows] - samples[:, rows]) / scales[:, rows]
            density = -0.5 * z.square() - scales[:, rows].log() - 0.5 * math.log(2 * math.pi)
            joint = density if density.dim() == 2 else density.sum(-1)  # (S, rows)
            out[rows] = self.log_average(joint)
        return out

    def cdf(self, y: Array) -> Tensor:
        """Predictive probability of a value of at most ``y``, each output by itself; both shaped as ``mean``."""
        (samples, scales), target = self.require_samples("cdf"), self._target(y)
        out = torch.empty_like(self.mean)
        for rows in self.row_blocks():
            out[rows] = self.average(normal_cdf((target[rows] - samples[:, rows]) / scales[:, rows]))
        return out

    def quantile(self, q: float | Tensor | list[float]) -> Tensor:
        """Exact quantiles of the mixture, each output by itself: ``mean.shape``, or for Q levels ``(Q,) + mean.shape``.

        :param q: a level strictly between 0 and 1, or ``Q`` of them in one dimension.
        """
        samples, scales = self.require_samples("quantile")
        levels = to_tensor(q, samples.device, "q").double()
        if levels.dim() > 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"q must lie strictly between 0 and 1, one level or a list of them, not {q}.")
        flat = levels.reshape(-1)
        out = self.mean.new_empty((len(flat), *self.mean.shape))
        for rows in self.row_blocks():
            loc, scale = samples[:, rows].double(), scales[:, rows].double()
            for level, result in zip(flat.tolist(), out, strict=True):
                result[rows] = mixture_quantile(level, loc, scale, self.average).to(out.dtype)
        return out.reshape(*levels.shape, *self.mean.shape)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval ``(lower, upper)`` that holds the target with probability ``level``, shaped as ``mean``.

        >>> RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(1.0)).interval(0.95)[1]
        tensor([1.9600])
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, not {level}.")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def rescaled(self, scale: float | Array, shift: float | Array = 0.0) -> "Self":
        r"""The prediction of :math:`a y + b` in place of y: targets that were standardised, in their own units again.

        .. math:: \mu_s \to a \mu_s + b, \qquad \sigma_s \to a \sigma_s, \qquad
                  \log p(y) \to \log p\bigl(\tfrac{y - b}a\bigr) - \textstyle\sum_d \log a_d.

        The dtype stays: ``prediction.to(torch.float64)`` first where b is large beside a. Costs a copy, O(SND).

        :param scale: a > 0, the standard deviation that the targets were divided by: a number, or ``(D,)``.
        :param shift: b, the mean that was subtracted from them before, likewise.

        >>> prediction = RegressionPrediction.from_samples(torch.tensor([[-1.0, 0.0, 1.0]]), torch.tensor(0.1))
        >>> own = prediction.rescaled(10.0, 20.0)
        >>> own.mean, own.stddev
        (tensor([10., 20., 30.]), tensor([1., 1., 1.]))
        """
        a, b = self._each_output("scale", scale), self._each_output("shift", shift)
        if not bool((a > 0).all()):
            raise ValueError(f"scale must be positive, not {a.min().item()}. Divide a constant target by 1.")
        samples = None if self.samples is None else a * self.samples + b
        scales = None if self.scales is None else a * self.scales
        moments = a * self.mean + b, a.square() * self.aleatoric, a.square() * self.epistemic
        return type(self)(*moments, self.num_samples, samples=samples, scales=scales, weights=self.weights)

    def _columns(self) -> dict[str, Tensor]:
        return {**super()._columns(), "aleatoric": self.aleatoric, "epistemic": self.epistemic}

    def _target(self, y: Array) -> Tensor:
        """Targets shaped as the mean; bool targets get its dtype, so that they can be subtracted from."""
        target = check_target(to_tensor(y, self.mean.device), tuple(self.mean.shape))
        return target.to(self.mean.dtype) if target.dtype == torch.bool else target

    def _each_output(self, name: str, values: float | Array) -> Tensor:
        """Finite values of shape ``()`` up to ``(1, D)``: one for each output, never one for each row."""
        found, outputs = to_tensor(values, name=name).to(self.mean), self.mean.shape[1:]
        try:
            found.broadcast_to(1, *outputs)
        except RuntimeError:
            raise ValueError(
                f"{name} must be a number{f' or have shape {tuple(outputs)}' if outputs else ''}, not shape "
                f"{tuple(found.shape)}. Give one for each output, not for each row."
            ) from None
        if not bool(found.isfinite().all()):
            raise ValueError(f"{name} must be finite, not {found.tolist()}.")
        return found

    def require_samples(self, method: str) -> tuple[Tensor, Tensor]:
        """Samples and scales; raises where they were not kept, with the name of the method that needs them."""
        if self.samples is None or self.scales is None:
            raise not_kept(method)
        return self.samples, self.scales

    def row_blocks(self) -> list[slice]:
        """Slices of rows, small enough to process all samples of a slice at once."""
        step = max(1, _BLOCK // (self.num_samples * max(1, self.mean[:1].numel())))
        return [slice(start, start + step) for start in range(0, len(self), step)]


def _broadcast_scales(scales: Tensor, samples: Tensor) -> Tensor:
    check_floats("scales", scales)
    if not bool((scales > 0).all()):
        raise ValueError(f"scales must be positive; the minimum is {scales.min().item()}.")
    try:
        return scales.detach().to(samples.dtype).broadcast_to(samples.shape)
    except RuntimeError as error:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not broadcast to shape {tuple(samples.shape)}. "
            f"One scale for each sample has shape {(len(samples), *[1] * (samples.dim() - 1))}."
        ) from error


def normal_cdf(z: Tensor) -> Tensor:
    """Cumulative distribution function of the standard Normal."""
    return 0.5 * torch.erfc(-math.sqrt(0.5) * z)  # exact far below zero too, and over twice as fast as ndtr


def mixture_quantile(level: float, loc: Tensor, scale: Tensor, average: Callable[[Tensor], Tensor]) -> Tensor:
    """Root in x of average_s Phi((x - loc_s) / scale_s) = level, by Newton steps that a bracket keeps in bounds."""
    if level > 0.5:  # Phi is exact relative to itself in the lower tail only
        return -mixture_quantile(1 - level, -loc, scale, average)
    ends = loc + scale * torch.special.ndtri(loc.new_tensor(level))  # (S, ...)
    lower, upper = ends.amin(0), ends.amax(0)  # the mixture's quantile lies between those of its components
    x, step, eps = (lower + upper) / 2, upper - lower, torch.finfo(loc.dtype).eps
    # every step at least halves the last Newton step or the bracket, each of which 64 halvings bring to nothing
    for _ in range(128):
        z = (x - loc) / scale
        excess = average(normal_cdf(z)) - level
        density = average(torch.exp(-0.5 * z.square()) / scale) / math.sqrt(2 * math.pi)
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
