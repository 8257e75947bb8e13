"""Trains in processes that are killed at random moments, 25 times; run by ``test_killed.py``.

    python -m tests.training.killed FOLDER torch|pyro

Each process is a fork of this one, which has taken steps to have everything imported, and begins from the
checkpoint that the last one left.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pyro
import pyro.optim
import torch

import pyro_vsd as vsd
from pyro_vsd.training import Checkpoint, EarlyStopping, fit, load_checkpoint
from tests.training import cases

KILLS, EPOCHS = 25, 40
# What share of a whole run a process lives at most: little enough for all kills to fall into one.
LONGEST = 1 / 20


def train(path: Path | None, kind: str, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = cases.batch_norm()
    guide = vsd.VSDGuide(model)
    fit(
        model,
        guide,
        cases.data(),
        epochs=epochs,
        batch_size=5,
        optimizer=pyro.optim.Adam({"lr": 0.01}) if kind == "pyro" else torch.optim.AdamW,
        scheduler=None if kind == "pyro" else lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.99),
        elbo=vsd.VSD_ELBO(kl_weight=vsd.infer.cosine_warmup(100)),
        validation=cases.data(),
        validation_samples=3,
        early_stopping=EarlyStopping(patience=EPOCHS),
        checkpoint=None if path is None else Checkpoint(path, every_steps=1),
        seed=7,
        progress=False,
    )
    return cases.values(model, guide)


def in_child(path: Path | None, kind: str, result: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.save(train(path, kind), result)
        status = 0
    finally:
        os._exit(status)


def main(folder: Path, kind: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for epochs in (1, 2):
        train(folder / "warm.ckpt", kind, epochs)
        pyro.clear_param_store()
    assert os.waitpid(in_child(None, kind, folder / "whole.pt"), 0)[1] == 0
    start = time.monotonic()
    assert os.waitpid(in_child(folder / "saved.ckpt", kind, folder / "saved.pt"), 0)[1] == 0
    longest = (time.monotonic() - start) * LONGEST
    checkpoint, result, chance = folder / "run.ckpt", folder / "killed.pt", random.Random(0)
    kills, sizes = 0, set()
    while kills < KILLS:
        child = in_child(checkpoint, kind, result)
        time.sleep(chance.uniform(0, longest))
        if os.waitpid(child, os.WNOHANG)[0]:
            raise SystemExit(f"finished after {kills} kills: make the run longer")
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        kills += 1
        if checkpoint.exists():
            sizes.add(load_checkpoint(checkpoint)["step"])
    assert os.waitpid(in_child(checkpoint, kind, result), 0)[1] == 0
    print(f"{kills} kills at {len(sizes)} different steps")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
