"""The prediction of numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_vsd.prediction.checks import check_numbers, check_target, real, shaped, to_tensor
from pyro_vsd.prediction.generic import Prediction, not_kept
from pyro_vsd.prediction.mixture import mixture_quantile, normal_cdf

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["RegressionPrediction"]

# Samples times rows worked on at once: 2**22 float64 numbers are 32 MB, far below any machine's memory and far
# above where Python's overhead per block would show.
_BLOCK = 2**22


class RegressionPrediction(Prediction):
    r"""Predicted numbers: a mixture of one Normal per sample, :math:`\frac1S \sum_s N(\mu_s, \sigma_s^2)`.

    ``variance`` = ``aleatoric`` :math:`\frac1S \sum_s \sigma_s^2` + ``epistemic``
    :math:`\frac1S \sum_s (\mu_s - \bar\mu)^2`.

    :param mean: predictive means, ``(N,)`` or ``(N, D)``; the other tensors without samples are shaped as this.
    :param aleatoric: mean over samples of the noise variance.
    :param epistemic: variance over samples of the mean.
    :param num_samples: number ``S`` of posterior samples.
    :param samples: mean of each sample's Normal, ``(S, N)`` or ``(S, N, D)``.
    :param scales: standard deviation of each sample's Normal, shaped as ``samples`` or broadcast to it.

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
    ) -> None:
        if mean.dim() not in (1, 2):
            raise ValueError(f"expected mean of shape (N,) or (N, D), got {tuple(mean.shape)}.")
        self._aleatoric = shaped("aleatoric", aleatoric, mean.shape)
        self._epistemic = shaped("epistemic", epistemic, mean.shape)
        super().__init__(mean, self._aleatoric + self._epistemic, num_samples, samples=samples)
        if (samples is None) != (scales is None):
            raise ValueError(f"expected samples and scales, got {'scales' if samples is None else 'samples'} alone.")
        self._scales = None
        if samples is not None and scales is not None:
            self._scales = _broadcast_scales(scales, samples)

    @classmethod
    def from_samples(cls, samples: Tensor, scales: Tensor) -> RegressionPrediction:
        """From each sample's mean, ``(S, N)`` or ``(S, N, D)``, and standard deviation, broadcast to it. Keeps both."""
        check_numbers("samples", samples)
        if samples.dim() not in (2, 3) or len(samples) < 1:
            raise ValueError(
                f"expected samples of shape (S, N) or (S, N, D) with S of at least 1, got {tuple(samples.shape)}."
            )
        samples, scales = samples.detach(), _broadcast_scales(scales, samples)
        mean = samples.mean(0)
        epistemic = (samples - mean).square().mean(0)  # var() would warn of a prediction without rows
        return cls(mean, scales.square().mean(0), epistemic, len(samples), samples=samples, scales=scales)

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the observation noise, shaped as ``mean``: more data does not lower it."""
        return self._aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Variance over samples of their means, shaped as ``mean``: more data lowers it."""
        return self._epistemic

    @property
    def scales(self) -> Tensor | None:
        """Standard deviation of each sample's Normal, shaped as ``samples``, or None where not kept."""
        return self._scales

    def log_prob(self, y: Tensor | NDArray[Any]) -> Tensor:
        r"""Log of the mean density :math:`\log \frac1S \sum_s \prod_d N(y_d; \mu_{sd}, \sigma_{sd}^2)`, ``(N,)``.

        :param y: targets, shaped as ``mean``.
        """
        samples, scales = self.require_samples("log_prob")
        target = real(to_tensor(y, samples.device), samples.dtype)
        check_target(target, tuple(self.mean.shape))
        out = self.mean.new_empty(len(self))
        for rows in self.row_blocks():
            z = (target[rows] - samples[:, rows]) / scales[:, rows]
            density = -0.5 * z.square() - scales[:, rows].log() - 0.5 * math.log(2 * math.pi)
            joint = density if density.dim() == 2 else density.sum(-1)  # (S, rows)
            out[rows] = joint.logsumexp(0) - math.log(self.num_samples)
        return out

    def cdf(self, y: Tensor | NDArray[Any]) -> Tensor:
        """Predictive probability of a value of at most ``y``, each output by itself; both shaped as ``mean``."""
        samples, scales = self.require_samples("cdf")
        target = real(to_tensor(y, samples.device), samples.dtype)
        check_target(target, tuple(self.mean.shape))
        out = torch.empty_like(self.mean)
        for rows in self.row_blocks():
            out[rows] = normal_cdf((target[rows] - samples[:, rows]) / scales[:, rows]).mean(0)
        return out

    def quantile(self, q: float | Tensor | list[float]) -> Tensor:
        """Exact quantiles of the mixture, each output by itself: ``mean.shape``, or for Q levels ``(Q,) + mean.shape``.

        :param q: a level strictly between 0 and 1, or ``Q`` of them in one dimension.
        """
        samples, scales = self.require_samples("quantile")
        try:
            levels = torch.as_tensor(q, dtype=torch.float64, device=samples.device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"expected q as numbers strictly between 0 and 1, got {q!r}.") from None
        if levels.dim() > 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"expected q strictly between 0 and 1, a number or one dimension of them, got {q}.")
        flat = levels.reshape(-1)
        out = self.mean.new_empty((len(flat), *self.mean.shape))
        for rows in self.row_blocks():
            loc, scale = samples[:, rows].double(), scales[:, rows].double()
            for level, result in zip(flat.tolist(), out, strict=True):
                result[rows] = mixture_quantile(level, loc, scale).to(out.dtype)
        return out.reshape(*levels.shape, *self.mean.shape)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval ``(lower, upper)`` that holds the target with probability ``level``, shaped as ``mean``.

        >>> lower, upper = RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(1.0)).interval(0.95)
        >>> round(upper.item(), 4)
        1.96
        """
        if not isinstance(level, (int, float)) or not 0 < level < 1:
            raise ValueError(f"expected level strictly between 0 and 1, got {level}.")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def rescaled(self, scale: float | Tensor | NDArray[Any], shift: float | Tensor | NDArray[Any] = 0.0) -> Self:
        r"""The prediction of :math:`a y + b` in place of y: targets that were standardised, in their own units again.

        .. math:: \mu_s \to a \mu_s + b, \qquad \sigma_s \to a \sigma_s, \qquad
                  \log p(y) \to \log p\bigl(\tfrac{y - b}a\bigr) - \textstyle\sum_d \log a_d.

        Means, quantiles and samples move with both, standard deviations with a, variances with :math:`a^2`. The dtype
        stays: ``prediction.to(torch.float64)`` first where b is large beside a. Costs a copy, O(SND).

        :param scale: a > 0, the standard deviation that the targets were divided by: a number, or one for each output,
            ``(D,)``.
        :param shift: b, the mean that was subtracted from them before, likewise.

        >>> y = torch.tensor([10.0, 20.0, 30.0])
        >>> standardised = (y - y.mean()) / y.std()
        >>> prediction = RegressionPrediction.from_samples(standardised.unsqueeze(0), torch.tensor(0.1))
        >>> own = prediction.rescaled(y.std(), y.mean())
        >>> own.mean, own.stddev
        (tensor([10., 20., 30.]), tensor([1., 1., 1.]))
        """
        a, b = self._each_output("scale", scale), self._each_output("shift", shift)
        if not bool((a > 0).all()):
            raise ValueError(
                f"expected a positive scale, got a smallest of {a.min().item()}. A target that never changes is best "
                "left out, or divided by 1."
            )
        samples = None if self._samples is None else a * self._samples + b
        scales = None if self._scales is None else a * self._scales
        moments = a * self._mean + b, a.square() * self._aleatoric, a.square() * self._epistemic
        return type(self)(*moments, self.num_samples, samples=samples, scales=scales)

    def _each_output(self, name: str, values: Any) -> Tensor:
        """Finite numbers of shape ``()`` up to ``(1, D)``: never one for each row."""
        try:
            numbers = to_tensor(values)
            if numbers.is_complex():
                raise TypeError
        except TypeError:
            raise TypeError(f"expected {name} as a number or one for each output, got {values!r}.") from None
        numbers = numbers.to(self._mean)
        outputs = self._mean.shape[1:]
        try:
            numbers.broadcast_to(1, *outputs)
        except RuntimeError:
            raise ValueError(
                f"expected {name} as a number{f' or of shape {tuple(outputs)}' if outputs else ''}, got shape "
                f"{tuple(numbers.shape)}. Give one for each output, not for each row."
            ) from None
        if not bool(numbers.isfinite().all()):
            raise ValueError(f"expected a finite {name}, got {numbers.tolist()}.")
        return numbers

    def require_samples(self, method: str) -> tuple[Tensor, Tensor]:
        """Samples and scales, or an error that names the method in need of them."""
        if self._samples is None or self._scales is None:
            raise not_kept(method)
        return self._samples, self._scales

    def row_blocks(self) -> list[slice]:
        """Slices of rows small enough to work on all samples of one slice at once."""
        step = max(1, _BLOCK // (self.num_samples * max(1, self.mean[:1].numel())))
        return [slice(start, start + step) for start in range(0, len(self), step)]


def _broadcast_scales(scales: Tensor, samples: Tensor) -> Tensor:
    check_numbers("scales", scales)
    if not bool((scales > 0).all()):
        raise ValueError(f"expected positive scales, got a smallest of {scales.min().item()}.")
    try:
        return scales.detach().to(samples.dtype).broadcast_to(samples.shape)
    except RuntimeError as error:
        raise ValueError(
            f"expected scales that broadcast to {tuple(samples.shape)}, got {tuple(scales.shape)}. "
            f"One scale for each sample is of shape {(len(samples), *[1] * (samples.dim() - 1))}."
        ) from error
