"""Streaming averages over posterior samples, by the kind of observation."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, OneHotCategorical

from pyro_vsd._utils import base_distribution
from pyro_vsd.prediction.base import Prediction
from pyro_vsd.prediction.classification import ClassificationPrediction
from pyro_vsd.prediction.regression import RegressionPrediction

__all__ = ["Collector", "make_collector", "row_distribution"]


class Collector:
    """Averages an observed site's distribution over a sequence (sample 0: all rows, sample 1: all rows, …) in parts."""

    def __init__(self, num_samples: int, rows: int, keep: bool):
        self.num_samples, self.rows, self.keep = num_samples, rows, keep
        self.sums: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.pivot: Tensor | None = None

    def add(self, start: int, distribution: Any) -> None:
        """:param start: the first position in the sequence. :param distribution: of batch shape ``(positions,)``."""
        raise NotImplementedError

    def finish(self) -> Prediction:
        raise NotImplementedError

    def _blocks(self, start: int, value: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The part of each sample that ``value`` begins or ends with, and the whole samples between: rows, and what
        they have as ``(samples, rows, ...)``."""
        while len(value):
            first = start % self.rows
            samples = 1 if first else max(1, len(value) // self.rows)
            count = min(samples * (self.rows - first), len(value))
            yield (
                slice(first, first + count // samples),
                value[:count].reshape(samples, count // samples, *value.shape[1:]),
            )
            start, value = start + count, value[count:]

    def _sum(self, name: str, start: int, value: Tensor) -> None:
        dtype = _sum_dtype(value)
        if name not in self.sums:
            self.sums[name] = value.new_zeros((self.rows, *value.shape[1:]), dtype=dtype)
        for rows, block in self._blocks(start, value):
            self.sums[name][rows] += block.sum(0, dtype=dtype) if len(block) > 1 else block[0]

    def _keep(self, name: str, start: int, value: Tensor) -> None:
        if not self.keep:
            return
        if name not in self.kept:
            self.kept[name] = value.new_empty((self.num_samples * self.rows, *value.shape[1:]))
        self.kept[name][start : start + len(value)] = value

    def _kept(self, name: str) -> Tensor | None:
        kept = self.kept.get(name)
        return None if kept is None else kept.reshape(self.num_samples, self.rows, *kept.shape[1:])

    def _mean(self, name: str, dtype: torch.dtype) -> Tensor:
        return (self.sums[name] / self.num_samples).to(dtype)

    def _add_spread(self, start: int, value: Tensor) -> None:
        """Sums of deviations from each row's first sample, so that a small spread around a large mean survives."""
        if self.pivot is None:
            self.pivot = value.new_zeros((self.rows, *value.shape[1:]))
        if start < self.rows:
            first = value[: self.rows - start]
            self.pivot[start : start + len(first)] = first
        for rows, block in self._blocks(start, value):
            deviation = (block - self.pivot[rows]).flatten(0, 1)
            self._sum("deviation", start, deviation)
            self._sum("square", start, deviation.to(_sum_dtype(value)).square())
            start += len(deviation)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and population variance over the samples."""
        assert self.pivot is not None
        shift = self.sums["deviation"] / self.num_samples
        variance = (self.sums["square"] / self.num_samples - shift.square()).clamp(min=0)
        return (self.pivot + shift).to(self.pivot.dtype), variance.to(self.pivot.dtype)


class _Classes(Collector):
    def add(self, start: int, distribution: Any) -> None:
        probs = _probs(distribution)
        self._sum("probs", start, probs)
        self._sum("entropy", start, torch.special.entr(probs).sum(-1))
        self._keep("probs", start, probs)
        self.dtype = probs.dtype

    def finish(self) -> Prediction:
        probs, entropy = self._mean("probs", self.dtype), self._mean("entropy", self.dtype)
        return ClassificationPrediction(probs, entropy, self.num_samples, samples=self._kept("probs"))


class _Normals(Collector):
    def add(self, start: int, distribution: Any) -> None:
        base = base_distribution(distribution)
        self._add_spread(start, base.mean)
        self._sum("variance", start, base.stddev.square())
        self._keep("mean", start, base.mean)
        self._keep("scale", start, base.stddev)

    def finish(self) -> Prediction:
        mean, epistemic = self._moments()
        aleatoric = self._mean("variance", mean.dtype)
        return RegressionPrediction(
            mean, aleatoric, epistemic, self.num_samples, samples=self._kept("mean"), scales=self._kept("scale")
        )


class _Any(Collector):
    """Any other likelihood."""

    def __init__(self, num_samples: int, rows: int, keep: bool):
        super().__init__(num_samples, rows, keep)
        self.parts: list[list[Any]] = []  # lists, not tuples: Prediction.to moves what lists hold

    def add(self, start: int, distribution: Any) -> None:
        try:
            mean, variance = distribution.mean, distribution.variance
        except NotImplementedError:
            raise ValueError(
                f"expected a likelihood whose mean and variance are known, got {distribution}. Draw from the "
                "predictive distribution instead: pyro.infer.Predictive(model, guide=guide, num_samples=…)."
            ) from None
        self._add_spread(start, mean)
        self._sum("variance", start, variance)
        self._keep("mean", start, mean)
        if self.keep:
            self.parts.append([start, distribution])

    def finish(self) -> Prediction:
        mean, spread = self._moments()
        variance = spread + self._mean("variance", mean.dtype)
        components = _Components(self.parts, self.num_samples, self.rows) if self.keep else None
        return Prediction(mean, variance, self.num_samples, samples=self._kept("mean"), components=components)


class _Components(Distribution):
    """Every sample's distribution, in the parts that were added: batch shape ``(S, N)``."""

    arg_constraints: dict[str, Any] = {}

    def __init__(self, parts: list[list[Any]], num_samples: int, rows: int):
        self.parts = parts
        event_shape = parts[0][1].batch_shape[1:] + parts[0][1].event_shape
        super().__init__(torch.Size((num_samples, rows)), event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        out = None
        if not value.is_floating_point():  # log_prob subtracts from it, which a bool does not allow
            value = value.to(torch.get_default_dtype())
        for start, distribution in self.parts:
            flat = torch.arange(start, start + distribution.batch_shape[0], device=value.device)
            density = distribution.log_prob(value[flat % self._batch_shape[1]])
            density = density.flatten(1).sum(-1) if density.dim() > 1 else density
            if out is None:
                out = density.new_empty(self._batch_shape.numel())
            out[start : start + len(density)] = density
        assert out is not None
        return out.reshape(self._batch_shape)


def make_collector(distribution: Any, num_samples: int, rows: int, keep: bool) -> Collector:
    """The collector for an observed site of this distribution."""
    kind: type[Collector] = _Any
    base, event_dim = base_distribution(distribution), len(distribution.event_shape)
    if isinstance(base, (Bernoulli, Categorical, OneHotCategorical)):
        kind = _Classes
    elif len(distribution.batch_shape) == 1 and isinstance(base, Normal) and event_dim <= 1:
        kind = _Normals
    return kind(num_samples, rows, keep)


def row_distribution(distribution: Any, rows: int) -> Any:
    """The distribution with the rows first in its batch shape; without a plate they are in its event shape."""
    in_event = len(distribution.batch_shape) == 0 and distribution.event_shape[:1] == (rows,)
    if in_event and isinstance(distribution, Independent):
        base, inner = distribution.base_dist, distribution.reinterpreted_batch_ndims - 1
        distribution = Independent(base, inner) if inner else base
    if distribution.batch_shape[:1] != (rows,):
        raise ValueError(
            f"expected an observed site with one entry for each of the {rows} rows in its batch shape, got batch shape "
            f"{tuple(distribution.batch_shape)} and event shape {tuple(distribution.event_shape)}. Put the rows in a "
            "plate: with pyro.plate('data', len(x)): … Inputs have their rows first; a network that puts the sequence "
            "first transposes inside the model."
        )
    return distribution


def _sum_dtype(value: Tensor) -> torch.dtype:
    """float64 for sums over samples, where the device has it."""
    return torch.float32 if value.device.type == "mps" else torch.float64


def _probs(distribution: Any) -> Tensor:
    base = base_distribution(distribution)
    return torch.stack([1 - base.probs, base.probs], -1) if isinstance(base, Bernoulli) else base.probs
