"""What the UCI runs gave, from the stored results: numbers by split and seed, means, paired differences."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.paper import store
from benchmarks.paper.settings.uci import SETTINGS, UCISetting

__all__ = ["METRICS", "Results", "load", "mean_and_error", "median", "paired", "values"]

METRICS = ("rmse", "log_likelihood")
Results = dict[tuple[str, str, int], dict[str, Any]]


def load(folder: str | Path, settings: Iterable[UCISetting] = SETTINGS) -> Results:
    """All results of these settings by set, variant and seed."""
    found: Results = {}
    for setting in settings:
        for result in store.load(folder, setting.task):
            if result["variant"] in setting.variants:
                found[setting.data, result["variant"], result["seed"]] = result
    return found


def values(results: Results, data: str, variant: str, group: str, metric: str) -> dict[int, list[float]]:
    """The numbers of all splits, by seed."""
    return {
        seed: result["groups"][group][metric]
        for (name, kind, seed), result in sorted(results.items())
        if name == data and kind == variant and group in result["groups"]
    }


def mean_and_error(by_seed: dict[int, list[float]]) -> tuple[float, float, int]:
    """Mean over splits and seeds, the standard error over splits of their means over seeds, and the number of runs.

    Splits share most of their training rows, so the error is optimistic, as it is in all tables of this benchmark.
    """
    splits = [statistics.fmean(column) for column in zip(*by_seed.values(), strict=True)]
    error = statistics.stdev(splits) / math.sqrt(len(splits)) if len(splits) > 1 else math.nan
    return statistics.fmean(splits), error, len(splits) * len(by_seed)


def median(by_seed: dict[int, list[float]]) -> float:
    """Of all splits and seeds: single splits do not move it."""
    return statistics.median([value for column in by_seed.values() for value in column])


def paired(
    results: Results, data: str, one: tuple[str, str], other: tuple[str, str], metric: str, level: float = 0.95
) -> tuple[float, float, int] | None:
    """Mean difference over splits and seeds, half the width of its interval, and the number of differences.

    A split counts once, by its mean over the seeds that both have (seeds of a split are not independent); the
    interval is Student's over splits. ``None`` where there is nothing to compare.
    """
    first, second = (values(results, data, *key, metric) for key in (one, other))
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    rows = [[a - b for a, b in zip(first[seed], second[seed], strict=True)] for seed in seeds]
    splits = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    if len(splits) < 2:
        return None
    half = stats.t.ppf(0.5 + level / 2, len(splits) - 1) * statistics.stdev(splits) / math.sqrt(len(splits))
    return statistics.fmean(splits), float(half), len(splits) * len(seeds)
