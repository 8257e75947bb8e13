"""The prediction of any observation model, and the checks that all predictions share."""

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_vsd._utils import check_integer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Array", "Prediction", "check_labels", "check_target", "check_weights", "not_kept", "to_tensor"]

Array = Tensor | NDArray[Any]


class Prediction:
    r"""Predictive distribution of any observation model.

    .. math:: p(y \mid x) = \sum_s w_s\, p(y \mid x, W_s), \qquad w_s = \tfrac1S \text{ by default}

    :param mean: predictive means, ``(N, ...)``.
    :param variance: predictive variances, shaped as ``mean``.
    :param num_samples: number ``S`` of posterior samples behind them.
    :param samples: mean of each sample's predictive distribution, ``(S, N, ...)``.
    :param components: one distribution of batch shape ``(S, N)`` holding every sample's predictive distribution.
    :param weights: the weight of each sample, ``(S,)``, where they differ: those of an ensemble's members.

    >>> rate = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # two samples, two rows
    >>> variance, components = rate.mean(0) + rate.var(0, correction=0), torch.distributions.Poisson(rate)
    >>> prediction = Prediction(rate.mean(0), variance, 2, samples=rate, components=components)
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
        weights: Tensor | None = None,
    ) -> None:
        check_integer("num_samples", num_samples, 1)
        if mean.dim() < 1:
            raise ValueError("mean must have shape (N, ...), not (). Give one row as (1, ...).")
        self.num_samples = int(num_samples)
        #: predictive mean, ``(N, ...)``
        self.mean = mean.detach()
        #: predictive variance, ``(N, ...)``: spread of the samples plus the mean of their own variances
        self.variance = check_shape("variance", variance, mean.shape)
        #: mean of each sample's predictive distribution, ``(S, N, ...)``, or None where not kept
        self.samples = None if samples is None else check_shape("samples", samples, (num_samples, *mean.shape))
        if components is not None and tuple(components.batch_shape) != (num_samples, len(mean)):
            shapes = f"{(num_samples, len(mean))}, not {tuple(components.batch_shape)}"
            raise ValueError(f"components must have batch shape {shapes}. Move other dimensions with .to_event(n).")
        #: every sample's predictive distribution, of batch shape ``(S, N)``, or None where not kept
        self.components = components
        #: weights of the samples, ``(S,)``, which add up to 1; None where all are equal
        self.weights = None if weights is None else check_weights(weights, self.num_samples)

    @property
    def stddev(self) -> Tensor:
        """Square root of the variance, ``(N, ...)``."""
        return self.variance.sqrt()

    def log_prob(self, y: Array) -> Tensor:
        """Log of the mean density over samples, one value per row ``(N,)``.

        :param y: targets, ``(N,) + event_shape``.
        """
        if self.components is None:
            raise not_kept("log_prob")
        target = to_tensor(y, self.mean.device)
        check_target(target, (len(self), *self.components.event_shape))
        with torch.no_grad():
            return self.log_average(self.components.log_prob(target))

    def average(self, values: Tensor) -> Tensor:
        """The mean of each sample's values ``(S, ...)`` by the samples' weights, ``(...)``."""
        if self.weights is None:
            return values.mean(0)
        return torch.tensordot(self.weights.to(values), values, 1)

    def log_average(self, values: Tensor) -> Tensor:
        """The log of :meth:`average` of ``values.exp()``, ``(S, ...)``, without overflow."""
        if self.weights is None:
            return values.logsumexp(0) - math.log(self.num_samples)
        return (values + self.weights.log().to(values).reshape(-1, *[1] * (values.dim() - 1))).logsumexp(0)

    def to(self, target: torch.device | torch.dtype | str) -> "Self":
        """A copy on a different device, or with a different floating dtype.

        >>> Prediction(torch.zeros(3), torch.ones(3), 1).to(torch.float64).mean.dtype
        torch.float64
        """
        if isinstance(target, torch.dtype) and not target.is_floating_point:
            raise ValueError(f"target must be a device or a floating dtype, not {target}.")
        return _moved(self, target)

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        kept = "kept" if self.samples is not None else "not kept"
        return f"{type(self).__name__}(mean={tuple(self.mean.shape)}, num_samples={self.num_samples}, samples {kept})"


def _moved(value: Any, target: torch.device | torch.dtype | str) -> Any:
    """``value`` with its tensors moved, also those inside a distribution, its bases and its transforms."""
    if isinstance(value, Tensor):
        return value.to(target) if value.is_floating_point() or not isinstance(target, torch.dtype) else value
    if isinstance(value, list):
        return [_moved(item, target) for item in value]
    if isinstance(value, Prediction | Distribution | Transform):
        moved = copy.copy(value)
        vars(moved).update({name: _moved(item, target) for name, item in vars(value).items()})
        return moved
    return value


def not_kept(method: str) -> ValueError:
    """The error of a method that needs samples which were not kept."""
    return ValueError(f"{method} needs samples, and this prediction kept none. Predict with keep_samples=True.")


def to_tensor(values: Any, device: torch.device | None = None, name: str = "y") -> Tensor:
    """A detached tensor; copies arrays that torch cannot share (read-only as from pandas, reversed)."""
    if not isinstance(values, Tensor):
        array = np.require(values, requirements=["C", "W"])
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{name} must be a tensor, an array or a list of numbers, not {values!r}.")
        values = torch.as_tensor(array)
    return values.detach().to(device)


def check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor, detached; raises unless it has that shape."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(value.shape)}.")
    return value.detach()


def check_weights(weights: Tensor, number: int) -> Tensor:
    """The weights in double precision, scaled to add up to 1; raises unless there are so many, all positive."""
    weights = check_shape("weights", weights, (number,)).cpu().double()
    if not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError(f"weights must be positive and finite, not {weights.tolist()}.")
    return weights / weights.sum()


def check_floats(name: str, value: Any) -> None:
    """Raises unless ``value`` is a floating-point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}.")
    if not value.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, not {value.dtype}.")


def check_target(y: Tensor, expected: tuple[int, ...]) -> None:
    """Raises unless ``y`` has the expected shape; broadcasting would turn ``(N, 1)`` into ``(N, N)``."""
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
    """Labels ``(N,)`` as int64; raises where the shape, the dtype or the range is wrong."""
    check_target(y, (num_rows,))
    if y.is_floating_point() or y.is_complex():
        raise ValueError(f"y must hold integer labels, not {y.dtype}. Use y.long().")
    labels = y.long()
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        found = f"from {int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"y must hold labels from 0 to {num_classes - 1}, not {found}. Number the classes from 0.")
    return labels
