"""The prediction of any observation model, and the checks that all predictions share."""

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_vsd._utils import check_integer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["IGNORED", "Array", "Prediction", "check_labels", "check_target", "check_weights", "not_kept", "to_tensor"]

Array = Tensor | NDArray[Any]
#: Targets of this value count nothing, as in torch's cross entropy.
IGNORED = -100
# The axis of the rows in each attribute that has one.
_ROWS = {"mean": 0, "variance": 0, "expected_entropy": 0, "aleatoric": 0, "epistemic": 0, "samples": 1, "scales": 1}


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
        target = check_target(to_tensor(y, self.mean.device), (len(self), *self.components.event_shape))
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

    @classmethod
    def concat(cls, predictions: "Sequence[Self]") -> "Self":
        """One prediction of the rows of several, in their order: those of the batches of a loader, for instance.

        >>> a, b = (Prediction(torch.zeros(n), torch.ones(n), 1) for n in (3, 2))
        >>> len(Prediction.concat([a, b]))
        5
        """
        if not predictions:
            raise ValueError("predictions must hold at least one prediction.")
        kinds = {(type(p), p.num_samples, tuple(p.mean.shape[1:])) for p in predictions}
        if len(kinds) > 1:
            found = "; ".join(f"{kind.__name__}, {samples} samples, {shape}" for kind, samples, shape in kinds)
            raise ValueError(f"predictions must be of one kind, number of samples and shape of a row, not {found}.")
        if len({None if p.weights is None else tuple(p.weights.tolist()) for p in predictions}) > 1:
            raise ValueError("predictions must have the same weights of their samples.")

        def joined(name: str) -> Tensor | None:
            parts = [getattr(p, name) for p in predictions]
            return None if any(part is None for part in parts) else torch.cat(parts, _ROWS[name])

        parts = [p.components for p in predictions if p.components is not None]
        return predictions[0]._with(joined, _Joined(parts) if len(parts) == len(predictions) else None)

    def __getitem__(self, rows: Any) -> "Self":
        """The prediction of some rows: a slice, a mask, or row numbers.

        >>> Prediction(torch.arange(5.0), torch.ones(5), 1)[1:3].mean
        tensor([1., 2.])
        """
        index = torch.arange(len(self), device=self.mean.device)[rows].reshape(-1)

        def taken(name: str) -> Tensor | None:
            value = getattr(self, name)
            return None if value is None else value.index_select(_ROWS[name], index)

        return self._with(taken, None if self.components is None else _Selected(self.components, index))

    def _with(self, rows_of: Any, components: Distribution | None) -> "Self":
        """A copy with other rows: ``rows_of(name)`` in place of each attribute that has rows."""
        new = copy.copy(self)
        vars(new).update({name: rows_of(name) for name in vars(self) if name in _ROWS}, components=components)
        return new

    def to_pandas(self) -> Any:
        """A data frame with a line for each row; columns of several entries have names such as ``mean.0``.

        >>> list(Prediction(torch.zeros(3, 2), torch.ones(3, 2), 1).to_pandas())
        ['mean.0', 'mean.1', 'stddev.0', 'stddev.1']
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        columns: dict[str, Any] = {}
        for name, value in self._columns().items():
            parts = [(name, value)] if value.dim() == 1 else zip(_names(name, value), value.flatten(1).T, strict=True)
            columns |= {key: part.numpy(force=True) for key, part in parts}
        return pandas.DataFrame(columns)

    def _columns(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "stddev": self.stddev}

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        kept = "kept" if self.samples is not None else "not kept"
        return f"{type(self).__name__}(mean={tuple(self.mean.shape)}, num_samples={self.num_samples}, samples {kept})"


def _names(name: str, value: Tensor) -> list[str]:
    """``name.i.j`` for each entry of a row."""
    return [".".join([name, *map(str, at)]) for at in np.ndindex(*value.shape[1:])]


class _Joined(Distribution):
    """The components of several predictions, one after the other."""

    arg_constraints: dict[str, Any] = {}

    def __init__(self, parts: list[Distribution]):
        self.parts = parts
        shape = (parts[0].batch_shape[0], sum(part.batch_shape[1] for part in parts))
        super().__init__(torch.Size(shape), parts[0].event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        rows = value.split([part.batch_shape[1] for part in self.parts])
        return torch.cat([part.log_prob(row) for part, row in zip(self.parts, rows, strict=True)], 1)


class _Selected(Distribution):
    """Some rows of a prediction's components."""

    arg_constraints: dict[str, Any] = {}

    def __init__(self, components: Distribution, index: Tensor):
        self.components, self.index = components, index
        shape = (components.batch_shape[0], len(index))
        super().__init__(torch.Size(shape), components.event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        out = torch.empty(self._batch_shape, dtype=torch.get_default_dtype(), device=value.device)
        order = self.index.argsort(stable=True)
        places = self.index[order]
        turns = torch.arange(len(order), device=order.device) - torch.searchsorted(places, places)
        for turn in turns.unique():  # a row that is chosen twice has a second turn
            chosen = order[turns == turn]
            # A distribution of unknown parameters cannot be cut: rows that are left out get a value that is allowed.
            full = value[:1].expand(self.components.batch_shape[1], *value.shape[1:]).clone()
            full[self.index[chosen]] = value[chosen]
            density = self.components.log_prob(full)[:, self.index[chosen]]
            out = out.to(density.dtype)
            out[:, chosen] = density
        return out


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


def check_target(y: Tensor, expected: tuple[int, ...]) -> Tensor:
    """``y`` in the expected shape; ``(N, 1)`` is ``(N,)`` (broadcasting would make it ``(N, N)``), others raise."""
    shape = tuple(y.shape)
    if shape == expected:
        return y
    if shape == (*expected, 1):
        return y.squeeze(-1)
    remedy = "Use y.unsqueeze(-1)." if (*shape, 1) == expected else "Give one target for each row of the prediction."
    raise ValueError(f"expected y of shape {expected}, got {shape}. {remedy}")


def check_labels(y: Tensor, num_rows: int, num_classes: int) -> Tensor:
    """Labels ``(N,)`` as int64; raises where the shape, the dtype or the range is wrong."""
    y = check_target(y, (num_rows,))
    yes_or_no = num_classes == 2 and y.is_floating_point() and bool(((y == 0) | (y == 1)).all())
    if (y.is_floating_point() and not yes_or_no) or y.is_complex():
        raise ValueError(f"y must hold integer labels, not {y.dtype}. Use y.long().")
    labels = y.long()
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        found = f"from {int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"y must hold labels from 0 to {num_classes - 1}, not {found}. Number the classes from 0.")
    return labels
