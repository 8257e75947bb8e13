"""Runs a unit in processes that are killed at random moments; run by ``test_runner.py``.

    python -m tests.benchmarks.killed FOLDER VARIANT

Each process starts the unit again.
"""

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.paper import images, runner, store
from benchmarks.paper.settings import digits
from tests import children

KILLS, EPOCHS = 8, 20
SETTING = digits.SETTINGS[0]


def run(variant: str, folder: Path) -> None:
    unit = next(u for u in images.units(replace(SETTING, epochs=EPOCHS)) if u.variant == variant)
    runner.run_unit(unit, folder / "results", None, folder / "work")


def wait_for(path: Path, changes: int) -> int:
    """Waits until the file was written so many times."""
    last = path.stat().st_mtime_ns if path.exists() else 0
    while changes:
        time.sleep(0.001)
        now = path.stat().st_mtime_ns if path.exists() else 0
        changes -= now != last
        last = now
    return last


def main(folder: Path, variant: str) -> None:
    children.finish(children.start(run, variant, folder / "whole"))
    seconds = store.load(folder / "whole" / "results", "digits")[0]["train_seconds"]
    chance, epochs = random.Random(0), set()
    checkpoint = folder / "killed" / "work" / "digits" / f"{variant}-seed0.pt"
    for kill in range(KILLS):
        child = children.start(run, variant, folder / "killed")
        # by progress and not by the clock alone: on a busy machine a process may not get far
        epochs.add(wait_for(checkpoint, kill % 3))
        time.sleep(chance.uniform(0, 2 * seconds / EPOCHS))
        children.kill(child)
    children.finish(children.start(run, variant, folder / "killed"))
    print(f"{KILLS} kills after {len(epochs)} different epochs")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
