"""Gap splits of the UCI sets: what ensembles and single networks say between the data.

    python -m benchmarks.gaps DATA WORK                 # all sets; continues where it was stopped
    python -m benchmarks.gaps DATA WORK --sets yacht --splits 2
    python -m benchmarks.gaps DATA WORK --score         # scores again what is in WORK, without training
    python -m benchmarks.gaps DATA WORK --figure FILE   # predictions of the rows in three gaps
    python -m benchmarks.gaps --write PAGE              # the tables of what is there, between a page's marks

Foong et al. 2019: for each input the rows are sorted by it, and the middle third is the test set. The index files are
those of cambridge-mlg/DUN, in ``DATA/UCI_Datasets_gap``. Networks and training are those of ``benchmarks.ensembles``.

σ and the weights are fitted on 15 % of the training rows, drawn at random, which the networks have not seen (*ordinary*
rows). Then the networks are trained again on all training rows. Nothing is chosen by test rows. Test log-likelihood and
RMSE are in the targets' units. The networks' predictions stay in ``WORK``; each split leaves a small JSON file in
``results/gaps``. MC dropout and mean-field VI are those of the paper's experiments (``benchmarks.paper``), on these
splits.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import pyro_vsd as vsd
from benchmarks.ensembles import (
    HIDDEN,
    MEMBERS,
    MIXTURES,
    SAMPLES,
    SINGLE,
    VSD,
    held_out,
    kept,
    one_sigma,
    predicted,
    prediction,
    train,
)
from benchmarks.paper import uci as paper
from benchmarks.paper.settings.uci import SETTINGS
from benchmarks.paper.uci_data import Splits

RESULTS = Path(__file__).parent / "results" / "gaps"
FOLDERS = {
    "yacht": "yacht",
    "energy": "energy",
    "boston": "bostonHousing",
    "concrete": "concrete",
    "wine": "wine-quality-red",
    "power": "power-plant",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
}
INPUTS = {"yacht": 6, "energy": 8, "boston": 13, "concrete": 8, "wine": 11, "power": 4, "kin8nm": 8, "naval": 16}
SMALL = ("yacht", "energy", "boston", "concrete", "wine")
PLAIN = len(VSD)
# What is trained; see ``program``.
PROGRAMS = ("main", "T-0", "T-20")
METRICS = {"log_likelihood": "Test log-likelihood", "rmse": "RMSE"}
# Mixtures whose σ may grow with the members' disagreement.
WIDENED = ("vsd", "plain", "default", "mixed10")
# Of the paper's experiments.
PAPERS = ("mc_dropout", "bbb")
# Log-likelihoods and RMSEs of DUN's repository: residual networks, 10 samples, ensembles of 5.
PUBLISHED = {
    "DUN": {
        "boston": (-3.107, 3.64), "concrete": (-4.222, 7.20), "energy": (-10.7, 2.94), "kin8nm": (1.029, 0.080),
        "naval": (-16.3, 0.022), "power": (-2.998, 4.30), "wine": (-1.417, 0.697), "yacht": (-2.122, 1.85),
    },
    "dropout": {
        "boston": (-4.001, 3.60), "concrete": (-5.170, 7.06), "energy": (-8.10, 2.87), "kin8nm": (1.215, 0.071),
        "naval": (-524.0, 0.034), "power": (-3.178, 4.69), "wine": (-1.267, 0.660), "yacht": (-2.344, 2.29),
    },
    "ensemble": {
        "boston": (-3.106, 3.51), "concrete": (-3.631, 6.85), "energy": (-5.42, 3.36), "kin8nm": (0.315, 1.63),
        "naval": (-4.57, 0.018), "power": (-2.904, 4.37), "wine": (-1.126, 0.673), "yacht": (-2.568, 1.84),
    },
    "mean-field VI": {
        "boston": (-2.703, 3.76), "concrete": (-3.460, 7.55), "energy": (-9.09, 8.61), "kin8nm": (0.942, 0.095),
        "naval": (-15.2, 0.033), "power": (-2.980, 4.68), "wine": (-0.965, 0.632), "yacht": (-2.114, 1.84),
    },
    "plain": {
        "boston": (-4.217, 4.59), "concrete": (-4.839, 7.37), "energy": (-15.3, 3.06), "kin8nm": (0.991, 0.085),
        "naval": (-60.5, 0.020), "power": (-3.022, 4.62), "wine": (-2.026, 0.731), "yacht": (-2.442, 2.21),
    },
}  # fmt: skip
# The best of nnuncert's table, one hidden layer of 50.
ELSEWHERE = {
    "boston": -2.512, "concrete": -3.306, "energy": -7.55, "kin8nm": 1.237, "power": -2.869, "wine": -0.958,
    "yacht": -1.577,
}  # fmt: skip
# Rows of the tables; ``GROUPS`` are headings above some of them.
METHODS = {
    "base_rate": "the training targets' distribution alone",
    "plain": "one plain network",
    "plain1_stacked": "the same, σ from held-out rows",
    "plain_one_sigma": "five plain networks, one σ",
    "plain_stacked": "five plain networks, stacked",
    "mc_dropout": "MC dropout, tuned",
    "bbb": "mean-field VI, tuned",
    "fitted": "one plain network with fitted noise",
    "T-0": "one VD network (T = 0)",
    "single": "one VSD network (T = 2)",
    "T-20": "one VSD network, T = 20",
    "single1_stacked": "one VSD network (T = 2), σ from held-out rows",
    "default_stacked": "the default ensemble (four VSD, one plain)",
    "vsd_stacked": "five VSD networks, stacked",
    "mixed10_stacked": "five VSD and five plain networks, stacked",
    "plain1_base": "one plain network",
    "plain_base": "five plain networks, stacked",
    "single1_base": "one VSD network",
    "default_base": "the default ensemble",
    "vsd_base": "five VSD networks, stacked",
    "mixed10_base": "five VSD and five plain networks, stacked",
    "plain_widened": "five plain networks",
    "default_widened": "the default ensemble",
    "vsd_widened": "five VSD networks",
    "mixed10_widened": "five VSD and five plain networks",
}
GROUPS = {
    "plain1_base": "*the same with the base rate:*",
    "plain_widened": "*σ grows with disagreement, and the base rate:*",
}
# Rows of the table of what is lost on ordinary rows.
COSTS = {
    f"{mixture}_{way}": f"{members}, {label}"
    for mixture, members in (("plain", "five plain"), ("default", "the default"), ("vsd", "five VSD"))
    for way, label in (("stacked", "stacked"), ("base", "with the base rate"), ("widened", "σ by disagreement"))
}


def load_split(name: str, root: str | Path, split: int) -> tuple[vsd.datasets.Data, vsd.datasets.Data]:
    """The data of a gap split, standardised by its training rows."""
    folder, gaps = Path(root) / "UCI_Datasets" / FOLDERS[name], Path(root) / "UCI_Datasets_gap" / FOLDERS[name]

    def rows(path: Path) -> Tensor:
        return torch.from_numpy(np.loadtxt(path, ndmin=1).astype(np.int64))

    table = torch.from_numpy(np.loadtxt(folder / "data" / "data.txt", ndmin=2))
    (target,) = rows(folder / "data" / "index_target.txt")
    x, y = table[:, rows(folder / "data" / "index_features.txt")], table[:, target]
    parts = [rows(gaps / "data" / f"index_{part}_{split}.txt") for part in ("train", "test")]
    mean, std = x[parts[0]].mean(0), x[parts[0]].std(0, correction=0)
    std = torch.where(std > 1e-9 * mean.abs(), std, torch.ones_like(std))  # constant up to rounding: only centred
    y_mean, y_std = float(y[parts[0]].mean()), float(y[parts[0]].std(correction=0))
    x, y = ((x - mean) / std).to(torch.get_default_dtype()), ((y - y_mean) / y_std).to(torch.get_default_dtype())
    train, test = (vsd.datasets.Data(x[part], y[part], y_mean, y_std) for part in parts)
    return train, test


def with_fitted_noise(ensemble: vsd.Ensemble, member: int, data: Any, held: Any) -> Any:
    """A plain member with the noise that its loss can bear; its weights stay."""
    model, guide = ensemble.members[member]
    net, weights = vsd.nn.mlp([data[0].shape[1], HIDDEN, 1]), guide.mean()
    with torch.no_grad():
        for layer in (0, 2):
            net[layer].weight.copy_(weights[f"net.{layer}.weight"])
            net[layer].bias.copy_(model.get_parameter(f"net.{layer}.bias"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vsd.from_trained(net, data, held, "regression", progress=False)


def program(name: str, root: str | Path, split: int, seed: int, key: str) -> dict[str, Any]:
    """Trains one program; what its members predict of held-out and of test rows.

    :param key: ``main``: all members, without the ordinary rows and again on all; ``T-20``: one network with 20
        reflections, on all rows.
    """
    data, test = load_split(name, root, split)
    start, rows = time.process_time(), (data.x, data.y)
    if key != "main":
        found = {"test": predicted(train(rows, [1.0], seed, int(key.removeprefix("T-"))), test.x)}
        return found | {"cpu_seconds": round(time.process_time() - start, 1)}
    rest, held = held_out(len(data), 1000 * seed + split)
    without = data.x[rest], data.y[rest]
    twin = train(without, MEMBERS, seed)
    found: dict[str, Any] = {"before": predicted(twin, data.x[held]), "y_held": data.y[held]}
    try:
        fitted = with_fitted_noise(twin, PLAIN, without, (data.x[held], data.y[held]))
        found["fitted"] = [kept(vsd.predict(*fitted, test.x, num_samples=SAMPLES, seed=0))]
    except ValueError as error:  # its noise is not finite on some splits of Naval
        print(name, split, "fitted noise:", error, flush=True)
    final = train(rows, MEMBERS, seed)
    found |= {"again": predicted(final, data.x[held]), "test": predicted(final, test.x)}
    found |= {"y": test.y, "y_mean": test.y_mean, "y_std": test.y_std, "num_rows": len(data)}
    return found | {"cpu_seconds": round(time.process_time() - start, 1)}


def stored(work: Path, name: str, split: int, seed: int, key: str) -> Path:
    return work / f"{name}-{split:02d}-seed{seed}-{key}.pt"


def with_share(mixed: vsd.RegressionPrediction, share: float) -> vsd.RegressionPrediction:
    """The mixture with this share of the targets' own distribution, N(0, 1) since they are standardised."""
    found = vsd.ensemble.with_base_rate(mixed.to(torch.float64), torch.tensor([-1.0, 1.0]), share)
    assert isinstance(found, vsd.RegressionPrediction)
    return found


def widened(mixed: Any, point: Sequence[float]) -> vsd.RegressionPrediction:
    """The mixture whose Normals have the variance σ² + g² v at each row, where v is the samples' variance there.

    :param point: log σ, log g and the log of the share of the base rate.
    """
    variance = math.exp(2 * point[0]) + math.exp(2 * point[1]) * mixed.epistemic.double()
    samples = mixed.samples.double()
    wide = vsd.RegressionPrediction.from_samples(samples, variance.sqrt().expand_as(samples), mixed.weights)
    return with_share(wide, math.exp(point[2]))


def disagreement(predictions: Sequence[vsd.Prediction], y: Tensor) -> list[float]:
    """What :func:`widened` is best with on these rows. The base rate has a share of at least one in all rows."""
    mixed, least = vsd.ensemble.mixture(predictions), -math.log(len(y) + 1)

    def loss(point: Any) -> float:
        return -float(widened(mixed, [float(v) for v in point]).log_prob(y).double().mean())

    points = [(s, g, e) for s in (-4.0, -2.0, -0.5) for g in (-2.0, 0.0, 1.5) for e in (least, -2.0)]
    bounds = [(-7.0, 2.0), (-3.0, 4.0), (least, -0.5)]
    options = {"maxfev": 120, "xatol": 0.01, "fatol": 1e-4}
    found = minimize(loss, min(points, key=loss), method="Nelder-Mead", bounds=bounds, options=options)
    return [float(v) for v in found.x]


def score(work: Path, name: str, split: int, seed: int) -> dict[str, Any]:
    """All methods of a split, from what its networks predicted. ``ordinary`` is the log-likelihood of ordinary rows."""
    parts = {path.stem.split(f"seed{seed}-")[1]: path for path in work.glob(f"{name}-{split:02d}-seed{seed}-*.pt")}
    found = {key: torch.load(path) for key, path in parts.items()}
    main = found["main"]
    y_mean, y_std = main["y_mean"], main["y_std"]
    y, y_held = (main[key].double() * y_std + y_mean for key in ("y", "y_held"))
    before, again, test = ([prediction(p) for p in main[key]] for key in ("before", "again", "test"))
    methods: dict[str, Any] = {}
    share = 1 / (main["num_rows"] + 1)  # what vsd.ensemble.with_base_rate has by default

    def scored(mixed: vsd.RegressionPrediction, target: Tensor) -> tuple[float, float]:
        mixed = mixed.to(torch.float64).rescaled(y_std, y_mean)
        return vsd.metrics.log_likelihood(mixed, target), vsd.metrics.rmse(mixed, target)

    def add(method: str, mixed: Any, ordinary: Any = None) -> None:
        values = dict(zip(METRICS, scored(mixed, y), strict=True))
        if ordinary is not None:
            values["ordinary"] = scored(ordinary, y_held)[0]
        methods[method] = {key: float(f"{value:.5g}") for key, value in values.items()}

    nothing = [torch.zeros(1, len(target)) for target in (y, y_held)]
    add("base_rate", *(vsd.RegressionPrediction.from_samples(zeros, torch.ones(1)) for zeros in nothing))
    for key in [key for key in found if key.startswith("T-")]:
        add(key, prediction(found[key]["test"][0]))
    if "fitted" in main:
        add("fitted", prediction(main["fitted"][0]))
    add("plain", test[PLAIN], before[PLAIN])
    add("single", test[SINGLE], before[SINGLE])
    for mixture, chosen in {"plain1": [PLAIN], "single1": [SINGLE], **MIXTURES}.items():
        own = [before[m] for m in chosen]
        ways = {"stacked": vsd.ensemble.stack(own, main["y_held"])}
        if mixture == "plain":
            levels = ways["stacked"].levels
            assert levels is not None
            ways["one_sigma"] = one_sigma(own, main["y_held"], levels)
        for label, how in ways.items():
            there = how.carried_over([again[m] for m in chosen]).mix([test[m] for m in chosen])
            ordinary = how.carried_over(own).mix(own)
            add(f"{mixture}_{label}", there, ordinary)
            if label == "stacked":
                add(f"{mixture}_base", *(with_share(p, share) for p in (there, ordinary)))
        if mixture in WIDENED:
            point = disagreement(own, main["y_held"])
            there, ordinary = (vsd.ensemble.mixture([p[m] for m in chosen]) for p in (test, before))
            add(f"{mixture}_widened", widened(there, point), widened(ordinary, point))
    seconds = round(sum(part["cpu_seconds"] for part in found.values()), 1)
    return {"set": name, "split": split, "seed": seed, "cpu_seconds": seconds, "methods": methods}


def paper_rows(name: str, root: str | Path, variant: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """A method of the paper's experiments on all gap splits of a set; settings are chosen on held-out rows."""
    pairs = [load_split(name, root, split) for split in range(INPUTS[name])]
    columns = [[getattr(pair[part], what).float() for pair in pairs] for part in (0, 1) for what in ("x", "y")]
    scale = torch.tensor([data.y_std for data, _ in pairs], dtype=torch.float64)
    (setting,) = (s for s in SETTINGS if s.data == name and s.task == f"uci_{name}")
    splits, start = Splits(*(torch.stack(column) for column in columns), scale), time.process_time()
    found = paper.run_variant(splits, setting, setting.variants[variant], seed, steps or setting.steps)
    return {
        "set": name,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - start, 1),
        "splits": found["groups"]["tuned"],
    }


def load(name: str) -> list[dict[str, Any]]:
    """The runs of one set: the methods' scores by name."""
    runs = []
    for path in sorted(RESULTS.glob(f"{name}-[0-9]*.json")):
        run = json.loads(path.read_text())
        for method in PAPERS:
            other = RESULTS / f"{name}-{method}-seed{run['seed']}.json"
            if other.exists():
                splits = json.loads(other.read_text())["splits"]
                run["methods"][method] = {m: splits[m][run["split"]] for m in METRICS}
        runs.append(run["methods"])
    return runs


def means(name: str, metric: str) -> dict[str, float]:
    """The mean over splits of each method that was run on all of them."""
    runs = load(name)
    known = [
        method for method in {k: None for run in runs for k in run} if all(metric in r.get(method, {}) for r in runs)
    ]
    return {m: sum(run[m][metric] for run in runs) / len(runs) for m in known}


def best_published(name: str) -> float:
    return max(row[name][0] for row in PUBLISHED.values())


def tables() -> str:
    """The tables of the page, in Markdown."""
    sets = [name for name in FOLDERS if load(name)]
    found = {metric: {n: means(n, metric) for n in sets} for metric in (*METRICS, "ordinary")}
    lines = []
    for index, (metric, title) in enumerate(METRICS.items()):
        extra = not index  # how many are above
        lines += [f"{title}:", "", *_head(sets, "above" if extra else None)]
        for label, row in PUBLISHED.items():
            lines.append(_row(f"published: {label}", [row[n][index] for n in sets], extra=" |" * extra))
        if extra:
            lines.append(_row("published elsewhere, best", [ELSEWHERE.get(n) for n in sets], extra=" |"))
        for method, label in METHODS.items():
            if method in GROUPS:
                lines.append(f"| {GROUPS[method]} |" + " |" * (len(sets) + extra))
            values = [found[metric][n].get(method) for n in sets]
            above = [v > best_published(n) for v, n in zip(values, sets, strict=True) if v is not None]
            if above:
                bold = [v is not None and extra and v > best_published(n) for v, n in zip(values, sets, strict=True)]
                lines.append(_row(label, values, bold, f" {sum(above)} of {len(above)} |" if extra else ""))
        lines.append("")
    lines += ["Log-likelihood of ordinary rows, held out:", "", *_head(sets)]
    lines += [_row(label, [found["ordinary"][n].get(method) for n in sets]) for method, label in COSTS.items()]
    return "\n".join([*lines, ""])


def _head(sets: Sequence[str], extra: str | None = None) -> list[str]:
    columns = [f"{name.capitalize()} ({len(load(name))})" for name in sets] + ([extra] if extra else [])
    return ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]


def _row(label: str, values: Sequence[float | None], bold: Sequence[bool] = (), extra: str = "") -> str:
    cells = []
    for number, value in enumerate(values):
        digits = 0 if value is None else 3 if abs(value) < 10 else 2 if abs(value) < 100 else 0
        text = "–" if value is None else f"{value:.{digits}f}"
        cells.append(f"**{text}**" if number < len(bold) and bold[number] else text)
    return f"| {label} | " + " | ".join(cells) + " |" + extra


def write(page: Path) -> None:
    """Replaces what is between the page's marks."""
    before, _, rest = page.read_text().partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}<!-- table -->\n{tables()}<!-- end -->{after}")


def figure(root: str | Path, work: Path, path: Path) -> None:
    """Five stacked VSD networks in the first gap of three sets: predictions of some test rows against their targets."""
    import matplotlib.pyplot as plt

    names, chosen = ("power", "energy", "naval"), MIXTURES["vsd"]
    drawing, axes = plt.subplots(1, 3, figsize=(9.6, 3.3), layout="constrained")
    for name, ax in zip(names, axes, strict=True):
        main, (data, _) = torch.load(stored(work, name, 0, 0, "main")), load_split(name, root, 0)
        before, again, test = ([prediction(main[k][m]) for m in chosen] for k in ("before", "again", "test"))
        stacking = vsd.ensemble.stack(before, main["y_held"]).carried_over(again)
        y_mean, y_std = main["y_mean"], main["y_std"]
        mixed = stacking.mix(test).to(torch.float64).rescaled(y_std, y_mean)
        rows = torch.randperm(len(mixed), generator=torch.Generator().manual_seed(0))[:150]
        truth, known = main["y"].double() * y_std + y_mean, data.y.double() * y_std + y_mean
        ax.axhspan(float(known.min()), float(known.max()), color="0.92", label="range of the training targets")
        width = 2 * mixed.variance.sqrt()[rows]
        ax.errorbar(truth[rows], mixed.mean[rows], width, fmt="o", markersize=2.5, linewidth=0.7, label="mean ± 2 sd")
        ends = [float(truth.min()), float(truth.max())]
        ax.plot(ends, ends, "k-", linewidth=0.8, label="perfect")
        ax.set(title=name.capitalize(), xlabel="target", ylabel="prediction" if name == names[0] else "")
    axes[0].legend(fontsize="x-small", frameon=False)
    drawing.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="the folder that holds UCI_Datasets and UCI_Datasets_gap")
    parser.add_argument("work", nargs="?", type=Path, help="a folder for the networks' predictions")
    parser.add_argument("--sets", nargs="*", default=list(FOLDERS), choices=list(FOLDERS))
    parser.add_argument("--splits", type=int, default=max(INPUTS.values()))
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--papers", nargs="*", default=PAPERS, help="methods of the paper's experiments to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        return write(options.write)
    if options.data is None or options.work is None:
        parser.error("give the folder that holds UCI_Datasets, and one to work in")
    if options.figure:
        return figure(options.data, options.work, options.figure)
    for folder in (RESULTS, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        for split in range(min(options.splits, INPUTS[name])):
            run_split(name, options, split)
        for variant in () if options.score else options.papers:
            path = RESULTS / f"{name}-{variant}-seed{options.seed}.json"
            if not path.exists():
                result = paper_rows(name, options.data, variant, options.seed)
                splits = {metric: [float(f"{v:.5g}") for v in result["splits"][metric]] for metric in METRICS}
                path.write_text(json.dumps(result | {"splits": splits}) + "\n")
                print(name, variant, f"{result['cpu_seconds']:.0f} s", flush=True)
    return None


def run_split(name: str, options: argparse.Namespace, split: int) -> None:
    """Trains what is missing of a split, and scores it."""
    new = False
    for key in () if options.score else options.programs:
        path = stored(options.work, name, split, options.seed, key)
        if not path.exists():
            result, unfinished = program(name, options.data, split, options.seed, key), path.with_suffix(".part")
            torch.save(result, unfinished)
            unfinished.rename(path)
            print(name, split, key, result["cpu_seconds"], "s", flush=True)
            new = True
    path = RESULTS / f"{name}-{split:02d}-seed{options.seed}.json"
    if stored(options.work, name, split, options.seed, "main").exists() and (new or options.score or not path.exists()):
        path.write_text(json.dumps(score(options.work, name, split, options.seed)) + "\n")


if __name__ == "__main__":
    main()
