"""UCI regression: one unit is a data set, a method and a seed; all its splits and settings train as one program.

Two stages. *Tuning*: each split's training rows are cut, every candidate is trained on the larger part, and the
observation noise σ and the candidate are chosen by the likelihood of the rows held out. *Final*: the chosen settings
are trained on all training rows, for as many steps, and scored on the test rows with the chosen σ. Test rows are not
handed to the first stage.
"""

import importlib.metadata
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper import store, uci_networks
from benchmarks.paper.rotation_uci import Studied, noise_of
from benchmarks.paper.settings.uci import UCISetting, UCIVariant
from benchmarks.paper.uci_data import Splits, Twins, held_out, load_splits
from benchmarks.paper.uci_svi import SVINetworks
from benchmarks.paper.uci_training import Clock, best_sigma, generators, predict, train
from benchmarks.paper.unit import Unit
from pyro_vsd.metrics import coverage, log_likelihood, rmse
from pyro_vsd.prediction import RegressionPrediction

__all__ = ["run", "run_variant", "units"]

# Streams of random numbers: of the start, of the batches' order, of the noise, of predictions, of the curvature.
START, ORDER, NOISE, PREDICTION, CURVATURE = range(1, 6)
# Those that are not in uci_networks.
_NETWORKS: dict[str, Any] = {"SVI": SVINetworks, "Studied": Studied}


def units(setting: UCISetting) -> list[Unit]:
    """Every variant with every seed, the first seed first."""
    return [
        Unit(setting.task, variant, seed, setting.module, setting)
        for seed in setting.seeds
        for variant in setting.variants
    ]


def run(unit: Unit, data: Path | None, work: Path, **how: Any) -> dict[str, Any]:
    """The unit's result.

    :param data: the folder that holds ``UCI_Datasets``.
    :param how: ``smoke`` trains for a few steps; ``device`` must be the CPU.
    """
    if data is None:
        raise ValueError("data: expected the folder that holds UCI_Datasets, got none. Pass --data FOLDER.")
    if how.get("device", "cpu") != "cpu":
        raise ValueError(f"device: expected 'cpu' for the UCI sets, got {how['device']!r}.")
    variant = unit.setting.variants[unit.variant]
    own = {name: getattr(variant, name) or getattr(unit.setting, name) for name in ("steps", "lr", "folds")}
    setting = replace(unit.setting, **own)
    steps = 20 if how.get("smoke") else setting.steps
    splits = load_splits(setting.data, data, setting.num_splits)
    return run_variant(splits, setting, variant, unit.seed, steps)


def run_variant(data: Splits, setting: UCISetting, variant: UCIVariant, seed: int, steps: int) -> dict[str, Any]:
    """Tunes, trains and scores one variant on all splits."""
    clock = Clock()
    twins = held_out(data, setting.held_out, setting.folds, seed)
    candidates = distinct(variant)
    scores, sigmas, _ = tune(twins, setting, variant, candidates, seed, steps)
    choices = choose(variant, scores)
    tuning_seconds = clock.seconds()

    # lists that chose the same in all splits share their networks
    columns = list(dict.fromkeys(tuple(choice.tolist()) for choice in choices.values()))
    index = torch.tensor(columns).mT  # (P, columns): numbers of candidates
    chosen = {key: torch.tensor([[candidates[i][key] for i in row] for row in index.tolist()]) for key in candidates[0]}
    net, history = fit(data.x, data.y, setting, variant, chosen, seed, 1, steps)
    samples = predict(net, data.x_test, variant.samples, generators(seed, PREDICTION, 1))
    samples = members_as_samples(samples, variant.members)
    groups = {}
    for name, choice in choices.items():
        sigma = sigmas.gather(1, choice[:, None])[:, 0]
        found = scored(samples[:, columns.index(tuple(choice.tolist()))], sigma, data)
        groups[name] = found | {"sigma": sigma.tolist(), "chosen": choice.tolist()}
    groups["tuned"] = best_group(variant, scores, choices, groups)
    more = {}
    if isinstance(net, Studied):
        more["noise"] = noise_of(net, data.x, list(choices), generators(seed, CURVATURE, 1))
    result = {
        "label": variant.label,
        **more,
        "settings": setting.common()
        | {"steps": steps, "samples": variant.samples, "members": variant.members}
        | {"network": variant.network, "options": variant.options},
        "candidates": candidates,
        "held_out_log_likelihood": (scores - data.y_std.log().float()[:, None]).tolist(),
        "metrics": {
            key: float(torch.tensor(groups["tuned"][key]).mean()) for key in ("rmse", "log_likelihood", "coverage")
        },
        "groups": groups,
        "history": history,
        "seconds": {"tuning": tuning_seconds, "all": clock.seconds()},
        "versions": versions(),
    }
    rounded: dict[str, Any] = store.rounded(result, 6)
    return rounded


def tune(
    twins: Twins, setting: UCISetting, variant: UCIVariant, candidates: list[dict[str, float]], seed: int, steps: int
) -> tuple[Tensor, Tensor, list[float]]:
    """Held-out log-likelihood at the best σ, that σ, for each split and candidate ``(P, C)``, and the history."""
    P = len(twins.x)
    options = {key: torch.tensor([one[key] for one in candidates]).expand(P, -1) for key in candidates[0]}
    net, history = fit(twins.x, twins.y, setting, variant, options, seed, 0, steps)
    samples = predict(net, twins.x_held, variant.samples, generators(seed, PREDICTION, 0))
    samples = members_as_samples(samples, variant.members)
    # the held-out rows of a split's folds count together
    folds, (_, C, S, n) = setting.folds, samples.shape
    samples = samples.unflatten(0, (-1, folds)).permute(0, 2, 3, 1, 4).reshape(P // folds, C, S, folds * n)
    log_sigma, scores = best_sigma(samples, twins.y_held.view(P // folds, folds * n))
    return scores, log_sigma.exp(), history


def fit(
    x: Tensor,
    y: Tensor,
    setting: UCISetting,
    variant: UCIVariant,
    options: dict[str, Tensor],
    seed: int,
    stage: int,
    steps: int,
) -> tuple[Any, list[float]]:
    """Replicas for the training sets ``x (P, n, D)`` and options ``{name: (P, C)}``, trained."""
    spread = {key: value.repeat_interleave(variant.members, 1).contiguous() for key, value in options.items()}
    extra = {"members": variant.members} if variant.members > 1 else {}
    sizes = (x.shape[-1], setting.hidden, 1)
    kind = _NETWORKS.get(variant.network) or getattr(uci_networks, variant.network)
    net = kind(sizes, spread, generators(seed, START, stage), **extra, **variant.options)
    how: dict[str, Any] = {"order": generators(seed, ORDER, stage), "noise": generators(seed, NOISE, stage)}
    how |= {"steps": steps, "lr": setting.lr, "batch": setting.batch}
    return net, net.train(x, y, **how) if kind is SVINetworks else train(net, x, y, **how)


def members_as_samples(samples: Tensor, members: int) -> Tensor:
    """``(P, C · members, S, n)`` to ``(P, C, members · S, n)``."""
    return samples if members == 1 else samples.unflatten(1, (-1, members)).flatten(2, 3)


def choose(variant: UCIVariant, scores: Tensor) -> dict[str, Tensor]:
    """The candidate of each list with the best held-out score, ``(P,)``."""
    candidates, choices = distinct(variant), {}
    for name, group in variant.groups.items():
        index = torch.tensor([candidates.index(one) for one in group])
        choices[name] = index[scores[:, index].argmax(1)]
    return choices


def distinct(variant: UCIVariant) -> list[dict[str, float]]:
    """The candidates of all lists, each once."""
    out: list[dict[str, float]] = []
    for one in (one for group in variant.groups.values() for one in group):
        if one not in out:
            out.append(one)
    return out


def best_group(
    variant: UCIVariant, scores: Tensor, choices: dict[str, Tensor], groups: dict[str, dict[str, list[Any]]]
) -> dict[str, list[Any]]:
    """For each split the numbers of the list whose choice has the best held-out score."""
    names = [name for name in choices if name not in variant.fixed]
    values = torch.stack([scores.gather(1, choices[name][:, None])[:, 0] for name in names], 1)
    best = values.argmax(1).tolist()
    keys = list(groups[names[0]])
    return {key: [groups[names[b]][key][p] for p, b in enumerate(best)] for key in keys}


def scored(samples: Tensor, sigma: Tensor, data: Splits) -> dict[str, list[float]]:
    """RMSE, log-likelihood and the coverage of 95 % intervals on the test rows of every split, in the targets' units.

    :param samples: ``(P, S, n)``. :param sigma: ``(P,)``.
    """
    out: dict[str, list[float]] = {"rmse": [], "log_likelihood": [], "coverage": []}
    for p, y_std in enumerate(data.y_std.tolist()):
        prediction = RegressionPrediction.from_samples(samples[p].double(), sigma[p].double())
        y = data.y_test[p].double()
        out["rmse"].append(rmse(prediction, y) * y_std)
        out["log_likelihood"].append(log_likelihood(prediction, y) - float(torch.tensor(y_std).log()))
        out["coverage"].append(coverage(prediction, y))
    return out


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    names = ("torch", "pyro-ppl", "pyro_vsd", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
