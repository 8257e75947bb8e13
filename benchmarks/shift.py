"""Predictions under shift: VSD beside other ways to uncertainty, on images that training has not seen the like of.

    python benchmarks/shift.py                            # digits, five random splits: about ten minutes
    python benchmarks/shift.py --task mnist --data FOLDER # FOLDER/MNIST/raw and FOLDER/FashionMNIST/raw; an hour a seed
    python benchmarks/shift.py --cost                     # digits: what a training step and a prediction cost
    python benchmarks/shift.py --table                    # from the stored results
    python benchmarks/shift.py --write                    # the same into README.md and docs/shift.md, and the figures

What is stored is not run again: delete the files of a method to measure it anew. The rows of Laplace approximations
need ``pip install laplace-torch==0.3`` and are left out without it.

All methods have the same network, the same number of steps and the same rule for the rate: Adam, from the rate of
``vsd.fit`` down to zero along a cosine. Whatever is chosen (weight decay, dropout's p, temperatures, strengths) is
chosen on 15 % of the training rows, and the network is then trained on all of them; ``from_trained`` alone keeps the
network that has not seen these rows, which the row "plain, 85 % of the rows" shows without noise.
"""

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import InterpolationMode, rotate

import pyro_vsd as vsd

RESULTS = Path(__file__).parent / "results" / "shift"
SAMPLES = 100
HELD_OUT = 0.15
DECAYS = (0.0, 3e-4, 1e-3)
DROPOUT = (0.1, 0.2, 0.4)
ENSEMBLE = 5
Predict = Callable[[Tensor], vsd.ClassificationPrediction]
Rows = vsd.datasets.Data


# ---- data and its shifts


def pixel_noise(x: Tensor, strength: float) -> Tensor:
    """Normal noise on every pixel; what leaves [0, 1] is cut off."""
    generator = torch.Generator().manual_seed(round(1000 * strength))
    return (x + strength * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def rotation(x: Tensor, angle: float) -> Tensor:
    side = math.isqrt(x.shape[-1])
    images = x.reshape(-1, 1, side, side)
    return rotate(images, angle, interpolation=InterpolationMode.BILINEAR).flatten(1)


def shuffled_pixels(x: Tensor) -> Tensor:
    """The same grey values in a random order, different for each image."""
    generator = torch.Generator().manual_seed(0)
    return x.gather(-1, torch.rand(x.shape, generator=generator).argsort(-1))


def digits(seed: int, folder: str | None) -> tuple[Rows, Rows, dict[str, Tensor]]:
    """A random split of all rows, as large as the fixed one."""
    train, test = vsd.datasets.digits(dtype=torch.float32)
    rows = Rows(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    train, test = rows[order[: len(train)]], rows[order[len(train) :]]
    return train, test, {"shuffled pixels": shuffled_pixels(test.x), "rotated by 90°": rotation(test.x, 90)}


def mnist(seed: int, folder: str | None) -> tuple[Rows, Rows, dict[str, Tensor]]:
    (train, test), (_, outside) = (load(folder, flatten=True) for load in IMAGES)
    return train, test, {"Fashion-MNIST": outside.x[: TASKS["mnist"].rows]}


def fashion(seed: int, folder: str | None) -> tuple[Rows, Rows, dict[str, Tensor]]:
    (train, test), (_, outside) = (load(folder, flatten=True) for load in reversed(IMAGES))
    return train, test, {"MNIST": outside.x[: TASKS["fashion"].rows]}


IMAGES = (vsd.datasets.mnist, vsd.datasets.fashion_mnist)


@dataclass(frozen=True)
class Task:
    """A data set, its network, and what is done to its test images.

    :ivar load: from a seed and a folder to training rows, test rows, and out-of-distribution inputs by name.
    :ivar epochs: passes over the training rows.
    :ivar rate: where the cosine starts: that of ``vsd.fit`` for so many rows.
    :ivar rows: how many test images are shifted.
    :ivar plain: plain networks there are, to count in deep ensembles.
    """

    title: str
    load: Callable[[int, str | None], tuple[Rows, Rows, dict[str, Tensor]]]
    sizes: tuple[int, ...]
    epochs: int
    rate: float
    shifts: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]]
    rows: int = 2000
    plain: int = ENSEMBLE


NOISE = (pixel_noise, (0.1, 0.2, 0.3, 0.4, 0.5))
ANGLES = (rotation, tuple(range(15, 181, 15)))
WIDE = (784, 400, 400, 10)
TASKS = {
    "digits": Task("Digits", digits, (64, 100, 100, 10), 241, 1e-2, {"pixel noise": NOISE}, plain=10),
    "mnist": Task("MNIST", mnist, WIDE, 10, 1e-3, {"rotation": ANGLES, "pixel noise": NOISE}),
    "fashion": Task("Fashion-MNIST", fashion, WIDE, 10, 1e-3, {"rotation": ANGLES, "pixel noise": NOISE}),
}


# ---- plain networks


def network(sizes: tuple[int, ...], p: float = 0.0) -> nn.Sequential:
    """A multilayer perceptron, with dropout after each activation where p is above zero."""
    layers: list[nn.Module] = []
    for layer in vsd.nn.mlp(list(sizes)):
        layers.append(layer)
        if p and isinstance(layer, nn.ReLU):
            layers.append(nn.Dropout(p))
    return nn.Sequential(*layers)


def train_plain(net: nn.Module, rows: Rows, epochs: int, rate: float, decay: float, seed: int) -> nn.Module:
    """Cross entropy, Adam, a cosine: the loop that all methods without VSD share."""
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(rows) / 100))
    torch.manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for x, y in rows.batches(100):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


@torch.no_grad()
def predict_plain(net: nn.Module, x: Tensor) -> vsd.ClassificationPrediction:
    return vsd.ClassificationPrediction.from_samples(net(x).softmax(-1).unsqueeze(0))


@torch.no_grad()
def predict_dropout(net: nn.Module, x: Tensor) -> vsd.ClassificationPrediction:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net.train()
        samples = torch.stack([net(x).softmax(-1) for _ in range(SAMPLES)])
        net.eval()
    return vsd.ClassificationPrediction.from_samples(samples)


class Split:
    """The rows of one seed, and the plain networks that several methods share, trained when first asked for."""

    def __init__(self, task: Task, seed: int, folder: str | None, epochs: int | None = None):
        self.task, self.seed, self.epochs = task, seed, epochs or task.epochs
        self.train, self.test, self.outside = task.load(seed, folder)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1000 + seed))
        held = round(HELD_OUT * len(self.train))
        self.held_out, self.rest = self.train[order[:held]], self.train[order[held:]]

    def fitted(self, rows: Rows, decay: float, number: int = 0, p: float = 0.0) -> nn.Module:
        seed = 100 * self.seed + number
        torch.manual_seed(seed)
        return train_plain(network(self.task.sizes, p), rows, self.epochs, self.task.rate, decay, seed)

    @cached_property
    def without_held_out(self) -> tuple[float, nn.Module]:
        """The weight decay whose network predicts the held-out rows best, and that network."""
        nets = [(decay, self.fitted(self.rest, decay)) for decay in DECAYS]
        return min(nets, key=lambda found: vsd.metrics.nll(predict_plain(found[1], self.held_out.x), self.held_out.y))

    @cached_property
    def temperature(self) -> Any:
        net = self.without_held_out[1]
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(self.rest))
        guide = vsd.VSDGuide(model)
        with guide.noise_times(0.0):
            return vsd.calibrate(model, guide, self.held_out, num_samples=1, noise=False)

    @cached_property
    def plain(self) -> list[nn.Module]:
        """Networks from different starts, trained on all rows."""
        return [self.fitted(self.train, self.without_held_out[0], number) for number in range(self.task.plain)]


# ---- methods: from a split to a function that predicts, and what was chosen on held-out rows

Method = Callable[[Split], tuple[Predict, dict[str, Any]]]


def no_decay(split: Split) -> tuple[Predict, dict[str, Any]]:
    net = split.fitted(split.train, 0.0)
    return lambda x: predict_plain(net, x), {}


def plain(split: Split) -> tuple[Predict, dict[str, Any]]:
    net = split.plain[0]
    return lambda x: predict_plain(net, x), {"weight decay": split.without_held_out[0]}


def fewer_rows(split: Split) -> tuple[Predict, dict[str, Any]]:
    decay, net = split.without_held_out
    return lambda x: predict_plain(net, x), {"weight decay": decay}


def temperature(split: Split) -> tuple[Predict, dict[str, Any]]:
    net, calibration = split.plain[0], split.temperature
    return lambda x: calibration.apply(predict_plain(net, x)), {"temperature": float(calibration.temperature)}


def mc_dropout(split: Split) -> tuple[Predict, dict[str, Any]]:
    def score(chosen: tuple[float, float]) -> float:
        net = split.fitted(split.rest, chosen[1], p=chosen[0])
        return vsd.metrics.nll(predict_dropout(net, split.held_out.x), split.held_out.y)

    p, decay = min(itertools.product(DROPOUT, DECAYS), key=score)
    net = split.fitted(split.train, decay, p=p)
    return lambda x: predict_dropout(net, x), {"p": p, "weight decay": decay}


def deep_ensemble(split: Split) -> tuple[Predict, dict[str, Any]]:
    nets = split.plain[:ENSEMBLE]
    return lambda x: vsd.ensemble.mixture([predict_plain(net, x) for net in nets]), {}


def laplace(subset: str) -> Method:
    def method(split: Split) -> tuple[Predict, dict[str, Any]]:
        from laplace import Laplace

        loader = torch.utils.data.DataLoader(split.train, batch_size=500)
        fitted = Laplace(split.plain[0], "classification", subset_of_weights=subset, hessian_structure="kron")
        fitted.fit(loader)
        fitted.optimize_prior_precision(method="marglik")

        def predict(x: Tensor) -> vsd.ClassificationPrediction:
            parts = [fitted(rows, pred_type="glm", link_approx="probit") for rows in x.split(500)]
            return vsd.ClassificationPrediction.from_samples(torch.cat(parts).detach().unsqueeze(0))

        return predict, {"prior precision": float(torch.as_tensor(fitted.prior_precision).mean())}

    return method


def structured_dropout(**options: Any) -> Method:
    def method(split: Split) -> tuple[Predict, dict[str, Any]]:
        torch.manual_seed(split.seed)
        model = vsd.nn.Classifier(vsd.nn.bayesianize(network(split.task.sizes)), num_data=len(split.train))
        guide = vsd.VSDGuide(model, **options)
        vsd.fit(model, guide, split.train, epochs=split.epochs, seed=split.seed, progress=False)
        return lambda x: vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0), {}

    return method


def from_trained(split: Split) -> tuple[Predict, dict[str, Any]]:
    net = split.without_held_out[1]
    model, guide = vsd.from_trained(net, split.rest, split.held_out, seed=split.seed, progress=False)
    return lambda x: vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0), {}


def vsd_ensemble(split: Split) -> tuple[Predict, dict[str, Any]]:
    model = vsd.nn.Classifier(vsd.nn.bayesianize(network(split.task.sizes)), num_data=len(split.train))
    ensemble = vsd.Ensemble(model, seed=split.seed).fit(split.train, epochs=split.epochs, progress=False)
    chosen = {"weights": ensemble.weights.tolist(), "temperatures": ensemble.stacking.factors.tolist()}
    return lambda x: ensemble.predict(x, num_samples=SAMPLES, seed=0), chosen


METHODS: dict[str, Method] = {
    "plain, no weight decay": no_decay,
    "plain": plain,
    "plain, 85 % of the rows": fewer_rows,
    "temperature": temperature,
    "MC dropout": mc_dropout,
    "deep ensemble of 5": deep_ensemble,
    "Laplace, last layer": laplace("last_layer"),
    "Laplace, all layers": laplace("all"),
    "VD": structured_dropout(num_reflections=0),
    "VSD": structured_dropout(),
    "from_trained": from_trained,
    "VSD ensemble": vsd_ensemble,
}


# ---- measuring


def scores(predict: Predict, split: Split) -> dict[str, Any]:
    """Metrics of the test images as they are and under each shift, and the AUROC of out-of-distribution images."""
    few = split.test[: split.task.rows]
    inside = predict(split.test.x)
    found: dict[str, Any] = {"clean": metrics_of(inside, split.test.y)}
    for name, (shift, strengths) in split.task.shifts.items():
        found[name] = {f"{s:g}": metrics_of(predict(shift(few.x, s)), few.y) for s in strengths}
    found["OOD"] = {}
    for name, x in split.outside.items():
        elsewhere = predict(x)
        found["OOD"][name] = {"auroc": rounded(auroc(inside, elsewhere, "entropy"))}
        if inside.num_samples > 1:
            found["OOD"][name]["auroc by MI"] = rounded(auroc(inside, elsewhere, "mutual_information"))
    nets = [split.temperature.apply(predict_plain(net, split.test.x)) for net in split.plain]
    equivalent = vsd.metrics.deep_ensemble_equivalent(inside, nets, split.test.y)
    found["equivalent"] = rounded(equivalent) if math.isfinite(equivalent) else None  # more than there are
    return found


def metrics_of(prediction: vsd.ClassificationPrediction, y: Tensor) -> dict[str, float]:
    functions = {"nll": vsd.metrics.nll, "error": vsd.metrics.error_rate, "ece": vsd.metrics.ece}
    functions["aurc"] = vsd.metrics.aurc
    return {name: rounded(function(prediction, y)) for name, function in functions.items()}


def auroc(inside: Any, outside: Any, score: Any) -> float:
    return vsd.metrics.auroc(vsd.metrics.ood_score(inside, score), vsd.metrics.ood_score(outside, score))


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def path_of(task: str, method: str, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "_" for letter in method.replace(" %", ""))
    return RESULTS / f"{task}-{name.replace('__', '_')}-{seed}.json"


def run(task: str, methods: list[str], seeds: int, folder: str | None) -> None:
    for seed in range(seeds):
        split = None
        for method in methods:
            path = path_of(task, method, seed)
            if path.exists():
                continue
            split = split or Split(TASKS[task], seed, folder)
            start = time.process_time()
            try:
                predict, chosen = METHODS[method](split)
            except ImportError:
                print(f"{method}: left out, laplace-torch is not installed")
                continue
            found = {"method": method, "seed": seed, "chosen": chosen, **scores(predict, split)}
            path.write_text(json.dumps(found, indent=1) + "\n")
            seconds, clean = time.process_time() - start, found["clean"]
            print(f"{path.name:44s} {seconds:5.0f} s  NLL {clean['nll']:.4f}  ECE {clean['ece']:.4f}  "
                  f"equivalent {found['equivalent']}", flush=True)  # fmt: skip
