"""The prediction of any observation model."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_vsd.prediction.checks import check_target, shaped, to_tensor

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["Prediction", "not_kept"]


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
        self._variance = shaped("variance", variance, mean.shape)
        self._samples = None if samples is None else shaped("samples", samples, (num_samples, *mean.shape))
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
            raise not_kept("log_prob")
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


def not_kept(method: str) -> ValueError:
    """The error of a method that needs what was not kept."""
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
