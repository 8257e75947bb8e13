"""All metrics of a prediction in one table, from all rows at once or batch by batch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_vsd.metrics.base import METRICS, Batch, Classes, Seen, better, has_classes
from pyro_vsd.metrics.out_of_distribution import Score, detection, ood_score
from pyro_vsd.prediction.base import Array

__all__ = ["Report", "Stream", "report"]


class Report(Mapping[str, float]):
    """Named metrics of one prediction: a mapping from names to values that prints as a table.

    :param num_rows: rows they were computed from.
    :param num_samples: posterior samples behind the prediction, where known.
    :param level: level of the predictive interval whose coverage is among them.

    >>> Report({"accuracy": 0.987, "nll": 0.0411}, num_rows=10000, num_samples=50)
    10000 rows, 50 samples
    metric         value  better
    accuracy      0.9870  higher ↑
    nll           0.0411  lower ↓
    """

    def __init__(
        self, values: dict[str, float], *, num_rows: int, num_samples: int | None = None, level: float = 0.95
    ) -> None:
        self.num_rows, self.num_samples, self.level = num_rows, num_samples, level
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            raise KeyError(f"{name} is not in this report, which has {', '.join(self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def better(self, name: str) -> str:
        """The direction in which a metric improves; empty where it has none."""
        return better(name, self.level)

    def to_dict(self) -> dict[str, float]:
        """The metrics by name."""
        return dict(self._values)

    def to_pandas(self) -> Any:
        """A data frame with a row for each metric, and columns ``value`` and ``better``."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas. Install it: pip install pandas") from error
        rows = {"value": list(self._values.values()), "better": [self.better(name) for name in self._values]}
        return pandas.DataFrame(rows, index=pandas.Index(list(self._values), name="metric"))

    def __repr__(self) -> str:
        samples = "" if self.num_samples is None else f", {self.num_samples} samples"
        width = max(len(name) for name in ("metric", *self._values))
        table = [("metric", "value", "better")]
        table += [(name, f"{value:.4f}", self.better(name)) for name, value in self._values.items()]
        digits = max(10, *(len(row[1]) for row in table))
        lines = [f"{name:<{width}}  {value:>{digits}}  {better}".rstrip() for name, value, better in table]
        return "\n".join([f"{self.num_rows} rows{samples}", *lines])


def report(
    prediction: Classes,
    y: Array,
    ood: Classes | Mapping[str, Classes] | None = None,
    *,
    num_bins: int = 15,
    score: Score = "max_probability",
    level: float = 0.95,
) -> Report:
    """All metrics of a prediction, as a table; without those that need samples where it kept none.

    :param prediction: any prediction, ``(N, C)`` probabilities or ``(S, N, C)`` samples of them.
    :param y: its targets.
    :param ood: prediction of the same model on out-of-distribution inputs, or several by name.
    :param num_bins: bins of the calibration errors.
    :param score: the score that ranks rows for out-of-distribution detection.
    :param level: level of the predictive interval in regression.

    >>> report(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]), num_bins=10)
    2 rows
    metric                   value  better
    accuracy                1.0000  higher ↑
    error_rate              0.0000  lower ↓
    nll                     0.1643  lower ↓
    brier                   0.0500  lower ↓
    ece                     0.1500  lower ↓
    adaptive_ece            0.1500  lower ↓
    classwise_ece           0.1500  lower ↓
    aurc                    0.0000  lower ↓
    predictive_entropy      0.4127
    """
    stream = Stream(num_bins, score, level)
    stream.update(prediction, y)
    if ood is not None:
        for name, outside in ood.items() if isinstance(ood, Mapping) else [("ood", ood)]:
            stream.update_ood(outside, name)
    return stream.compute()


class Stream:
    """A report of batches, equal to the :func:`report` of all rows at once up to rounding, with the same options.

    Sums take O(C * num_bins) memory. The adaptive calibration error, the area under the risk–coverage curve and
    out-of-distribution detection rank all rows; for them up to three numbers per row are kept.

    >>> stream = Stream()
    >>> for label in (0, 1, 1):
    ...     stream.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, label]))
    >>> round(stream.compute()["accuracy"], 4)
    0.8333
    """

    def __init__(self, num_bins: int = 15, score: Score = "max_probability", level: float = 0.95) -> None:
        self.num_bins, self.score, self.level = num_bins, score, level
        self._num_rows, self._num_targets = 0, 0
        self._num_samples: int | None = None
        self._kept: dict[str, Any] = {}  # by metric
        self._inside: list[Tensor] = []
        self._outside: dict[str, list[Tensor]] = {}

    def update(self, prediction: Classes, y: Array) -> None:
        """Add a batch: a prediction, as any metric takes it, and its targets."""
        batch, part = Batch(prediction, y, self.num_bins, self.level), Stream()
        part._num_rows, part._num_targets, part._num_samples = batch.num_rows, batch.num_targets, batch.num_samples
        used = {name: one.update for name, one in METRICS.items() if one.kind in batch.kinds}
        part._kept = {name: update(batch) for name, update in used.items() if update}
        if has_classes(prediction):
            shared = self.score == "max_probability"  # one tensor for the confidence and the score
            part._inside = [batch.confidence if shared else ood_score(prediction, self.score)]
        self._add(part)

    def update_ood(self, prediction: Classes, name: str = "ood") -> None:
        """Add a batch of predictions on out-of-distribution inputs; ``name`` distinguishes several such sets."""
        self._outside.setdefault(name, []).append(ood_score(prediction, self.score))

    @classmethod
    def merged(cls, streams: "Iterable[Stream]") -> "Stream":
        """One stream of the batches of several, in their order, as from the processes of a group."""
        first, *others = streams
        merged = cls(first.num_bins, first.score, first.level)
        for stream in (first, *others):
            merged._add(stream)
        return merged

    def compute(self) -> Report:
        """All metrics of the batches so far."""
        if not self._num_rows:
            raise ValueError("the stream has no batch yet. Call update(prediction, y) first.")
        seen = Seen(self._num_rows, self._num_targets, self.num_bins)
        ordered = sorted(self._kept, key=lambda name: not METRICS[name].better)  # those without a direction come last
        values = {name: METRICS[name].compute(self._kept[name], seen) for name in ordered}
        for name, scores in self._outside.items():
            if not self._inside:
                raise ValueError("ood needs class probabilities, and the prediction is of a regression.")
            detected = detection(torch.cat(self._inside), torch.cat(scores))
            values |= {key if name == "ood" else f"{key} ({name})": value for key, value in detected.items()}
        return Report(values, num_rows=self._num_rows, num_samples=self._num_samples, level=self.level)

    def _add(self, other: "Stream") -> None:
        for name, scores in other._outside.items():
            self._outside.setdefault(name, []).extend(scores)
        if not other._num_rows:
            return
        if self._kept and _shapes(self._kept) != _shapes(other._kept):
            parts = "its kind, its number of classes or whether it has samples"
            raise ValueError(f"prediction does not match the batches before: {parts} is different. Use two streams.")
        self._kept = {name: self._kept[name] + kept if self._kept else kept for name, kept in other._kept.items()}
        self._inside = self._inside + other._inside
        self._num_rows += other._num_rows
        self._num_targets += other._num_targets
        self._num_samples = other._num_samples


def _shapes(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in kept.items()}
