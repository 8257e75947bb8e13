"""The record of a training run, epoch by epoch."""

from dataclasses import dataclass, field
from typing import Any

from pyro_vsd._utils import flatten_dict

__all__ = ["EpochMeans", "History"]


class History(list[dict[str, Any]]):
    """One dict for each finished epoch: ``epoch``, ``loss``, ``log_likelihood``, ``kl_weight`` and ``kl`` by site
    (means over the batches, for the full data), ``lr``, and ``validation`` metrics if there are any.

    As with ``elbo.terms``, ``loss = -log_likelihood + kl_weight * sum(kl)``: ``vsd.plots.elbo_terms`` draws it.

    :ivar stopped: why training ended: ``"epochs"``, ``"early_stopping"``, ``"interrupt"`` or ``"callback"``.
    :ivar best_epoch: the epoch whose state early stopping restored.

    >>> history = History([{"epoch": 1, "loss": 3.0, "kl": {"w": 1.0}, "validation": {"nll": 0.5}}])
    >>> history
    History(epochs=1, loss=3, validation={nll=0.5}, stopped='epochs')
    >>> history.to_pandas()["kl.w"].tolist()
    [1.0]
    """

    stopped: str = "epochs"
    best_epoch: int | None = None

    def __repr__(self) -> str:
        last: dict[str, Any] = self[-1] if self else {}
        parts = [f"epochs={len(self)}"]
        if "loss" in last:
            parts.append(f"loss={last['loss']:.4g}")
        if "validation" in last:
            parts.append("validation={" + ", ".join(f"{k}={v:.4g}" for k, v in last["validation"].items()) + "}")
        return f"History({', '.join(parts)}, stopped={self.stopped!r})"

    def to_pandas(self) -> Any:
        """A data frame with a row for each epoch, and a column ``validation.nll`` for ``["validation"]["nll"]``."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame([flatten_dict(record) for record in self])


@dataclass
class EpochMeans:
    """Adds up ``elbo.terms``: as Python's numbers on the CPU, elsewhere as tensors, so as not to wait for the device.

    >>> means = EpochMeans()
    >>> for weight in (0.5, 1.0):
    ...     means.add({"loss": 1.0 + weight, "log_likelihood": -1.0, "kl_weight": weight, "kl": {"w": 1.0}})
    >>> means.record()
    {'loss': 1.75, 'log_likelihood': -1.0, 'kl_weight': 0.75, 'kl': {'w': 1.0}}
    """

    count: int = 0
    sums: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    weights: tuple[float, float] | None = None  # the smallest and the largest

    def add(self, terms: dict[str, Any]) -> None:
        self.count += 1
        for key in ("loss", "log_likelihood"):
            if key in terms:
                self.sums[key] = self.sums.get(key, 0.0) + _number(terms[key])
        if "kl" in terms:
            weight = float(terms["kl_weight"])
            low, high = self.weights or (weight, weight)
            self.weights = (min(low, weight), max(high, weight))
            for name, value in terms["kl"].items():
                value = _number(value)
                self.kl[name] = self.kl.get(name, 0.0) + value
                self.sums["weighted"] = self.sums.get("weighted", 0.0) + weight * value

    def record(self) -> dict[str, Any]:
        """Epoch means. ``kl_weight`` is the KL-weighted average, with which the mean loss is the sum of its parts."""
        sums = {key: float(value) / self.count for key, value in self.sums.items()}
        record: dict[str, Any] = {key: sums[key] for key in ("loss", "log_likelihood") if key in sums}
        if self.weights is not None:
            kl = {name: float(value) / self.count for name, value in self.kl.items()}
            total, (low, high) = sum(kl.values()), self.weights
            record["kl_weight"] = low if low == high or total == 0 else sums["weighted"] / total
            record["kl"] = kl
        return record


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return value
    if value.device.type == "cpu":
        return value.item()
    return value if value.device.type == "mps" else value.double()
