"""All measures that apply to a prediction, from all rows at once or batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyro_vsd.metrics.calibration import adaptive_gap, bin_sums, classwise_gap, classwise_sums, equal_width, gap
from pyro_vsd.metrics.classification import correct, mutual_information, predictive_entropy, row_brier, row_nll
from pyro_vsd.metrics.inputs import Array, Classes, labelled, targets
from pyro_vsd.metrics.ood import Score, detection, ood_score
from pyro_vsd.metrics.regression import below_levels, inside, level_gap, row_cdf, row_crps, row_log_likelihood
from pyro_vsd.metrics.report import Report
from pyro_vsd.metrics.selective import area
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["Stream", "report"]


def report(
    prediction: Classes,
    y: Array,
    ood: Classes | Mapping[str, Classes] | None = None,
    *,
    num_bins: int = 15,
    score: Score = "max_probability",
    level: float = 0.95,
) -> Report:
    """All measures that apply to a prediction, as a table that prints itself.

    Those that need samples are left out of a prediction that kept none.

    :param prediction: any prediction, ``(N, C)`` probabilities or ``(S, N, C)`` samples of them.
    :param y: its targets.
    :param ood: prediction of the same model on out-of-distribution inputs, or several by name.
    :param num_bins: bins of the calibration errors.
    :param score: what out-of-distribution rows are ranked by.
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
    """Adds up what the metrics need, batch by batch: its report is that of all rows at once, up to rounding.

    Sums take O(C * num_bins) numbers. Some measures need every row's score before they can rank it, the adaptive
    calibration error, the area under the risk–coverage curve and those of out-of-distribution detection: for them up
    to three numbers a row are kept.

    >>> probs, y = torch.rand(100, 3).softmax(-1), torch.arange(100) % 3
    >>> stream = Stream()
    >>> for rows in (slice(0, 60), slice(60, 100)):
    ...     stream.update(probs[rows], y[rows])
    >>> abs(stream.compute()["ece"] - report(probs, y)["ece"]) < 1e-9
    True
    """

    def __init__(self, num_bins: int = 15, score: Score = "max_probability", level: float = 0.95) -> None:
        self.num_bins, self.score, self.level = num_bins, score, level
        self._num_rows, self._num_targets = 0, 0
        self._num_samples: int | None = None
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._outside: dict[str, list[Tensor]] = {}

    def update(self, prediction: Classes, y: Array) -> None:
        """Add a batch: a prediction, as any metric takes it, and its targets."""
        sums: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        if isinstance(prediction, RegressionPrediction):
            sums = self._regression_sums(prediction, y)
            num_rows, num_targets = len(prediction), prediction.mean.numel()
        elif isinstance(prediction, Prediction) and not isinstance(prediction, ClassificationPrediction):
            sums = self._generic_sums(prediction, y)
            num_rows, num_targets = len(prediction), prediction.mean.numel()
        else:
            sums, rows = self._classification_sums(prediction, y)
            num_rows = num_targets = len(rows["score"])
        num_samples = prediction.num_samples if isinstance(prediction, Prediction) else None
        self._add(sums, {name: [values] for name, values in rows.items()}, num_rows, num_targets, num_samples)

    def _add(
        self,
        sums: dict[str, Tensor],
        rows: dict[str, list[Tensor]],
        num_rows: int,
        num_targets: int,
        num_samples: int | None,
    ) -> None:
        if not num_rows:
            return
        known = {name: total.shape for name, total in self._sums.items()}
        if known and known != {name: total.shape for name, total in sums.items()}:
            raise ValueError(
                "expected a batch like those before, got one of another kind, with other classes, or with and without "
                "samples. Use a Stream for each."
            )
        self._sums = {name: self._sums[name] + total if known else total for name, total in sums.items()}
        for name, values in rows.items():
            self._rows.setdefault(name, []).extend(values)
        self._num_rows += num_rows
        self._num_targets += num_targets
        self._num_samples = num_samples

    def update_ood(self, prediction: Classes, name: str = "ood") -> None:
        """Add a batch of predictions on out-of-distribution inputs; ``name`` tells several such sets apart."""
        self._outside.setdefault(name, []).append(ood_score(prediction, self.score))

    @classmethod
    def merged(cls, streams: Iterable[Stream]) -> Stream:
        """One stream of what several saw, in their order: each process of a group adds up its own rows.

        >>> probs, y = torch.rand(100, 3).softmax(-1), torch.arange(100) % 3
        >>> parts = Stream(), Stream()
        >>> for stream, rows in zip(parts, (slice(0, 60), slice(60, 100))):
        ...     stream.update(probs[rows], y[rows])
        >>> abs(Stream.merged(parts).compute()["ece"] - report(probs, y)["ece"]) < 1e-9
        True
        """
        first, *others = streams
        total = cls(first.num_bins, first.score, first.level)
        for stream in (first, *others):
            total._add(stream._sums, stream._rows, stream._num_rows, stream._num_targets, stream._num_samples)
            for name, scores in stream._outside.items():
                total._outside.setdefault(name, []).extend(scores)
        return total

    def compute(self) -> Report:
        """All measures that apply to what was seen so far."""
        if not self._num_rows:
            raise ValueError("expected at least one batch, got none. Call update(prediction, y) first.")
        values = self._classification() if "bins" in self._sums else self._regression()
        for name, scores in self._outside.items():
            if "score" not in self._rows:
                raise ValueError("expected class probabilities for out-of-distribution detection, got a regression.")
            found = detection(torch.cat(self._rows["score"]), torch.cat(scores))
            values |= {key if name == "ood" else f"{key} ({name})": value for key, value in found.items()}
        return Report(values, num_rows=self._num_rows, num_samples=self._num_samples, level=self.level)

    def _classification_sums(self, prediction: Classes, y: Array) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        probs, labels = labelled(prediction, y)
        confidence, hits, edges = probs.amax(-1), correct(probs, labels), equal_width(self.num_bins, probs)
        sums = {
            "hits": _total(hits),
            "nll": _total(row_nll(probs, labels)),
            "brier": _total(row_brier(probs, labels)),
            "entropy": _total(predictive_entropy(probs)),
            "bins": bin_sums(confidence, hits, edges),
            "classwise": classwise_sums(probs, labels, edges),
        }
        if isinstance(prediction, Prediction) or prediction.ndim == 3:
            sums["mutual_information"] = _total(mutual_information(prediction))
        score = confidence if self.score == "max_probability" else ood_score(prediction, self.score)
        return sums, {"confidence": confidence, "hits": hits.bool(), "score": score}

    def _regression_sums(self, prediction: RegressionPrediction, y: Array) -> dict[str, Tensor]:
        sums = {"squared": _total((prediction.mean - targets(prediction.mean, y)).square())}
        if prediction.samples is not None:
            cdf = row_cdf(prediction, y, "report")
            sums["log_likelihood"] = _total(row_log_likelihood(prediction, y))
            sums["crps"] = _total(row_crps(prediction, y))
            sums["coverage"] = _total(inside(cdf, self.level))
            sums["levels"] = below_levels(cdf, 99)
        return sums

    def _generic_sums(self, prediction: Prediction, y: Array) -> dict[str, Tensor]:
        sums = {"squared": _total((prediction.mean - targets(prediction.mean, y)).square())}
        if prediction.components is not None:
            sums["log_likelihood"] = _total(row_log_likelihood(prediction, y))
        return sums

    def _classification(self) -> dict[str, float]:
        mean = {name: float(total) / self._num_rows for name, total in self._sums.items() if total.dim() == 0}
        confidence, hits = torch.cat(self._rows["confidence"]), torch.cat(self._rows["hits"])
        values = {
            "accuracy": mean["hits"],
            "error_rate": 1 - mean["hits"],
            "nll": mean["nll"],
            "brier": mean["brier"],
            "ece": gap(self._sums["bins"]),
            "adaptive_ece": adaptive_gap(confidence, hits, self.num_bins),
            "classwise_ece": classwise_gap(self._sums["classwise"]),
            "aurc": area(confidence, 1 - hits.double()),
            "predictive_entropy": mean["entropy"],
        }
        return values | {name: mean[name] for name in ("mutual_information",) if name in mean}

    def _regression(self) -> dict[str, float]:
        values = {"rmse": math.sqrt(float(self._sums["squared"]) / self._num_targets)}
        if "log_likelihood" in self._sums:
            values["log_likelihood"] = float(self._sums["log_likelihood"]) / self._num_rows
        if "levels" in self._sums:
            values["crps"] = float(self._sums["crps"]) / self._num_targets
            values["coverage"] = float(self._sums["coverage"]) / self._num_targets
            values["calibration_error"] = level_gap(self._sums["levels"], self._num_targets)
        return values


def _total(rows: Tensor) -> Tensor:
    return rows.sum(dtype=torch.float64)
