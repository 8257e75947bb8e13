"""What a prediction is: the predictive distribution of every row, averaged over posterior samples.

``N`` rows, ``S`` posterior samples, ``C`` classes, ``D`` outputs. Variances over samples divide by ``S``, so that one
sample has none. Every tensor is detached.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.distributions import Distribution, Transform

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["ClassificationPrediction", "Prediction", "RegressionPrediction"]

# Samples times rows worked on at once: 2**22 float64 numbers are 32 MB, far below any machine's memory and far
# above where Python's overhead per block would show.
_BLOCK = 2**22


class Prediction:
    r"""Predictive distribution :math:`p(y \mid x) = \frac1S \sum_s p(y \mid x, W_s)` of any observation model.

    :param mean: predictive means, ``(N, ...)``.
    :param variance: predictive variances, shaped as ``mean``.
    :param num_samples: number ``S`` of posterior samples behind them.
    :param samples: mean of each sample's predictive distribution, ``(S, N, ...)``.
    :param components: one distribution of batch shape ``(S, N)`` holding every sample's predictive distribution.

    >>> rate = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # two samples, two rows
    >>> prediction = Prediction(
    ...     rate.mean(0), rate.mean(0) + rate.var(0, correction=0), 2,
    ...     samples=rate, components=torch.distributions.Poisson(rate),
    ... )
    >>> prediction
    Prediction(mean=(2,), num_samples=2, samples kept)
    >>> prediction.log_prob(torch.tensor([0.0, 0.0])).exp()
    tensor([0.2088, 0.1353])
    """

    def __init__(
        self,
        mean: Tensor,
        variance: Tensor,
        num_samples: int,
        *,
        samples: Tensor | None = None,
        components: Distribution | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"expected num_samples of at least 1, got {num_samples}.")
        if mean.dim() < 1:
            raise ValueError(f"expected mean of shape (N, ...), got {tuple(mean.shape)}. Give one row as (1, ...).")
        self.num_samples = int(num_samples)
        self._mean = mean.detach()
        self._variance = _shaped("variance", variance, mean.shape)
        self._samples = None if samples is None else _shaped("samples", samples, (num_samples, *mean.shape))
        if components is not None and tuple(components.batch_shape) != (num_samples, len(mean)):
            raise ValueError(
                f"expected components of batch shape {(num_samples, len(mean))}, got {tuple(components.batch_shape)}. "
                "Move dimensions of one row's target into the event with .to_event(n)."
            )
        self._components = components

    @property
    def mean(self) -> Tensor:
        """Predictive mean, ``(N, ...)``."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Predictive variance, ``(N, ...)``: spread of the samples plus the mean of their own variances."""
        return self._variance

    @property
    def stddev(self) -> Tensor:
        """Square root of the variance, ``(N, ...)``."""
        return self.variance.sqrt()

    @property
    def samples(self) -> Tensor | None:
        """Mean of each sample's predictive distribution, ``(S, N, ...)``, or None where not kept."""
        return self._samples

    @property
    def components(self) -> Distribution | None:
        """Every sample's predictive distribution, of batch shape ``(S, N)``, or None where not kept."""
        return self._components

    def log_prob(self, y: Tensor | NDArray[Any]) -> Tensor:
        """Log of the mean density over samples, one number a row ``(N,)``.

        :param y: targets, ``(N,) + event_shape``.
        """
        if self._components is None:
            raise _not_kept("log_prob")
        target = to_tensor(y, self.mean.device)
        check_target(target, (len(self), *self._components.event_shape))
        with torch.no_grad():
            return self._components.log_prob(target).logsumexp(0) - math.log(self.num_samples)

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        """A copy on another device, or with another floating dtype.

        >>> Prediction(torch.zeros(3), torch.ones(3), 1).to(torch.float64).mean.dtype
        torch.float64
        """
        if isinstance(target, torch.dtype) and not target.is_floating_point:
            raise ValueError(f"expected a device or a floating dtype, got {target}.")
        moved = copy.copy(self)
        vars(moved).update({name: _move(value, target) for name, value in vars(self).items()})
        return moved

    def __len__(self) -> int:
        return len(self._mean)

    def __repr__(self) -> str:
        kept = "kept" if self._samples is not None else "not kept"
        return f"{type(self).__name__}(mean={tuple(self.mean.shape)}, num_samples={self.num_samples}, samples {kept})"


class ClassificationPrediction(Prediction):
    r"""Predicted classes: mean probabilities :math:`\bar p = \frac1S \sum_s p_s`, and where their entropy comes from.

    ``entropy`` :math:`H[\bar p]` (total, in nats) = ``expected_entropy`` :math:`\frac1S \sum_s H[p_s]` (aleatoric)
    + ``mutual_information`` (epistemic: what the samples disagree about).

    :param probs: mean probabilities, ``(N, C)``.
    :param expected_entropy: mean over samples of the entropy, ``(N,)``.
    :param num_samples: number ``S`` of posterior samples.
    :param samples: each sample's probabilities, ``(S, N, C)``.

    >>> agree, differ = torch.tensor([0.5, 0.5]), torch.eye(2)
    >>> prediction = ClassificationPrediction.from_samples(torch.stack([agree.expand(2, 2), differ], 1))
    >>> prediction.entropy
    tensor([0.6931, 0.6931])
    >>> prediction.mutual_information
    tensor([0.0000, 0.6931])
    """

    def __init__(
        self, probs: Tensor, expected_entropy: Tensor, num_samples: int, *, samples: Tensor | None = None
    ) -> None:
        if probs.dim() != 2:
            raise ValueError(f"expected probs of shape (N, C), got {tuple(probs.shape)}.")
        super().__init__(probs, probs * (1 - probs), num_samples, samples=samples)
        self._expected_entropy = _shaped("expected_entropy", expected_entropy, probs.shape[:1])

    @classmethod
    def from_samples(cls, samples: Tensor) -> ClassificationPrediction:
        """From each sample's probabilities ``(S, N, C)``, which are kept."""
        _check_numbers("samples", samples)
        if samples.dim() != 3 or len(samples) < 1:
            raise ValueError(f"expected samples of shape (S, N, C) with S of at least 1, got {tuple(samples.shape)}.")
        samples = samples.detach()
        # sample by sample: the entropy terms of all at once would double the memory
        total = sum((torch.special.entr(probs).sum(-1) for probs in samples), samples.new_zeros(()))
        return cls(samples.mean(0), total / len(samples), len(samples), samples=samples)

    @property
    def probs(self) -> Tensor:
        """Mean probabilities, ``(N, C)``."""
        return self._mean

    @property
    def labels(self) -> Tensor:
        """Most probable class, ``(N,)``; the first of equals."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Largest mean probability, ``(N,)``."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities in nats, ``(N,)``: total uncertainty."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def expected_entropy(self) -> Tensor:
        """Mean over samples of the entropy in nats, ``(N,)``: aleatoric uncertainty."""
        return self._expected_entropy

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy, ``(N,)``: epistemic uncertainty. Rounding below zero is cut off."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def log_prob(self, y: Tensor | NDArray[Any]) -> Tensor:
        """Log of the mean probability of class ``y (N,)``, one number a row; needs no samples."""
        labels = check_labels(to_tensor(y, self.mean.device), len(self), self.probs.shape[-1])
        return self.probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()


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
        self._aleatoric = _shaped("aleatoric", aleatoric, mean.shape)
        self._epistemic = _shaped("epistemic", epistemic, mean.shape)
        super().__init__(mean, self._aleatoric + self._epistemic, num_samples, samples=samples)
        if (samples is None) != (scales is None):
            raise ValueError(f"expected samples and scales, got {'scales' if samples is None else 'samples'} alone.")
        self._scales = None
        if samples is not None and scales is not None:
            self._scales = _broadcast_scales(scales, samples)

    @classmethod
    def from_samples(cls, samples: Tensor, scales: Tensor) -> RegressionPrediction:
        """From each sample's mean, ``(S, N)`` or ``(S, N, D)``, and standard deviation, broadcast to it. Keeps both."""
        _check_numbers("samples", samples)
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
        target = _real(to_tensor(y, samples.device), samples.dtype)
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
        target = _real(to_tensor(y, samples.device), samples.dtype)
        check_target(target, tuple(self.mean.shape))
        out = torch.empty_like(self.mean)
        for rows in self.row_blocks():
            out[rows] = _normal_cdf((target[rows] - samples[:, rows]) / scales[:, rows]).mean(0)
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
                result[rows] = _mixture_quantile(level, loc, scale).to(out.dtype)
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

    def require_samples(self, method: str) -> tuple[Tensor, Tensor]:
        """Samples and scales, or an error that names the method in need of them."""
        if self._samples is None or self._scales is None:
            raise _not_kept(method)
        return self._samples, self._scales

    def row_blocks(self) -> list[slice]:
        """Slices of rows small enough to work on all samples of one slice at once."""
        step = max(1, _BLOCK // (self.num_samples * max(1, self.mean[:1].numel())))
        return [slice(start, start + step) for start in range(0, len(self), step)]


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


def _check_numbers(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected {name} as a tensor, got {type(value).__name__}.")
    if not value.is_floating_point():
        raise ValueError(f"expected {name} of floating-point numbers, got {value.dtype}.")


def _real(target: Tensor, dtype: torch.dtype) -> Tensor:
    if target.is_complex():
        raise ValueError(f"expected real targets y, got {target.dtype}.")
    return target.to(dtype) if target.dtype == torch.bool else target


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)}, got {tuple(value.shape)}.")
    return value.detach()


def _broadcast_scales(scales: Tensor, samples: Tensor) -> Tensor:
    _check_numbers("scales", scales)
    if not bool((scales > 0).all()):
        raise ValueError(f"expected positive scales, got a smallest of {scales.min().item()}.")
    try:
        return scales.detach().to(samples.dtype).broadcast_to(samples.shape)
    except RuntimeError as error:
        raise ValueError(
            f"expected scales that broadcast to {tuple(samples.shape)}, got {tuple(scales.shape)}. "
            f"One scale for each sample is of shape {(len(samples), *[1] * (samples.dim() - 1))}."
        ) from error


def _not_kept(method: str) -> ValueError:
    return ValueError(f"expected kept samples for {method}, got a prediction without. Predict with keep_samples=True.")


def _move(value: Any, target: torch.device | torch.dtype | str) -> Any:
    """A value with its tensors elsewhere, also those inside a distribution, its bases and its transforms."""
    if isinstance(value, Tensor):
        return value.to(target) if value.is_floating_point() or not isinstance(target, torch.dtype) else value
    if isinstance(value, list):
        return [_move(item, target) for item in value]
    if isinstance(value, Distribution | Transform):
        moved = copy.copy(value)
        vars(moved).update({name: _move(item, target) for name, item in vars(value).items()})
        return moved
    return value


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-math.sqrt(0.5) * z)  # exact far below zero too, and over twice as fast as ndtr


def _mixture_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    """Root in x of mean_s Phi((x - loc_s) / scale_s) = level, by Newton steps that a bracket keeps in bounds."""
    if level > 0.5:  # Phi is exact relative to itself in the lower tail only
        return -_mixture_quantile(1 - level, -loc, scale)
    ends = loc + scale * torch.special.ndtri(loc.new_tensor(level))  # (S, ...)
    lower, upper = ends.amin(0), ends.amax(0)  # the mixture's quantile lies between those of its components
    x, step, eps = (lower + upper) / 2, upper - lower, torch.finfo(loc.dtype).eps
    # every step at least halves the last Newton step or the bracket, each of which 64 halvings bring to nothing
    for _ in range(128):
        z = (x - loc) / scale
        excess = _normal_cdf(z).mean(0) - level
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
