"""Weights of the KL over training: functions ``step -> weight``."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyro_vsd._utils import check_nonnegative, check_positive

__all__ = ["cosine_warmup", "cyclical", "linear_warmup"]

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class linear_warmup:
    """From 0 to ``to`` in a straight line over ``steps`` steps, then constant.

    >>> schedule = linear_warmup(10, to=0.5)
    >>> schedule(0), schedule(5), schedule(100)
    (0.0, 0.25, 0.5)
    """

    steps: int
    to: float = 1.0

    def __post_init__(self) -> None:
        check_positive("steps", self.steps)
        check_nonnegative("to", self.to)

    def __call__(self, step: int) -> float:
        return self.to * min(1.0, step / self.steps)


@dataclass(frozen=True)
class cosine_warmup(linear_warmup):
    """From 0 to ``to`` along half a cosine over ``steps`` steps, then constant.

    >>> schedule = cosine_warmup(10)
    >>> schedule(0), round(schedule(5), 6), schedule(10)
    (0.0, 0.5, 1.0)
    """

    def __call__(self, step: int) -> float:
        return self.to * 0.5 * (1 - math.cos(math.pi * min(1.0, step / self.steps)))


@dataclass(frozen=True)
class cyclical:
    """Cycles of ``period`` steps: from 0 to ``to`` in a straight line over the first ``ratio`` of each, then constant.

    >>> schedule = cyclical(10, ratio=0.5)
    >>> [schedule(step) for step in (0, 4, 5, 9, 10)]
    [0.0, 0.8, 1.0, 1.0, 0.0]
    """

    period: int
    to: float = 1.0
    ratio: float = 0.5

    def __post_init__(self) -> None:
        check_positive("period", self.period)
        check_nonnegative("to", self.to)
        check_positive("ratio", self.ratio)
        if self.ratio > 1:
            raise ValueError(f"ratio must be at most 1, not {self.ratio}.")

    def __call__(self, step: int) -> float:
        return self.to * min(1.0, (step % self.period) / (self.ratio * self.period))
