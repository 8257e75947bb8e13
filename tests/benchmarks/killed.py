"""Runs a unit in processes that are killed at random moments; run by ``test_runner.py``.

    python -m tests.benchmarks.killed FOLDER VARIANT

Each process is a fork of this one, which has run a short unit to have everything imported, and starts the unit again.
"""

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.paper import images, runner, store
from benchmarks.paper.settings import digits

KILLS, EPOCHS = 8, 20
SETTING = digits.SETTINGS[0]


def run(variant: str, folder: Path, epochs: int) -> None:
    unit = next(u for u in images.units(replace(SETTING, epochs=epochs)) if u.variant == variant)
    runner.run_unit(unit, folder / "results", None, folder / "work")


def in_child(variant: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(variant, folder, EPOCHS)
        status = 0
    finally:
        os._exit(status)


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
    run(variant, folder / "warm", 4)
    assert os.waitpid(in_child(variant, folder / "whole"), 0)[1] == 0
    seconds = store.load(folder / "whole" / "results", "digits")[0]["train_seconds"]
    chance, epochs = random.Random(0), set()
    checkpoint = folder / "killed" / "work" / "digits" / f"{variant}-seed0.pt"
    for kill in range(KILLS):
        child = in_child(variant, folder / "killed")
        # by progress and not by the clock alone: on a busy machine a process may not get far
        epochs.add(wait_for(checkpoint, kill % 3))
        time.sleep(chance.uniform(0, 2 * seconds / EPOCHS))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert os.waitpid(in_child(variant, folder / "killed"), 0)[1] == 0
    print(f"{KILLS} kills after {len(epochs)} different epochs")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
