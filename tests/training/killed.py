"""Trains in processes that are killed at random moments, 25 times; run by ``test_killed.py``.

    python -m tests.training.killed FOLDER torch|pyro

Each process begins from the checkpoint that the last one left.
"""

import random
import sys
import time
from pathlib import Path

import pyro
import pyro.optim
import torch

import pyro_vsd as vsd
from pyro_vsd.training import Checkpoint, EarlyStopping, fit, load_checkpoint
from tests import children
from tests.training import cases

KILLS, EPOCHS = 25, 40
# What share of a whole run a process lives at most: little enough for all kills to fall into one.
LONGEST = 1 / 20


def train(path: Path | None, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = cases.batch_norm()
    guide = vsd.VSDGuide(model)
    fit(
        model,
        guide,
        cases.data(),
        epochs=EPOCHS,
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


def keep(path: Path | None, kind: str, result: Path) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.save(train(path, kind), result)


def main(folder: Path, kind: str) -> None:
    children.finish(children.start(keep, None, kind, folder / "whole.pt"))
    start = time.monotonic()
    children.finish(children.start(keep, folder / "saved.ckpt", kind, folder / "saved.pt"))
    longest = (time.monotonic() - start) * LONGEST
    checkpoint, result, chance = folder / "run.ckpt", folder / "killed.pt", random.Random(0)
    kills, sizes = 0, set()
    while kills < KILLS:
        child = children.start(keep, checkpoint, kind, result)
        time.sleep(chance.uniform(0, longest))
        if not child.is_alive():
            raise SystemExit(f"finished after {kills} kills: make the run longer")
        children.kill(child)
        kills += 1
        if checkpoint.exists():
            sizes.add(load_checkpoint(checkpoint)["step"])
    children.finish(children.start(keep, checkpoint, kind, result))
    print(f"{kills} kills at {len(sizes)} different steps")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
