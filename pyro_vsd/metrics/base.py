"""What a metric is, and what it takes: predictions, probabilities or samples of them, as tensors or arrays."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.prediction.base import Array, check_labels, check_target, to_tensor

__all__ = ["better"]

#: Class probabilities in any form: a prediction, ``(N, C)`` mean probabilities or ``(S, N, C)`` samples of them.
Classes = Prediction | Array
Function = TypeVar("Function", bound=Callable[..., Any])

# ---- the registry

Kind = Literal["classes", "class samples", "regression", "density", "mixture", "detection"]
Direction = Literal["higher", "lower", "level", ""]


class Metric(NamedTuple):
    """A metric of the report.

    :ivar kind: the predictions it applies to. ``"classes"``, with ``"class samples"`` where samples are known;
        ``"regression"`` is any other, ``"density"`` with a log-density, ``"mixture"`` with its Normals. A
        ``"detection"`` compares predictions inside and outside of the distribution.
    :ivar better: ``"level"`` is best near the level of the predictive interval; an empty word has no direction.
    :ivar update: from a :class:`Batch` to what is kept of it; ``+`` joins two batches. A detection has none.
    :ivar compute: from what was kept of all batches, and a :class:`Seen`, to the value. For a detection from the
        accepted rows inside and outside, at falling thresholds.
    """

    kind: Kind
    better: Direction
    update: Callable[["Batch"], Any] | None
    compute: Callable[..., float]


class Seen(NamedTuple):
    """How much a report has seen, and its number of bins."""

    num_rows: int
    num_targets: int
    num_bins: int


def per_row(total: Tensor, seen: Seen) -> float:
    """The mean over rows, from a sum."""
    return float(total) / seen.num_rows


def per_target(total: Tensor, seen: Seen) -> float:
    """The mean over targets, from a sum: a row may have several."""
    return float(total) / seen.num_targets


#: All metrics of the report, by name, in its order.
METRICS: dict[str, Metric] = {}


def metric(
    kind: Kind,
    better: Direction,
    update: Callable[["Batch"], Any] | None = None,
    compute: Callable[..., float] = per_row,
) -> Callable[[Function], Function]:
    """Decorates the function of a metric: its name enters the report. The arguments are those of :class:`Metric`."""

    def enter(function: Function) -> Function:
        METRICS[function.__name__] = Metric(kind, better, update, compute)
        return function

    return enter


def better(name: str, level: float = 0.95) -> str:
    """The direction in which a metric of a report improves; empty where it has none. Coverage is best near ``level``.

    >>> better("accuracy"), better("nll"), better("coverage"), better("predictive_entropy")
    ('higher ↑', 'lower ↓', 'near 0.95', '')
    """
    words = {"higher": "higher ↑", "lower": "lower ↓", "level": f"near {level:g}", "": ""}
    found = METRICS.get(name.split(" ")[0])  # "auroc (svhn)" is the AUROC for that set
    return words[found.better] if found else ""


class Batch:
    """A prediction with its targets, checked, and what several metrics need of them."""

    def __init__(self, prediction: Any, y: Array, num_bins: int, level: float) -> None:
        self.prediction, self.y, self.num_bins, self.level = prediction, y, num_bins, level
        self.num_samples: int | None = getattr(prediction, "num_samples", None)
        if has_classes(prediction):
            if isinstance(prediction, ClassificationPrediction) and prediction.probs.dim() > 2:
                self.prediction, self.y = prediction, y = prediction.by_entry(y)
            sampled = isinstance(prediction, Prediction) or prediction.ndim == 3
            self.kinds = {"classes", "class samples"} if sampled else {"classes"}
            self.probs, self.labels = labelled(prediction, y)
            self.num_rows = self.num_targets = len(self.probs)
        else:
            normal = isinstance(prediction, RegressionPrediction)
            kept = (prediction.samples if normal else prediction.components) is not None
            self.kinds = {"regression", *(["density"] if kept else []), *(["mixture"] if kept and normal else [])}
            self.errors = prediction.mean - targets(prediction.mean, y)
            self.num_rows, self.num_targets = len(prediction), self.errors.numel()

    @cached_property
    def confidence(self) -> Tensor:
        """Largest probability, ``(N,)``."""
        return self.probs.amax(-1)

    @cached_property
    def hits(self) -> Tensor:
        return correct(self.probs, self.labels)

    @cached_property
    def ranked(self) -> list[tuple[Tensor, Tensor]]:
        """Confidences and hits of every row, for metrics that rank all rows."""
        return [(self.confidence, self.hits.bool())]

    @cached_property
    def cdf(self) -> Tensor:
        """Predictive probability of a value below each target, shaped as y."""
        cdf: Tensor = self.prediction.cdf(targets(self.prediction.mean, self.y))
        return cdf


def columns(kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Confidences and hits of all batches."""
    confidence, hits = map(torch.cat, zip(*kept, strict=True))
    return confidence, hits


def total(rows: Tensor) -> Tensor:
    """The sum in double precision."""
    return rows.sum(dtype=torch.float64)


def mean(rows: Tensor) -> float:
    """The mean over all entries, summed in double precision."""
    return float(rows.mean(dtype=torch.float64))


# ---- class probabilities


def has_classes(prediction: Classes) -> bool:
    """Whether this is a prediction of classes; bare tensors and arrays are class probabilities."""
    return isinstance(prediction, ClassificationPrediction) or not isinstance(prediction, Prediction)


def as_tensor(name: str, value: Array) -> Tensor:
    """A detached float tensor; half precision becomes float32, whose sums are exact enough."""
    tensor = to_tensor(value, name=name)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def probabilities(prediction: Classes) -> Tensor:
    """Mean probabilities ``(N, C)``, each row non-negative and summing to one."""
    if isinstance(prediction, ClassificationPrediction):
        return _check_probabilities(as_tensor("prediction", prediction.probs.flatten(0, -2)))
    # samples are checked before they are averaged: a mean could hide a negative probability
    probs = _check_probabilities(_raw(prediction))
    return probs if probs.dim() == 2 else probs.mean(0)


def with_samples(prediction: Classes, needs: str) -> ClassificationPrediction:
    """A prediction with the disagreement of its samples; ``needs`` names the metric for the error."""
    if isinstance(prediction, ClassificationPrediction):
        if prediction.probs.dim() > 2:
            prediction = prediction.by_entry()[0]
        _check_probabilities(as_tensor("prediction", prediction.probs))
        return prediction
    samples = _raw(prediction)
    if samples.dim() == 2:
        held = f"prediction holds mean probabilities of shape {tuple(samples.shape)}"
        raise ValueError(f"{needs} needs samples, and {held}. Give every sample's probabilities, (S, N, C).")
    return ClassificationPrediction.from_samples(_check_probabilities(samples))


def labelled(prediction: Classes, y: Array) -> tuple[Tensor, Tensor]:
    """Mean probabilities ``(N, C)`` and labels ``(N,)``; each entry of rows of several classes is a row."""
    if isinstance(prediction, ClassificationPrediction) and prediction.probs.dim() > 2:
        prediction, y = prediction.by_entry(y)
    probs = probabilities(prediction)
    return probs, check_labels(to_tensor(y, probs.device), *probs.shape)


def correct(probs: Tensor, labels: Tensor) -> Tensor:
    """1 where the most probable class is the label, else 0, ``(N,)``."""
    return (probs.argmax(-1) == labels).to(probs.dtype)


def _raw(prediction: Classes) -> Tensor:
    if isinstance(prediction, Prediction):
        raise TypeError(f"prediction must hold class probabilities, not be a {type(prediction).__name__}.")
    return as_tensor("prediction", prediction)


def _check_probabilities(probs: Tensor) -> Tensor:
    if probs.dim() not in (2, 3) or not probs.numel():
        raise ValueError(f"prediction must have shape (N, C) or (S, N, C), and rows; not shape {tuple(probs.shape)}.")
    sums = probs.sum(-1)
    if bool(sums.isnan().any()):
        raise ValueError(f"prediction holds NaN in {int(sums.isnan().sum())} of {sums.numel()} rows.")
    # half precision rounds a probability by up to 0.004; float32 softmax is far inside
    if float(probs.min()) < 0 or float((sums - 1).abs().max()) > 0.01:
        raise ValueError(
            f"prediction holds no probabilities: the smallest entry is {float(probs.min()):.3g}, and rows sum to "
            f"{float(sums.min()):.3g} to {float(sums.max()):.3g}. Use logits.softmax(-1)."
        )
    return probs


# ---- regression targets and scores


def targets(mean: Tensor, y: Array) -> Tensor:
    """Finite targets, shaped as the mean, which must be finite too."""
    check_finite("prediction", mean)
    target = check_target(to_tensor(y, mean.device), tuple(mean.shape))
    check_finite("y", target)
    return target.to(mean.dtype)


def check_finite(name: str, values: Tensor) -> None:
    """Raises where there are no entries, or some are NaN or infinite."""
    if not values.numel():
        raise ValueError(f"{name} is empty: its shape is {tuple(values.shape)}.")
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite; {int((~values.isfinite()).sum())} entries are NaN or infinite.")


def vector(name: str, values: Array, num_rows: int | None = None) -> Tensor:
    """A one-dimensional tensor without NaN, of ``num_rows`` entries or at least one."""
    tensor = as_tensor(name, values)
    if tensor.dim() != 1 or len(tensor) != (num_rows or max(1, len(tensor))):
        raise ValueError(f"{name} must have shape ({num_rows or 'N'},), one per row, not {tuple(tensor.shape)}.")
    if bool(tensor.isnan().any()):
        raise ValueError(f"{name} must not hold NaN; {int(tensor.isnan().sum())} of {len(tensor)} entries are NaN.")
    return tensor
