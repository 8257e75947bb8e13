"""When to stop: patience with a measure, and Ctrl-C."""

import math
import signal
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyro_vsd.metrics import Report

__all__ = ["EarlyStopping", "Interrupt", "Monitor"]


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training after ``patience`` epochs without a better value of a measure, and restores the best state.

    :param patience: epochs to wait for something better.
    :param metric: one of the validation measures, or ``"loss"``. By default ``nll`` or ``log_likelihood``, whichever
        the validation has.
    :param min_delta: what counts as better is better by more than this.
    :param mode: ``"min"`` or ``"max"``, for measures that ``vsd.metrics`` does not know.

    >>> EarlyStopping(patience=5, metric="ece")
    EarlyStopping(patience=5, metric='ece', min_delta=0.0, mode=None)
    """

    patience: int = 10
    metric: str | None = None
    min_delta: float = 0.0
    mode: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"patience: expected an integer >= 1, got {self.patience!r}.")
        if not isinstance(self.min_delta, (int, float)) or not self.min_delta >= 0:
            raise ValueError(f"min_delta: expected a number >= 0, got {self.min_delta!r}.")
        if self.mode is not None and not (isinstance(self.mode, str) and self.mode in ("min", "max")):
            raise ValueError(f"mode: expected 'min' or 'max', got {self.mode!r}.")


class Monitor:
    """Follows one measure, always as lower is better."""

    def __init__(self, stopping: EarlyStopping | None):
        self.stopping = stopping
        self.best = math.inf
        self.best_epoch = 0
        self.best_states: Any = None

    def value(self, record: dict[str, Any]) -> float:
        """The measure of an epoch's record, with its sign turned where higher is better."""
        measures = {"loss": record["loss"], **record.get("validation", {})}
        name = self.stopping.metric if self.stopping else None
        if name is None:
            name = next((n for n in ("nll", "log_likelihood") if n in measures), None)
        if name is None and self.stopping is None:
            name = "loss"
        if name is None or name not in measures:
            raise ValueError(
                f"early_stopping: expected a metric among {list(measures)}, got {name!r}. Name one: "
                "EarlyStopping(metric=…)."
            )
        mode = self.stopping.mode if self.stopping else None
        if mode is None:
            better = Report({}, num_rows=0).better(name)
            if not better.startswith(("higher", "lower")) and name != "loss":
                raise ValueError(
                    f"early_stopping: expected a metric that is better higher or lower, got {name!r}. Say which: "
                    "EarlyStopping(mode='min' or 'max')."
                )
            mode = "max" if better.startswith("higher") else "min"
        value = float(measures[name])
        return -value if mode == "max" else value

    def is_better(self, value: float) -> bool:
        """Whether this is the best so far; what is not finite never is."""
        assert self.stopping is not None
        return math.isfinite(value) and (self.best == math.inf or value < self.best - self.stopping.min_delta)

    def keep(self, value: float, epoch: int, states: Any) -> None:
        self.best, self.best_epoch, self.best_states = value, epoch, states

    def exhausted(self, epoch: int) -> bool:
        return self.stopping is not None and epoch - self.best_epoch >= self.stopping.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "best_states": self.best_states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.keep(state["best"], state["best_epoch"], state["best_states"])


class Interrupt:
    """Ctrl-C as a question: asked once, training ends after the step it is in; asked twice, at once.

    An optimiser interrupted in the middle of its step would leave half of the parameters behind. Takes the place of
    Python's own handler only, and in the main thread only.
    """

    asked = False

    def __enter__(self) -> "Interrupt":
        main = threading.current_thread() is threading.main_thread()
        self.active = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.active:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
