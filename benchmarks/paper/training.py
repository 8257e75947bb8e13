"""Training a method epoch by epoch, with a checkpoint after each: a killed run goes on as if nothing had happened."""

import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.paper.data import augmented
from benchmarks.paper.unit import Setting, Variant
from pyro_vsd.baselines import Method
from pyro_vsd.datasets import Data

__all__ = ["factor", "train"]

#: what is known after each epoch: ``callback(epoch, method, history)``
Callback = Callable[[int, Method, dict[str, list[float]]], None]


def factor(schedule: str, share: float) -> float:
    """The learning rate's factor after that share of the training.

    >>> [round(factor("cosine", s), 2) for s in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    >>> [round(factor("swag", s), 2) for s in (0.0, 0.5, 2 / 3, 1.0)]
    [1.0, 1.0, 0.2, 0.2]
    >>> [round(factor("steps", s), 3) for s in (0.0, 0.19, 0.2, 0.99)]
    [1.0, 0.3, 0.09, 0.0]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    if schedule == "swag":
        return 1 - 0.8 * min(max(6 * (share - 0.5), 0.0), 1.0)
    if schedule == "steps":
        return 0.3 ** math.floor(10 * share + 1e-9)
    raise ValueError(f"schedule: expected 'cosine', 'swag', 'steps' or 'constant', got {schedule!r}.")


def train(
    method: Method,
    data: Data,
    setting: Setting,
    variant: Variant,
    seed: int,
    checkpoint: Path | None = None,
    name: str = "",
    callback: Callback | None = None,
) -> tuple[dict[str, list[float]], float]:
    """Trains to the end; returns the history by epoch and the seconds, those before a kill included.

    :param data: the training rows, on the method's device; a last batch that is shorter is left out.
    :param seed: of the batches' order; the noise comes from torch's global generator.
    :param checkpoint: a file that holds all there is to go on with after an epoch; one of other settings is not used.
    """
    epochs = variant.epochs or setting.epochs
    steps = len(data) // setting.batch_size
    rates = torch.optim.lr_scheduler.LambdaLR(
        method.optimizer, lambda step: factor(variant.schedule, step / (epochs * steps))
    )
    history: dict[str, list[float]] = {"loss": []}
    seconds = 0.0
    key = repr((setting.common(), variant, seed))
    state = {} if checkpoint is None else _read(checkpoint)
    if state.get("key") == key:
        history, seconds = state["history"], state["seconds"]
        _restore(state, method, rates)
    bar = tqdm(range(len(history["loss"]), epochs), desc=name, unit="epoch", leave=False, disable=None)
    for epoch in bar:
        start, total = time.perf_counter(), 0.0
        for x, y in data.batches(setting.batch_size, seed=10_000 * seed + epoch, drop_last=True):
            total += method.step(augmented(x, setting.flip) if setting.augment else x, y)
            rates.step()
        seconds += time.perf_counter() - start
        history["loss"].append(total / steps / len(data))
        bar.set_postfix(loss=f"{history['loss'][-1]:.4f}")
        if callback is not None:
            callback(epoch, method, history)
        if checkpoint is not None:
            _keep(checkpoint, method, rates, {"key": key, "history": history, "seconds": seconds})
    return history, seconds


def _read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds; nothing where there is none, or a file that cannot be read, which is warned of."""
    if not path.is_file():
        return {}
    try:
        # on the CPU first: generators' states have to be there, and parameters are copied to where they belong
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of unpickling
        state = error
    if isinstance(state, dict):
        return state
    warnings.warn(f"{path}: expected a checkpoint, got {state!r}. The unit begins anew.", stacklevel=3)
    return {}


def _keep(path: Path, method: Method, rates: Any, more: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")  # always the same: what a kill leaves is written over
    state = {
        **more,
        "method": method.state_dict(),
        # without the function, which is not data
        "rates": {name: value for name, value in rates.state_dict().items() if name != "lr_lambdas"},
        "generator": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _restore(state: dict[str, Any], method: Method, rates: Any) -> None:
    method.load_state_dict(state["method"])
    rates.load_state_dict({**rates.state_dict(), **state["rates"]})
    torch.set_rng_state(state["generator"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
