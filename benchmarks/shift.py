"""Predictions under shift: VSD beside other ways to uncertainty, on images that training has not seen the like of.

    python -m benchmarks.shift                                       # digits, five random splits: about ten minutes
    python -m benchmarks.shift --task mnist --data FOLDER --seeds 1  # or fashion; twenty minutes a seed
    python -m benchmarks.shift --task cifar --data FOLDER --seeds 1  # half an hour a seed
    python -m benchmarks.shift --cost                # digits: what a training step and a prediction cost
    python -m benchmarks.shift --table               # from the stored results
    python -m benchmarks.shift --write               # the same into README.md and docs/shift.md, and the figures

FOLDER holds what torchvision reads: ``MNIST/raw``, ``FashionMNIST/raw``, ``cifar-10-batches-py``; of CIFAR-100 only
``cifar-100-python/test`` is needed.

What is stored is not run again: delete the files of a method to measure it anew. The rows of Laplace approximations
need ``pip install laplace-torch==0.3`` and are left out without it.

All methods have the same network, the same batches of 100 rows, the same number of steps and the same rule for the
rate: Adam, from the rate of ``vsd.fit`` down to zero along a cosine. Other options of VSD are its defaults. Whatever is
chosen (weight decay, dropout's p, temperatures, precisions, strengths) is chosen on 15 % of the training rows. On
digits the network is then trained on all of them; ``from_trained`` alone keeps the network that has not seen these
rows, which the row "plain, 85 % of the rows" shows without noise. To save time, in the larger tasks all methods keep
the networks that have not seen them.
"""

import argparse
import copy
import itertools
import json
import math
import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import InterpolationMode, rotate

import pyro_vsd as vsd
from benchmarks.corruptions import CORRUPTIONS, corrupted

RESULTS = Path(__file__).parent / "results" / "shift"
HELD_OUT = 0.15
BATCH = 100
AT_ONCE = 1000  # rows of a prediction
PRECISIONS = (1.0, 10.0, 100.0, 1000.0, 10_000.0)
ENSEMBLE = 5
HELD_OUT_SCORED = 2000  # held-out rows behind the one temperature that every prediction has
KEPT = 0.9  # the share of rows, the most certain ones, whose error is measured
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


def corruption(x: Tensor, name: str) -> Tensor:
    side = math.isqrt(x.shape[-1])
    return corrupted(x.reshape(-1, side, side), name).flatten(1)


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


def cifar(seed: int, folder: str | None) -> tuple[Rows, Rows, dict[str, Tensor]]:
    assert folder is not None
    train, test = vsd.datasets.cifar10(folder)
    outside = vsd.datasets.cifar100(folder, test_only=True)[1].x[: TASKS["cifar"].rows]
    fast = {"memory_format": torch.channels_last}  # for convolutions on a processor
    train, test = (Rows(rows.x.contiguous(**fast), rows.y) for rows in (train, test))
    return train, test, {"CIFAR-100": outside.contiguous(**fast)}


IMAGES = (vsd.datasets.mnist, vsd.datasets.fashion_mnist)


# ---- networks


def with_dropout(net: nn.Sequential, p: float) -> nn.Sequential:
    """The network with dropout of the inputs of each Linear layer, but not of pixels, where p is above zero."""
    layers: dict[str, nn.Module] = {}
    for name, layer in net.named_children():
        if p and layers and isinstance(layer, nn.Linear):
            layers[f"dropout_{name}"] = nn.Dropout(p)
        layers[name] = layer
    return nn.Sequential(OrderedDict(layers))


def perceptron(*sizes: int) -> Callable[[], nn.Sequential]:
    return lambda: vsd.nn.mlp(list(sizes))


def convolutions() -> nn.Sequential:
    return vsd.nn.convnet().to(memory_format=torch.channels_last)


# ---- tasks

#: a function of inputs and a strength, or a kind; and those that are measured
Shift = tuple[Callable[[Tensor, Any], Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Task:
    """A data set, its network, and what is done to its test images.

    :ivar load: from a seed and a folder to training rows, test rows, and out-of-distribution inputs by name.
    :ivar network: makes a network.
    :ivar epochs: passes over the training rows.
    :ivar rate: where the cosine starts: that of ``vsd.fit`` for so many rows.
    :ivar rows: how many test images are shifted, and how many out-of-distribution images there are.
    :ivar stacked: how many held-out rows ensembles are stacked with, and ``from_trained`` chooses with.
    :ivar tested: how many test images are predicted as they are.
    :ivar plain: plain networks there are, to count in deep ensembles.
    :ivar refit: whether networks are trained again on all rows after the choices.
    :ivar samples: of a prediction.
    :ivar decays, dropout: weight decays and p to choose from.
    :ivar pairs: whether MC dropout has all pairs of these, or the weight decay of the plain network.
    :ivar noise: the layers with noise, as in ``vsd.nn.bayesianize``.
    """

    title: str
    load: Callable[[int, str | None], tuple[Rows, Rows, dict[str, Tensor]]]
    network: Callable[[], nn.Sequential]
    epochs: int
    rate: float
    shifts: dict[str, Shift]
    rows: int = 2000
    stacked: int | None = None
    tested: int | None = None
    plain: int = ENSEMBLE
    refit: bool = False
    samples: int = 50
    decays: tuple[float, ...] = (0.0, 3e-4, 1e-3)
    dropout: tuple[float, ...] = (0.1, 0.2, 0.4)
    pairs: bool = False
    noise: str = "*"


NOISE = (pixel_noise, (0.1, 0.2, 0.3, 0.4, 0.5))
LITTLE = (pixel_noise, (0.05, 0.1, 0.15, 0.2))
GREY: dict[str, Shift] = {"rotation": (rotation, tuple(range(10, 181, 10))), "pixel noise": NOISE}
GREY |= {"corruptions": (corruption, tuple(CORRUPTIONS))}
WIDE = perceptron(784, 400, 400, 10)
TASKS = {
    "digits": Task(
        "Digits", digits, perceptron(64, 100, 100, 10), 241, 1e-2, {"pixel noise": NOISE},
        plain=10, refit=True, samples=100, pairs=True,
    ),
    "mnist": Task("MNIST", mnist, WIDE, 10, 1e-3, GREY, rows=1000),
    "fashion": Task("Fashion-MNIST", fashion, WIDE, 10, 1e-3, GREY, rows=1000),
    "cifar": Task(
        "CIFAR-10", cifar, convolutions, 3, 1e-3, {"pixel noise": LITTLE},
        rows=1000, stacked=1000, tested=5000, samples=20, decays=(0.0, 3e-4), dropout=(0.2, 0.5), noise="fc*",
    ),
}  # fmt: skip
#: methods that are left out: without refit two are the same, and all layers take too long to predict with
LEFT_OUT = {False: ("plain, 85 % of the rows", "Laplace, all layers"), True: ("deep ensemble of 5, stacked",)}


def methods_of(task: str) -> list[str]:
    return [name for name in METHODS if name not in LEFT_OUT[TASKS[task].refit]]


# ---- plain networks


def train_plain(net: nn.Module, rows: Rows, epochs: int, rate: float, decay: float, seed: int) -> nn.Module:
    """Cross entropy, Adam, a cosine: the loop that all methods without VSD share."""
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(rows) / BATCH))
    torch.manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for x, y in rows.batches(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def probabilities(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(rows).softmax(-1) for rows in x.split(AT_ONCE)])


@torch.no_grad()
def predict_plain(net: nn.Module, x: Tensor) -> vsd.ClassificationPrediction:
    return vsd.ClassificationPrediction.from_samples(probabilities(net, x).unsqueeze(0))


@torch.no_grad()
def predict_dropout(net: nn.Module, x: Tensor, num_samples: int) -> vsd.ClassificationPrediction:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net.train()
        samples = torch.stack([probabilities(net, x) for _ in range(num_samples)])
        net.eval()
    return vsd.ClassificationPrediction.from_samples(samples)


class Split:
    """The rows of one seed, and the plain networks that several methods share, trained when first asked for."""

    def __init__(self, task: Task, seed: int, folder: str | None, epochs: int | None = None):
        self.task, self.seed, self.epochs = task, seed, epochs or task.epochs
        self.train, test, self.outside = task.load(seed, folder)
        self.test = test[: task.tested]
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1000 + seed))
        held = round(HELD_OUT * len(self.train))
        self.held_out, self.rest = self.train[order[:held]], self.train[order[held:]]

        self.data = self.train if task.refit else self.rest

    def fitted(self, rows: Rows, decay: float, number: int = 0, p: float = 0.0) -> nn.Module:
        seed = 100 * self.seed + number
        torch.manual_seed(seed)
        net = with_dropout(self.task.network(), p)
        return train_plain(net, rows, self.epochs, self.task.rate, decay, seed)

    def model(self, net: nn.Module | None = None) -> vsd.nn.Classifier:
        """A model of a network, by default of a new one."""
        bayesian = vsd.nn.bayesianize(net or self.task.network(), include=self.task.noise)
        return vsd.nn.Classifier(bayesian, num_data=len(self.data))

    @cached_property
    def by_decay(self) -> dict[float, nn.Module]:
        """Networks that have not seen the held-out rows, for each weight decay."""
        return {decay: self.fitted(self.rest, decay) for decay in self.task.decays}

    @cached_property
    def without_held_out(self) -> tuple[float, nn.Module]:
        """The weight decay whose network predicts the held-out rows best, and that network."""
        nets, (x, y) = self.by_decay.items(), (self.held_out.x, self.held_out.y)
        return min(nets, key=lambda found: vsd.metrics.nll(predict_plain(found[1], x), y))

    @cached_property
    def temperature(self) -> Any:
        net = self.without_held_out[1]
        model = self.model(net)
        guide = vsd.VSDGuide(model)
        with guide.noise_times(0.0):
            return vsd.calibrate(model, guide, self.held_out, num_samples=1, noise=False)

    @cached_property
    def plain(self) -> list[nn.Module]:
        """Networks from different starts, trained on all rows, or without those that are held out."""
        decay, first = self.without_held_out
        others = [self.fitted(self.data, decay, number) for number in range(1, self.task.plain)]
        return [self.fitted(self.data, decay) if self.task.refit else first, *others]


# ---- methods: from a split to a function that predicts, and what was chosen on held-out rows

Method = Callable[[Split], tuple[Predict, dict[str, Any]]]


def no_decay(split: Split) -> tuple[Predict, dict[str, Any]]:
    net = split.fitted(split.train, 0.0) if split.task.refit else split.by_decay[0.0]
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
    task, best = split.task, split.without_held_out[0]

    def predict(net: nn.Module, x: Tensor) -> vsd.ClassificationPrediction:
        return predict_dropout(net, x, task.samples)

    options = list(itertools.product(task.dropout, task.decays if task.pairs else (best,)))
    nets = {chosen: split.fitted(split.rest, chosen[1], p=chosen[0]) for chosen in options}
    x, y = split.held_out.x, split.held_out.y
    p, decay = min(nets, key=lambda chosen: vsd.metrics.nll(predict(nets[chosen], x), y))
    net = split.fitted(split.train, decay, p=p) if task.refit else nets[p, decay]
    return lambda x: predict(net, x), {"p": p, "weight decay": decay}


def deep_ensemble(split: Split) -> tuple[Predict, dict[str, Any]]:
    nets = split.plain[:ENSEMBLE]
    return lambda x: vsd.ensemble.mixture([predict_plain(net, x) for net in nets]), {}


def stacked_ensemble(split: Split) -> tuple[Predict, dict[str, Any]]:
    """Weights and temperatures as the VSD ensemble has them."""

    def members(x: Tensor) -> list[vsd.ClassificationPrediction]:
        return [predict_plain(net, x) for net in split.plain[:ENSEMBLE]]

    held_out = split.held_out[: split.task.stacked]
    stacking = vsd.ensemble.stack(members(held_out.x), held_out.y)
    return lambda x: stacking.mix(members(x)), chosen_by(stacking)


def chosen_by(stacking: vsd.ensemble.Stacking) -> dict[str, Any]:
    return {"weights": stacking.weights.tolist(), "temperatures": stacking.factors.tolist()}


def contiguous(net: nn.Module) -> nn.Module:
    """The network, a copy of it, as laplace-torch needs its weights: it cannot flatten weights in channels_last."""
    return copy.deepcopy(net).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


def laplace(subset: str) -> Method:
    """Kronecker factors, the linearised network, the probit formula: laplace-torch's own defaults, but for the prior's
    precision. That of the largest marginal likelihood, around 2 on digits, has five times the NLL on held-out rows."""

    def method(split: Split) -> tuple[Predict, dict[str, Any]]:
        from laplace import Laplace

        def fitted(net: nn.Module, rows: Rows) -> Any:
            found = Laplace(contiguous(net), "classification", subset_of_weights=subset, hessian_structure="kron")
            found.fit(torch.utils.data.DataLoader(rows, batch_size=500))
            return found

        def predict(found: Any, precision: float, x: Tensor) -> vsd.ClassificationPrediction:
            found.prior_precision = precision
            parts = [found(rows, pred_type="glm", link_approx="probit") for rows in x.split(500)]
            return vsd.ClassificationPrediction.from_samples(torch.cat(parts).detach().unsqueeze(0))

        held_out, found = split.held_out, fitted(split.without_held_out[1], split.rest)
        best = min(PRECISIONS, key=lambda value: vsd.metrics.nll(predict(found, value, held_out.x), held_out.y))
        if split.task.refit:
            found = fitted(split.plain[0], split.train)
        return lambda x: predict(found, best, x), {"prior precision": best}

    return method


def structured_dropout(**options: Any) -> Method:
    def method(split: Split) -> tuple[Predict, dict[str, Any]]:
        torch.manual_seed(split.seed)
        model = split.model()
        guide = vsd.VSDGuide(model, **options)
        vsd.fit(model, guide, split.data, epochs=split.epochs, batch_size=BATCH, seed=split.seed, progress=False)
        return lambda x: vsd.predict(model, guide, x, num_samples=split.task.samples, seed=0, batch_size=AT_ONCE), {}

    return method


def from_trained(split: Split) -> tuple[Predict, dict[str, Any]]:
    net = split.without_held_out[1]
    net = vsd.nn.bayesianize(net, include=split.task.noise)
    held_out = split.held_out[: split.task.stacked]
    model, guide = vsd.from_trained(net, split.rest, held_out, seed=split.seed, progress=False)
    return lambda x: vsd.predict(model, guide, x, num_samples=split.task.samples, seed=0, batch_size=AT_ONCE), {}


def vsd_ensemble(split: Split) -> tuple[Predict, dict[str, Any]]:
    if split.task.refit:
        ensemble = vsd.Ensemble(split.model(), seed=split.seed)
        ensemble.fit(split.train, epochs=split.epochs, batch_size=BATCH, progress=False)
    else:
        # members that start as all other networks do, and not with torch's own weights: training is short
        ensemble = vsd.Ensemble(split.model, seed=split.seed)
        rows, held_out = split.rest, split.held_out[: split.task.stacked]
        ensemble.fit(rows, validation=held_out, refit=False, epochs=split.epochs, batch_size=BATCH, progress=False)

    def predict(x: Tensor) -> vsd.ClassificationPrediction:
        return ensemble.predict(x, num_samples=split.task.samples, seed=0, batch_size=AT_ONCE)

    return predict, chosen_by(ensemble.stacking)


#: every row of the tables, in their order
METHODS: dict[str, Method] = {
    "plain, no weight decay": no_decay,
    "plain": plain,
    "plain, 85 % of the rows": fewer_rows,
    "temperature": temperature,
    "MC dropout": mc_dropout,
    "deep ensemble of 5": deep_ensemble,
    "deep ensemble of 5, stacked": stacked_ensemble,
    "Laplace, last layer": laplace("last_layer"),
    "Laplace, all layers": laplace("all"),
    "VD": structured_dropout(num_reflections=0),
    "VSD": structured_dropout(),
    "from_trained": from_trained,
    "VSD ensemble": vsd_ensemble,
}


# ---- measuring


def scores(predict: Predict, split: Split) -> dict[str, Any]:
    """The quality of predictions, and how many plain networks are as good."""
    found, inside = quality(predict, split), predict(split.test.x)
    nets = [split.temperature.apply(predict_plain(net, split.test.x)) for net in split.plain]
    equivalent = vsd.metrics.deep_ensemble_equivalent(inside, nets, split.test.y)
    found["equivalent"] = rounded(equivalent) if math.isfinite(equivalent) else None  # more than there are
    if not split.task.refit:
        found["tempered"] = tempered(predict(split.held_out.x[:HELD_OUT_SCORED]), split.held_out, inside, split.test.y)
    return found


def mixtures(split: Split) -> list[float]:
    """The NLL of one plain network, of a mixture of two, and so on, each at its best temperature: what
    ``metrics.deep_ensemble_equivalent`` compares with, for methods that are measured in another process."""
    found = [split.temperature.apply(predict_plain(net, split.test.x)) for net in split.plain]
    number = len(found)
    values = []
    for size in range(1, number + 1):
        starts = range(number if size < number else 1)
        chosen = [vsd.ensemble.mixture([found[(start + i) % number] for i in range(size)]) for start in starts]
        values.append(rounded(statistics.fmean(vsd.metrics.nll(mixed, split.test.y) for mixed in chosen)))
    return values


def equivalent(nll: float, mixtures: list[float]) -> float:
    """How many plain networks have this NLL, as ``metrics.deep_ensemble_equivalent`` has it.

    >>> equivalent(0.06, [0.10, 0.08, 0.04]), equivalent(0.2, [0.1]), equivalent(0.01, [0.1])
    (2.5, 1.0, inf)
    """
    before = math.inf
    for size, now in enumerate(mixtures, 1):
        if now <= nll:
            return float(size) if before == math.inf else size - 1 + (before - nll) / (before - now)
        before = min(now, before)
    return math.inf


def quality(predict: Predict, split: Split) -> dict[str, Any]:
    """Metrics of the test images as they are and under each shift, and the AUROC of out-of-distribution images."""
    few = split.test[: split.task.rows]
    inside = predict(split.test.x)
    found: dict[str, Any] = {"clean": metrics_of(inside, split.test.y)}
    for name, (shift, strengths) in split.task.shifts.items():
        found[name] = {label(s): metrics_of(predict(shift(few.x, s)), few.y) for s in strengths}
    found["OOD"] = {}
    for name, x in split.outside.items():
        elsewhere = predict(x)
        found["OOD"][name] = {"auroc": rounded(auroc(inside, elsewhere, "entropy"))}
        if inside.num_samples > 1:
            found["OOD"][name]["auroc by MI"] = rounded(auroc(inside, elsewhere, "mutual_information"))
    return found


def tempered(held_out: Any, rows: Rows, prediction: Any, y: Tensor) -> dict[str, float]:
    """NLL and ECE of the test rows after one temperature of the probabilities, the best one for held-out rows."""

    def at(temperature: float, found: Any) -> Tensor:
        return (found.probs.clamp(min=1e-30).log() / temperature).softmax(-1)

    labels = rows.y[: len(held_out.probs)]
    grid = [math.exp(step / 50) for step in range(-60, 61)]  # from 0.3 to 3.3
    best = min(grid, key=lambda temperature: vsd.metrics.nll(at(temperature, held_out), labels))
    found = {"nll": vsd.metrics.nll(at(best, prediction), y), "ece": vsd.metrics.ece(at(best, prediction), y)}
    return {name: rounded(value) for name, value in found.items()} | {"temperature": rounded(best)}


def label(strength: float | str) -> str:
    return strength if isinstance(strength, str) else f"{strength:g}"


def metrics_of(prediction: vsd.ClassificationPrediction, y: Tensor) -> dict[str, float]:
    functions = {"nll": vsd.metrics.nll, "error": vsd.metrics.error_rate, "ece": vsd.metrics.ece}
    functions["aurc"] = vsd.metrics.aurc
    found = {name: rounded(function(prediction, y)) for name, function in functions.items()}
    return found | {"kept": rounded(vsd.metrics.risk_coverage(prediction, y).at(KEPT)[1])}


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
        path = path_of(task, "mixtures", seed)
        if not path.exists():
            split = split or Split(TASKS[task], seed, folder)
            path.write_text(json.dumps({"plain networks": mixtures(split)}) + "\n")


# ---- cost


def cost(task: Task, rounds: int = 3) -> dict[str, dict[str, float]]:
    """A training step, and a prediction of all test rows, in multiples of the plain network's: medians over rounds in
    which the methods take turns. A step is what a longer run costs more than a shorter one, so capturing and other
    set-up are not in it. VSD's ensemble trains twice, which is in it: two steps for each batch."""
    split = Split(task, 0, None)
    short, long = 40, 241

    def plain(epochs: int, p: float = 0.0) -> None:
        train_plain(with_dropout(task.network(), p), split.train, epochs, task.rate, 3e-4, 0)

    def ours(epochs: int, **options: Any) -> None:
        own = split.model()
        vsd.fit(own, vsd.VSDGuide(own, **options), split.train, epochs=epochs, batch_size=BATCH, progress=False)

    def stacked(epochs: int) -> None:
        vsd.Ensemble(split.model()).fit(split.train, epochs=epochs, batch_size=BATCH, progress=False)

    runs: dict[str, Callable[[int], None]] = {
        "plain": plain,
        "MC dropout": lambda epochs: plain(epochs, 0.1),
        "VD": lambda epochs: ours(epochs, num_reflections=0),
        "VSD": ours,
        "VSD ensemble": stacked,
    }
    plain(10)  # warms torch up
    steps = medians(runs, lambda train: seconds(train, long) - seconds(train, short), rounds)
    steps |= dict.fromkeys(("temperature", "Laplace, last layer", "Laplace, all layers", "from_trained"), 1.0)
    steps["deep ensemble of 5"] = float(ENSEMBLE)

    split = Split(task, 0, None, epochs=10)  # what is predicted does not matter
    predictors: dict[str, Predict] = {}
    for name in steps:
        try:
            predictors[name] = METHODS[name](split)[0]
        except ImportError:
            print(f"{name}: left out, laplace-torch is not installed")
    times = medians(predictors, lambda predict: seconds(predict, split.test.x, 0.1), 3 * rounds)
    return {name: {"step": rounded(steps[name]), "prediction": rounded(times[name])} for name in predictors}


def seconds(function: Callable[..., Any], argument: Any, least: float = 0.0) -> float:
    """Process time of a call, over as many calls as take the least time."""
    calls, start = 0, time.process_time()
    while not calls or time.process_time() - start < least:
        function(argument)
        calls += 1
    return (time.process_time() - start) / calls


def medians(things: dict[str, Any], measure: Callable[[Any], float], rounds: int) -> dict[str, float]:
    """The median ratio to the plain one's in the same round."""
    found: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(rounds):
        once = {name: measure(thing) for name, thing in things.items()}
        for name, value in once.items():
            found[name].append(value / once["plain"])
    return {name: statistics.median(values) for name, values in found.items()}


# ---- results

#: columns of the tables: title, how a number is read from a result, format, factor
Column = tuple[str, Callable[[dict[str, Any]], float | None], str]


def average(shift: str, metric: str) -> Callable[[dict[str, Any]], float]:
    """The mean over the strengths of a shift."""
    return lambda found: statistics.fmean(at[metric] for at in found[shift].values())


def clean(metric: str, factor: float = 1.0) -> Callable[[dict[str, Any]], float]:
    return lambda found: factor * found["clean"][metric]


def outside(name: str, score: str = "auroc") -> Callable[[dict[str, Any]], float | None]:
    return lambda found: found["OOD"][name].get(score)


CLEAN: list[Column] = [("NLL", clean("nll"), ".3f"), ("error, %", clean("error", 100), ".2f")]
CLEAN += [("ECE", clean("ece"), ".3f"), ("AURC × 1000", clean("aurc", 1000), ".2f")]


def first_columns(task: str) -> list[Column]:
    """Of test images as they are."""
    if TASKS[task].refit:
        return CLEAN
    found: list[Column] = [
        ("NLL, tempered", lambda found: found["tempered"]["nll"], ".3f"),
        ("ECE, tempered", lambda found: found["tempered"]["ece"], ".3f"),
        (f"error of {100 * KEPT:.0f} %", clean("kept", 100), ".2f"),
    ]
    return [*CLEAN, *found]


def shifted(task: str) -> list[Column]:
    found: list[Column] = []
    for shift in TASKS[task].shifts:
        found += [(f"{shift}: NLL", average(shift, "nll"), ".3f"), (f"{shift}: ECE", average(shift, "ece"), ".3f")]
    return found


def detected(task: str) -> list[Column]:
    found: list[Column] = []
    for name in OUTSIDE[task]:
        found += [(f"AUROC, {name}", outside(name), ".3f"), ("by MI", outside(name, "auroc by MI"), ".3f")]
    return found


OUTSIDE = {
    "digits": ("shuffled pixels", "rotated by 90°"),
    "mnist": ("Fashion-MNIST",),
    "fashion": ("MNIST",),
    "cifar": ("CIFAR-100",),
}


def stored(task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Results by method and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method in METHODS:
        every = ((seed, path_of(task, method, seed)) for seed in range(100))
        if own := {seed: json.loads(path.read_text()) for seed, path in every if path.exists()}:
            found[method] = own
    return found


def costs(task: str) -> dict[str, dict[str, float]]:
    path = RESULTS / f"{task}-cost.json"
    return json.loads(path.read_text()) if path.exists() else {}


def estimate(values: list[float], form: str) -> str:
    """Mean ± standard error; no error of a single number.

    >>> estimate([0.1, 0.3], ".2f"), estimate([], ".2f")
    ('0.20 ± 0.10', '–')
    """
    if not values:
        return "–"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{error}"


def interval(values: list[float], form: str) -> str:
    """Mean of paired differences with half the width of Student's 95 % interval; bold where zero is outside.

    >>> interval([0.1, 0.2, 0.3], ".2f"), interval([-0.3, 0.2], ".1f")
    ('+0.20 ± 0.25', '-0.0 ± 3.2')
    """
    from scipy.stats import t

    mean, count = statistics.fmean(values), len(values)
    half = t.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count)
    cell = f"{mean:+{form}} ± {half:{form}}"
    return f"**{cell}**" if abs(mean) > half else cell


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def rows_of(columns: list[Column], results: dict[str, dict[int, dict[str, Any]]]) -> dict[str, list[str]]:
    return {
        method: [
            estimate([value for found in own.values() if (value := read(found)) is not None], form)
            for _, read, form in columns
        ]
        for method, own in results.items()
    }


def differences(task: str, method: str) -> str:
    """A method minus each other one, on the same splits."""
    columns, results = [*CLEAN[::2], *shifted(task), *detected(task)[::2]], stored(task)
    rows = {}
    for other, own in results.items():
        seeds = sorted(set(own) & set(results[method]))
        if other != method and len(seeds) > 1:
            rows[other] = [
                interval([read(results[method][s]) - read(own[s]) for s in seeds], form)  # type: ignore[operator]
                for _, read, form in columns
            ]
    return markdown(f"{method} minus", [title for title, _, _ in columns], rows)


def equivalents(task: str, results: dict[str, dict[int, dict[str, Any]]]) -> dict[str, str]:
    """The median number of plain networks that are as good as a method."""
    most, found = TASKS[task].plain, {}
    for method, own in results.items():
        numbers = [of_plain(task, seed, result) for seed, result in own.items()]
        known = [number for number in numbers if number is not None]
        middle = statistics.median(known) if known else None
        found[method] = "–" if middle is None else f"{middle:.1f}" if middle < math.inf else f"> {most}"
    return found


def of_plain(task: str, seed: int, result: dict[str, Any]) -> float | None:
    """How many plain networks are as good as a result, where mixtures of them have been measured."""
    if "equivalent" in result:
        return math.inf if result["equivalent"] is None else float(result["equivalent"])
    path = path_of(task, "mixtures", seed)
    return equivalent(result["clean"]["nll"], json.loads(path.read_text())["plain networks"]) if path.exists() else None


def markdown(corner: str, titles: list[str], rows: dict[str, list[str]]) -> str:
    lines = [[corner, *titles], ["---"] * (len(titles) + 1), *[[name, *cells] for name, cells in rows.items()]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pictures(task: str, of: str = "methods", kind: str = "shift", folder: str = "figures") -> list[str]:
    """The figures of a task, as a page shows them.

    :param of: what they compare. :param kind: the first part of their names. :param folder: where they are, from the
        page.
    """
    title = TASKS[task].title
    return [
        f"![{title}: NLL and calibration error of all {of}, {shift}]({folder}/{figure_name(task, shift, kind)})"
        for shift in TASKS[task].shifts
    ]


def figure_name(task: str, shift: str, kind: str = "shift") -> str:
    return f"{kind}_{task}_{shift.replace(' ', '_')}.png"


def table() -> str:
    """All tables of docs/shift.md."""
    parts = []
    for name, task in TASKS.items():
        results, price = stored(name), costs(name)
        if not results:
            continue
        number = equivalents(name, results)
        seeds = max(len(own) for own in results.values())
        if name != "digits":  # whose heading is on the page
            parts += [f"## {task.title}", *pictures(name)]
        runs = "split" if name == "digits" else "seed"
        parts += [f"**{task.title}, {seeds} {runs}{'s' * (seeds > 1)}: test images as they are**"]
        columns = first_columns(name)
        rows = rows_of(columns, results)
        for method, cells in rows.items():
            cells.append(number[method])
            if price:
                cells += [times(price[method][key]) if method in price else "" for key in ("step", "prediction")]
        titles = [title for title, _, _ in columns] + ["equivalent"] + (["step", "prediction"] if price else [])
        parts += [markdown("", titles, rows), f"**{task.title}: shifted and out-of-distribution images**"]
        columns = [*shifted(name), *detected(name)]
        parts += [markdown("", [title for title, _, _ in columns], rows_of(columns, results))]
        if seeds > 2:
            parts += [f"**{task.title}: paired differences**", differences(name, "VSD")]
            parts += [differences(name, "VSD ensemble")]
    return "\n\n".join(parts)


README_ROWS = {
    "plain, no weight decay": "plain network, no weight decay",
    "plain": "plain network, weight decay tuned",
    "MC dropout": "MC dropout, p tuned",
    "deep ensemble of 5": "deep ensemble of 5",
    "Laplace, last layer": "Laplace, last layer, prior tuned",
    "VSD": "**VSD**",
    "VSD ensemble": "**VSD ensemble**",
}


def readme_table() -> str:
    """The table of the README: means over the splits of digits."""
    results, price = stored("digits"), costs("digits")
    columns = [CLEAN[0], CLEAN[2], *shifted("digits"), *detected("digits")[::2]]
    rows = {}
    for method, name in README_ROWS.items():
        own = list(results[method].values())
        cells = [f"{statistics.fmean(read(found) for found in own):{form}}" for _, read, form in columns]  # type: ignore
        price_of = price[method if method in price else "plain"]
        rows[name] = cells + [times(price_of[key]) for key in ("step", "prediction")]
    titles = ["NLL", "ECE", "NLL, noisy", "ECE, noisy", "AUROC, shuffled", "AUROC, rotated", "step", "prediction"]
    return markdown("", titles, rows)


# ---- pages and figures

ROOT = Path(__file__).resolve().parents[1]
PAGES: dict[Path, Callable[[], str]] = {ROOT / "README.md": readme_table, ROOT / "docs" / "shift.md": table}
START, END = "<!-- tables: start -->", "<!-- tables: end -->"
FIGURES = ROOT / "docs" / "figures"
# colour, line, marker; the methods in a figure, from the least to the most of ours
LOOKS = {
    "plain, no weight decay": ("#999999", ":", "."),
    "plain": ("#555555", "-", "."),
    "temperature": ("#999999", "--", "x"),
    "MC dropout": ("#E69F00", "-", "s"),
    "deep ensemble of 5": ("#009E73", "-", "^"),
    "deep ensemble of 5, stacked": ("#66C2A5", "--", "<"),
    "Laplace, last layer": ("#CC79A7", "--", "v"),
    "Laplace, all layers": ("#CC79A7", "-", "v"),
    "VD": ("#56B4E9", "--", "o"),
    "from_trained": ("#56B4E9", "-", "D"),
    "VSD": ("#0072B2", "-", "o"),
    "VSD ensemble": ("#D55E00", "-", "o"),
}


def page(text: str, tables: str) -> str:
    """The page with its tables replaced."""
    head, rest = text.split(START)
    return f"{head}{START}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def draw(task: str, folder: Path = FIGURES) -> list[Path]:
    """The figures of a task's results."""
    return draw_shifts(task, stored(task), LOOKS, "shift", folder)


def draw_shifts(
    task: str,
    results: dict[str, dict[int, dict[str, Any]]],
    looks: dict[str, tuple[str, str, str]],
    kind: str,
    folder: Path = FIGURES,
) -> list[Path]:
    """NLL and ECE against the strength of each shift, or by its kinds: the mean over seeds.

    :param looks: colour, line and marker of each method.
    :param kind: the first part of the figures' names.
    """
    import matplotlib.pyplot as plt

    made = []
    for shift, (_, strengths) in TASKS[task].shifts.items():
        kinds = isinstance(strengths[0], str)
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 5 if kinds else 4), layout="constrained")
        for axis, (metric, title) in zip(axes, {"nll": "NLL", "ece": "ECE"}.items(), strict=True):
            for method in [m for m in looks if m in results]:
                own = list(results[method].values())
                values = [statistics.fmean(found["clean"][metric] for found in own)]
                values += [statistics.fmean(found[shift][label(s)][metric] for found in own) for s in strengths]
                colour, line, marker = looks[method]
                places = range(len(values)) if kinds else [0, *strengths]
                axis.plot(places, values, color=colour, linestyle="" if kinds else line, marker=marker, markersize=4,
                          linewidth=2 if method.startswith("VSD") else 1.2, label=method)  # fmt: skip
            if kinds:
                axis.set_xticks(range(len(strengths) + 1), ["as they are", *strengths], rotation=90)
                axis.grid(axis="x", color="#dddddd", linewidth=0.6)
            else:
                if len(strengths) < 8:
                    axis.set_xticks([0, *strengths])
                axis.set_xlabel(f"{shift}{', degrees' if shift == 'rotation' else ''}")
            axis.set_ylabel(title)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yscale("log")
        axes[1].set_ylim(bottom=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
        path = folder / figure_name(task, shift, kind)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        made.append(path)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--data", help="the folder with MNIST and FashionMNIST")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), help="all that apply by default")
    parser.add_argument("--cost", action="store_true", help="measure what steps and predictions cost")
    parser.add_argument("--table", action="store_true", help="print the tables of the README and of docs/shift.md")
    parser.add_argument("--figure", action="store_true", help="draw the figures of docs/shift.md")
    parser.add_argument("--write", action="store_true", help="put tables and figures into the pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="laplace|curvlinops|torch.jit")
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.write:
        for path, render in PAGES.items():
            path.write_text(page(path.read_text(encoding="utf-8"), render()), encoding="utf-8")
    if options.write or options.figure:
        print("\n".join(str(path.relative_to(ROOT)) for task in TASKS if stored(task) for path in draw(task)))
    if options.table:
        print(readme_table(), table(), sep="\n\n")
    if options.cost:
        text = json.dumps(cost(TASKS[options.task]), indent=1) + "\n"
        (RESULTS / f"{options.task}-cost.json").write_text(text)
        print(text)
    if not (options.write or options.figure or options.table or options.cost):
        run(options.task, options.methods or methods_of(options.task), options.seeds, options.data)


if __name__ == "__main__":
    main()
