"""How long to train, and how fast, where nobody says."""

import math

__all__ = ["auto_batch_size", "auto_epochs", "auto_lengths", "auto_rate", "cosine"]

# Where the cosine starts, with fewer rows than _MANY and with more. Networks for images are unstable at the first.
_RATES, _MANY = (1e-2, 1e-3), 20_000
# Steps for up to _ROWS rows; more rows get more steps, by the square root of their number.
_STEPS, _ROWS = 3000, 1000
# A longer run, for who has held-out rows to choose by. See docs/ensembles_evidence.md.
_LONG = 9000
# Rows in a batch: a fifth of the rows, so that small data has noisy steps too, and no more than this; with many rows no
# more than the second.
_LEAST, _MOST = 8, (200, 100)


def auto_batch_size(rows: int) -> int:
    """Most rows in a batch.

    >>> auto_batch_size(40), auto_batch_size(455), auto_batch_size(5_000), auto_batch_size(60_000)
    (8, 91, 200, 100)
    """
    return min(_MOST[rows >= _MANY], max(_LEAST, rows // 5))


def auto_epochs(rows: int, steps_per_epoch: int) -> int:
    """Passes over the rows that make 3,000 steps; beyond 1,000 rows more, by the square root of their number.

    >>> auto_epochs(455, 5), auto_epochs(60_000, 600)
    (600, 39)
    """
    return math.ceil(_auto_steps(rows) / steps_per_epoch)


def auto_lengths(rows: int, steps_per_epoch: int) -> list[int]:
    """Numbers of passes to choose from: those of :func:`auto_epochs`, and 9,000 steps where that is twice as many.

    >>> auto_lengths(455, 5), auto_lengths(8_000, 40), auto_lengths(60_000, 600)
    ([600, 1800], [225], [39])
    """
    steps = _auto_steps(rows)
    chosen = [steps, _LONG] if 2 * steps <= _LONG else [max(steps, _LONG)]
    return [math.ceil(number / steps_per_epoch) for number in chosen]


def _auto_steps(rows: int) -> float:
    return _STEPS * math.sqrt(max(rows / _ROWS, 1.0))


def auto_rate(rows: int) -> float:
    """Adam's rate at the start.

    >>> auto_rate(1_000), auto_rate(60_000)
    (0.01, 0.001)
    """
    return _RATES[rows >= _MANY]


def cosine(step: int, steps: int) -> float:
    """The share of the learning rate at a step: from 1 down to 0 along half a cosine.

    >>> [round(cosine(step, 4), 2) for step in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * step / steps))
