"""The task of classification: one network, one data set, all methods."""

import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import torch

import pyro_vsd as vsd
from benchmarks.paper.data import Parts, load
from benchmarks.paper.evaluation import evaluate, layer_sizes
from benchmarks.paper.store import RESULTS, rounded
from benchmarks.paper.training import train
from benchmarks.paper.unit import Setting, Unit, Variant
from pyro_vsd.baselines import Method, make_method
from pyro_vsd.datasets import Data

__all__ = ["make", "resolved", "run", "shortened", "tuning_path", "units", "versions"]

# Of the loss per row, which SGD needs; Adam does not see the scale.
_MOMENTUM = 0.9


def units(setting: Setting) -> list[Unit]:
    """Every variant with every seed, seeds outermost: one of each comes first."""
    seeds = sorted({seed for v in setting.variants.values() for seed in (v.seeds or setting.seeds)})
    return [
        Unit(setting.task, name, seed, setting.module, setting)
        for seed in seeds
        for name, variant in setting.variants.items()
        if seed in (variant.seeds or setting.seeds)
    ]


def run(
    unit: Unit,
    data: Path | None,
    work: Path,
    *,
    device: str = "cpu",
    smoke: bool = False,
    tuning: Path = RESULTS,
    callback: Callable[[int, Method, Parts], None] | None = None,
    more: Callable[[Method, Parts], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Trains and evaluates one unit; a checkpoint in ``work`` lets it go on after a kill.

    :param callback: called with the epoch, the method and the data after each epoch of training.
    :param more: what else is to be told of the trained method.
    """
    setting: Setting = unit.setting
    variant = setting.variants[unit.variant]
    tuned: dict[str, Any] = {}
    if variant.tuned:
        variant, tuned = resolved(variant, setting.tuned_as or unit.task, unit.variant, tuning, smoke)
    if smoke:
        setting, variant = replace(setting, batch_size=3, num_samples=2), shortened(variant, setting, 1)
    parts = placed(load(setting, data, smoke), device, setting.channels_last)
    method = make(setting, variant, len(parts.train), unit.seed, device)
    checkpoint = work / unit.task / f"{unit.variant}-seed{unit.seed}.pt"
    after = None if callback is None else lambda epoch, method, _: callback(epoch, method, parts)
    history, seconds = train(method, parts.train, setting, variant, unit.seed, checkpoint, unit.name, after)
    result = {
        "method": variant.method,
        "options": variant.options,
        "training": {
            "epochs": variant.epochs or setting.epochs,
            "lr": variant.lr or setting.lr,
            "schedule": variant.schedule,
            "optimizer": variant.optimizer,
            "rates": variant.rates,
        },
        "tuned": tuned,
        "setting": setting.common(),
        "versions": versions(),
        "train_seconds": round(seconds, 1),
        **evaluate(method, parts, setting.num_samples, unit.seed),
        # the singular values of a ResNet take longer than its few steps
        **({} if smoke else {"layers": rounded(layer_sizes(method), 5)}),
        **({} if more is None else rounded(more(method, parts), 6)),
        "history": rounded(history, 4),
    }
    checkpoint.unlink(missing_ok=True)
    return result


def make(setting: Setting, variant: Variant, num_data: int, seed: int, device: str = "cpu") -> Method:
    """The method, all its parameters drawn from the seed; torch's global generator is left at the start of training."""
    pyro.set_rng_seed(seed)
    options = dict(variant.options)
    if variant.method == "deep_ensemble":
        options["init"] = vsd.nn.xavier_uniform_
    with float32():
        net = getattr(vsd.nn, setting.network)(**setting.network_options).to(device)
        if setting.channels_last:
            net = net.to(memory_format=torch.channels_last)
        method = make_method(variant.method, net, num_data=num_data, lr=variant.lr or setting.lr, **options)
    if variant.rates and variant.optimizer != "own":
        raise ValueError(f"rates: expected none beside optimizer={variant.optimizer!r}, got {variant.rates}.")
    if variant.rates:
        method.optimizer = torch.optim.Adam(method.guide.parameter_groups(variant.lr or setting.lr, **variant.rates))
    elif variant.optimizer == "sgd":
        parameters = [p for p in method.parameters() if p.requires_grad]
        # the loss is that of the full data set: its gradient is num_data times that of the loss per row
        method.optimizer = torch.optim.SGD(parameters, lr=(variant.lr or setting.lr) / num_data, momentum=_MOMENTUM)
    elif variant.optimizer != "own":
        raise ValueError(f"optimizer: expected 'own' or 'sgd', got {variant.optimizer!r}.")
    return method


def tuning_path(folder: Path, task: str, variant: str) -> Path:
    """Where the values that a search has chosen are."""
    return folder / "tuning" / f"{task}-{variant}.json"


def resolved(
    variant: Variant, task: str, name: str, folder: Path = RESULTS, smoke: bool = False
) -> tuple[Variant, dict[str, Any]]:
    """The variant with the values its search has chosen, and these."""
    if smoke:
        return variant, {}
    path = tuning_path(folder, task, name)
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the values chosen for {task}/{name} in {path}, got no file. "
            f"Run: python -m benchmarks.paper tune --task {task} --only {name}"
        )
    chosen: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["chosen"]
    if set(chosen) != set(variant.tuned):
        raise ValueError(f"{path}: expected values of {', '.join(variant.tuned)}, got {', '.join(chosen)}.")
    return with_values(variant, chosen), chosen


def with_values(variant: Variant, values: dict[str, Any]) -> Variant:
    """The variant with these options; ``lr`` is its own."""
    options = {key: value for key, value in values.items() if key != "lr"}
    return replace(variant, options={**variant.options, **options}, lr=values.get("lr", variant.lr))


def shortened(variant: Variant, setting: Setting, epochs: int) -> Variant:
    """The variant trained for fewer epochs; SWAG takes its snapshots in the same shares of the training."""
    share = epochs / (variant.epochs or setting.epochs)
    times = {key: value * share for key, value in variant.options.items() if key in ("start", "period")}
    return replace(variant, epochs=epochs, options={**variant.options, **times})


def placed(parts: Parts, device: str, channels_last: bool) -> Parts:
    """The data where the network is, laid out as it likes it."""

    def place(data: Data) -> Data:
        data = data.to(device)
        return replace(data, x=data.x.contiguous(memory_format=torch.channels_last)) if channels_last else data

    return Parts(*map(place, parts[:3]), {name: place(data) for name, data in parts.ood.items()})


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "pyro_vsd": vsd.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


@contextlib.contextmanager
def float32() -> Iterator[None]:
    """All new tensors in float32, whatever the default is: the tables are of float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
