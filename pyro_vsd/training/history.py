"""What a training run was like, epoch by epoch."""

from typing import Any

__all__ = ["History"]


class History(list[dict[str, Any]]):
    """One dict for each finished epoch: ``epoch``, ``loss``, ``log_likelihood``, ``kl_weight`` and ``kl`` by site
    (means over the batches, for the full data), ``lr``, and ``validation`` measures where asked for.

    As with ``elbo.terms``, ``loss = -log_likelihood + kl_weight * sum(kl)``: ``vsd.plots.elbo_terms`` draws it.

    :ivar stopped: why training ended: ``"epochs"``, ``"early_stopping"``, ``"interrupt"`` or ``"callback"``.
    :ivar best_epoch: the epoch whose state was restored, where early stopping did so.

    >>> history = History([{"epoch": 1, "loss": 3.0, "kl": {"w": 1.0}}])
    >>> history.to_pandas()["kl.w"].tolist()
    [1.0]
    """

    stopped: str = "epochs"
    best_epoch: int | None = None

    def to_pandas(self) -> Any:
        """A data frame with a row for each epoch, and a column ``validation.nll`` for ``["validation"]["nll"]``."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("expected pandas for to_pandas, got none. Install it: pip install pandas") from error
        return pandas.DataFrame([_flat(record) for record in self])


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in record.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


class EpochMeans:
    """Adds up ``elbo.terms``; on the CPU in Python's numbers, elsewhere in tensors, so as not to wait for the device.

    >>> means = EpochMeans()
    >>> for weight in (0.5, 1.0):
    ...     means.add({"loss": 1.0 + weight, "log_likelihood": -1.0, "kl_weight": weight, "kl": {"w": 1.0}})
    >>> means.record()
    {'loss': 1.75, 'log_likelihood': -1.0, 'kl_weight': 0.75, 'kl': {'w': 1.0}}
    """

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Any] = {}
        self.kl: dict[str, Any] = {}
        self.weights: tuple[float, float] | None = None  # the smallest and the largest

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
        """Means; the weight of the KL is the one at which the mean loss is the sum of its parts."""
        sums = {key: float(value) / self.count for key, value in self.sums.items()}
        record: dict[str, Any] = {key: sums[key] for key in ("loss", "log_likelihood") if key in sums}
        if self.weights is not None:
            kl = {name: float(value) / self.count for name, value in self.kl.items()}
            total, (low, high) = sum(kl.values()), self.weights
            record["kl_weight"] = low if low == high or total == 0 else sums["weighted"] / total
            record["kl"] = kl
        return record

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return value
    if value.device.type == "cpu":
        return value.item()
    return value if value.device.type == "mps" else value.double()
