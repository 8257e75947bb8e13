"""Runs what is missing: units in order, finished ones skipped, several processes at once if asked."""

import contextlib
import fcntl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from joblib import Parallel, delayed
from tqdm import tqdm

from benchmarks.paper import store
from benchmarks.paper.registry import module_of, units_of
from benchmarks.paper.unit import Unit

__all__ = ["missing", "run", "run_unit", "selected"]


def selected(tasks: Sequence[str], only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Unit]:
    """The units of these tasks, in order; ``only`` names variants, empty means all."""
    units = [unit for task in tasks for unit in units_of(task)]
    known = dict.fromkeys(unit.variant for unit in units)
    unknown = set(only) - set(known)
    if unknown:
        raise ValueError(f"only: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    chosen = [u for u in units if (not only or u.variant in only) and (not seeds or u.seed in seeds)]
    if not chosen:
        raise ValueError(f"seeds: expected some of {sorted({unit.seed for unit in units})}, got {list(seeds)}.")
    return chosen


def missing(units: Sequence[Unit], results: Path) -> list[Unit]:
    """Those without a result."""
    return [unit for unit in units if not store.done(results, unit.task, unit.variant, unit.seed)]


def run_unit(unit: Unit, results: Path, data: Path | None, work: Path, **how: Any) -> str:
    """Runs one unit, if nobody else is at it or has done it, and stores its result; returns a line about it."""
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    with _lock(work / unit.task / f"{unit.variant}-seed{unit.seed}.lock") as mine:
        if not mine:
            return f"{unit.name}: another process is at it"
        if store.done(results, unit.task, unit.variant, unit.seed):
            return f"{unit.name}: done"
        start = time.perf_counter()
        result = module_of(unit).run(unit, data, work, **how)
        store.save(result, results, unit.task, unit.variant, unit.seed)
    metrics = {key: f"{value:.4f}" for key, value in result["metrics"].items() if isinstance(value, float)}
    return f"{unit.name}: {metrics} in {time.perf_counter() - start:.0f} s"


def run(units: Sequence[Unit], results: Path, data: Path | None, work: Path, jobs: int = 1, **how: Any) -> None:
    """Runs the units that are missing, in order."""
    todo = missing(units, results)
    if not todo:
        tqdm.write(f"all {len(units)} done")
    calls = (delayed(run_unit)(unit, results, data, work, **how) for unit in todo)
    lines = Parallel(n_jobs=jobs, return_as="generator_unordered", pre_dispatch=jobs, batch_size=1)(calls)
    with tqdm(total=len(todo), unit="unit", disable=None) as bar:
        for line in lines:
            bar.write(line)
            bar.update()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether this process alone has the file; the system frees it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
