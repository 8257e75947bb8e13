"""A small table of measures, with which way is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Report"]

_LOWER = "lower ↓"
_HIGHER = "higher ↑"
_BETTER = {
    "accuracy": _HIGHER,
    "error_rate": _LOWER,
    "nll": _LOWER,
    "brier": _LOWER,
    "ece": _LOWER,
    "adaptive_ece": _LOWER,
    "classwise_ece": _LOWER,
    "aurc": _LOWER,
    "rmse": _LOWER,
    "log_likelihood": _HIGHER,
    "crps": _LOWER,
    "calibration_error": _LOWER,
    "fpr_at_95_tpr": _LOWER,
    "detection_error": _LOWER,
    "auroc": _HIGHER,
    "aupr_in": _HIGHER,
    "aupr_out": _HIGHER,
}


class Report(Mapping[str, float]):
    """Named measures of one prediction: a mapping from names to numbers that prints as a table.

    :param values: measures in the order they are shown.
    :param num_rows: rows they were computed from.
    :param num_samples: posterior samples behind the prediction, where known.
    :param level: level of the predictive interval whose coverage is among them.

    >>> report = Report({"accuracy": 0.987, "nll": 0.0411}, num_rows=10000, num_samples=50)
    >>> report
    10000 rows, 50 samples
    metric         value  better
    accuracy      0.9870  higher ↑
    nll           0.0411  lower ↓
    >>> report["nll"], "ece" in report, list(report)
    (0.0411, False, ['accuracy', 'nll'])
    """

    def __init__(
        self, values: dict[str, float], *, num_rows: int, num_samples: int | None = None, level: float = 0.95
    ) -> None:
        self.num_rows, self.num_samples, self.level = num_rows, num_samples, level
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            raise KeyError(f"expected one of {', '.join(self._values)}, got {name}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def better(self, name: str) -> str:
        """Which way a measure is better, in a word; empty where neither is."""
        return f"near {self.level:g}" if name == "coverage" else _BETTER.get(name.split(" ")[0], "")

    def to_dict(self) -> dict[str, float]:
        """The measures by name.

        >>> Report({"nll": 0.0411}, num_rows=10000).to_dict()
        {'nll': 0.0411}
        """
        return dict(self._values)

    def to_pandas(self) -> Any:
        """A data frame with a row for each measure, and columns ``value`` and ``better``.

        >>> Report({"nll": 0.0411}, num_rows=10000).to_pandas().loc["nll", "value"].item()
        0.0411
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("expected pandas for to_pandas, got none. Install it: pip install pandas") from error
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
