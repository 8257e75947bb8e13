"""Ensembles on the UCI sets: stacked VSD, stacked plain networks, both together, and single networks.

    python -m benchmarks.ensembles DATA WORK                    # all sets, 20 splits; continues where it was stopped
    python -m benchmarks.ensembles DATA WORK --sets yacht --splits 3
    python -m benchmarks.ensembles DATA WORK --score            # scores again what is in WORK, without training
    python -m benchmarks.ensembles --write PAGE                 # the tables of what is there, between a page's marks
    python -m benchmarks.ensembles --cost                       # what five members cost, of one

One hidden layer of 50, two reflections, float32, the defaults of ``vsd.Ensemble.fit``. Ten members, five by VSD with λ
from 0.01 to 3 and five plain, are trained without 15 % of the training rows and again on all of them; sets of up to
2,250 rows for 3,000 steps (*short*) and for 9,000 (*long*). On the held-out rows the mixtures are fitted, and their
length is chosen, as ``fit`` does. The methods are mixtures of some of the members. Nothing is chosen by test rows.
Scores are in the targets' units. The networks' predictions stay in ``WORK``; each split leaves a small JSON file in
``results/ensembles``.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t
from torch import Tensor

import pyro_vsd as vsd
from benchmarks.paper.uci_published import PAPER
from pyro_vsd.training.lengths import auto_batch_size, auto_lengths

RESULTS = Path(__file__).parent / "results" / "ensembles"
SMALL, LARGE = ("yacht", "boston", "energy", "concrete", "wine"), ("kin8nm", "power", "naval")
HIDDEN, HELD_OUT, SAMPLES = 50, 0.15, 100
VSD = [0.01, 0.1, 0.3, 1.0, 3.0]
SINGLE = VSD.index(1.0)
OURS = "default_stacked"
SETS = (*SMALL, *LARGE)
METRICS = {"log_likelihood": "Test log-likelihood", "rmse": "RMSE"}
METHODS = {
    "single": "one VSD network, λ = 1",
    "single_stacked": "the same, σ and length from held-out rows",
    "mc_dropout": "MC dropout, tuned",
    "plain_one_sigma": "five plain networks, one σ",
    "plain_stacked": "five plain networks, stacked",
    OURS: "**the default: λ = .01, .1, 1, 3 and a plain network, stacked**",
    "vsd_stacked": "λ = .01, .1, .3, 1, 3, stacked",
    "mixed5_stacked": "λ = .01, .1, .3, 3 and a plain network, stacked",
    "mixed5_two_stacked": "λ = .1, 1, 3 and two plain networks, stacked",
    "mixed7_stacked": "five VSD and two plain networks, stacked",
    "mixed10_stacked": "five VSD and five plain networks, stacked",
    "default_short": "the default, 3,000 steps",
    "default_long": "the default, 9,000 steps",
    "plain_short": "five plain networks, stacked, 3,000 steps",
    "plain_long": "five plain networks, stacked, 9,000 steps",
}
LENGTHS = ("short", "long")
# λ of all members, ``None`` for plain ones.
MEMBERS: list[float | None] = [*VSD, *[None] * 5]
# Members of each mixture by number.
MIXTURES = {
    "default": [0, 1, 3, 4, 5],
    "vsd": [0, 1, 2, 3, 4],
    "plain": [5, 6, 7, 8, 9],
    "mixed5": [0, 1, 2, 4, 5],
    "mixed5_two": [1, 3, 4, 5, 6],
    "mixed7": [0, 1, 2, 3, 4, 5, 6],
    "mixed10": list(range(10)),
}


def train(
    rows: tuple[Tensor, Tensor],
    members: Sequence[float | None],
    seed: int,
    reflections: int = 2,
    epochs: int | None = None,
) -> vsd.Ensemble:
    def make() -> vsd.nn.Regressor:
        net = vsd.nn.bayesianize(vsd.nn.mlp([rows[0].shape[1], HIDDEN, 1]))
        return vsd.nn.Regressor(net, num_data=len(rows[0]), noise="learned")

    options = {"kl_weight": list(members), "seed": seed, "num_reflections": reflections}
    ensemble = vsd.Ensemble(make, members=len(members), **options)
    return ensemble.fit(rows, validation=None, epochs=epochs, progress=False)


def held_out(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the rows to train on, and of 15 % to hold out."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    count = math.ceil(HELD_OUT * rows)
    return order[count:], order[:count]


Kept = tuple[Tensor, Tensor]


def kept(prediction: Any) -> Kept:
    """Samples and the σ of each: all that there is to a prediction whose σ is one for all rows."""
    return prediction.samples, prediction.scales[:, :1].clone()


def predicted(ensemble: vsd.Ensemble, x: Tensor) -> list[Kept]:
    """What each member predicts."""
    return [kept(p) for p in ensemble.member_predictions(x, num_samples=SAMPLES, seed=0)]


def prediction(found: Kept, *more: Kept) -> vsd.RegressionPrediction:
    """The prediction of these rows and then of more."""
    parts = (found, *more)
    samples = torch.cat([samples for samples, _ in parts], 1)
    return vsd.RegressionPrediction.from_samples(samples, torch.cat([s.expand_as(x) for x, s in parts], 1))


def one_sigma(predictions: Sequence[vsd.Prediction], y: Tensor, levels: Tensor) -> vsd.ensemble.Stacking:
    """Equal weights and one σ for all, the best on these rows."""
    equal = vsd.ensemble.Stacking.equal(len(predictions))

    def with_sigma(log_sigma: float) -> vsd.ensemble.Stacking:
        return vsd.ensemble.Stacking(equal.weights, (log_sigma - levels).exp(), levels=levels)

    scores = {g: float(with_sigma(g / 10).mix(predictions).log_prob(y).mean()) for g in range(-60, 11)}
    return with_sigma(max(scores, key=lambda g: scores[g]) / 10)


def program(name: str, root: str, split: int, seed: int, length: str) -> dict[str, Any] | None:
    """Trains all members; what they predict of held-out and of test rows. ``None`` for a short run of a large set."""
    data, test = vsd.datasets.uci(name, root, split)
    rest, held = held_out(len(data), 1000 * seed + split)
    lengths = auto_lengths(len(rest), math.ceil(len(rest) / auto_batch_size(len(rest))))
    if length == "short" and len(lengths) == 1:
        return None
    epochs, start = lengths[0 if length == "short" else -1], time.process_time()
    twin = train((data.x[rest], data.y[rest]), MEMBERS, seed, epochs=epochs)
    final = train((data.x, data.y), MEMBERS, seed, epochs=epochs)
    found: dict[str, Any] = {"cpu_seconds": round(time.process_time() - start, 1)}
    found |= {"before": predicted(twin, data.x[held]), "again": predicted(final, data.x[held])}
    return found | {
        "test": predicted(final, test.x),
        "y_held": data.y[held],
        "y": test.y,
        "y_mean": test.y_mean,
        "y_std": test.y_std,
    }


def score(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All methods of a split, from what its networks predicted after each length."""
    some = found["long"]
    y, y_held = some["y"].double() * some["y_std"] + some["y_mean"], some["y_held"]
    parts = {
        (length, key): [prediction(p) for p in own[key]]
        for length, own in found.items()
        for key in ("before", "again", "test")
    }

    def scored(length: str, chosen: list[int], stacking: vsd.ensemble.Stacking) -> dict[str, Any]:
        again, test = ([parts[length, key][m] for m in chosen] for key in ("again", "test"))
        mixed = stacking.carried_over(again).mix(test).to(torch.float64).rescaled(some["y_std"], some["y_mean"])
        result = {"log_likelihood": vsd.metrics.log_likelihood(mixed, y), "rmse": vsd.metrics.rmse(mixed, y)}
        result |= {"crps": vsd.metrics.crps(mixed, y), "coverage": vsd.metrics.coverage(mixed, y)}
        return result | {"length": length, "weights": stacking.weights.tolist()}

    shortest = "short" if "short" in found else "long"
    methods = {"single": scored(shortest, [SINGLE], vsd.ensemble.Stacking.equal(1))}
    for mixture, chosen in {"single": [SINGLE], **MIXTURES}.items():
        stackings = {n: vsd.ensemble.stack([parts[n, "before"][m] for m in chosen], y_held) for n in found}
        best = max(found, key=lambda length: stackings[length].after)
        methods[f"{mixture}_stacked"] = scored(best, chosen, stackings[best])
        if mixture in ("default", "plain") and len(found) > 1:
            methods |= {f"{mixture}_{n}": scored(n, chosen, stacking) for n, stacking in stackings.items()}
        if mixture == "plain":
            own = {n: [parts[n, "before"][m] for m in chosen] for n in found}
            ways = {n: one_sigma(own[n], y_held, stackings[n].levels) for n in found}  # type: ignore[arg-type]
            best = max(found, key=lambda length: float(ways[length].mix(own[length]).log_prob(y_held).mean()))
            methods[f"{mixture}_one_sigma"] = scored(best, chosen, ways[best])
    return methods


def load(name: str) -> list[dict[str, Any]]:
    """The runs of one set: the methods' scores by name. MC dropout comes from the paper's runs on these splits."""
    runs = []
    for path in sorted(RESULTS.glob(f"{name}-*.json")):
        run = json.loads(path.read_text())
        found = {method: {m: v[m] for m in METRICS} for method, v in run["methods"].items()}
        other = RESULTS.parent / f"uci_{name}" / f"mc_dropout-seed{run['seed']}.json"
        if other.exists():
            splits = json.loads(other.read_text())["groups"]["tuned"]
            found["mc_dropout"] = {m: splits[m][run["split"]] for m in METRICS}
        runs.append(found)
    return runs


def tables() -> str:
    """Both tables of the page, in Markdown."""
    lines = []
    for metric, title in METRICS.items():
        index = int(metric == "log_likelihood")
        lines += [
            f"{title}:",
            "",
            "| | " + " | ".join(f"{n.capitalize()} ({len(load(n))})" for n in SETS if load(n)) + " |",
        ]
        lines += ["|---|" + "---|" * sum(bool(load(n)) for n in SETS)]
        cells = [f"{PAPER[n]['VSD'][index][0]:.2f}" for n in SETS if load(n)]
        lines.append("| the paper's VSD | " + " | ".join(cells) + " |")
        for method, label in METHODS.items():
            cells = [_cell(load(n), method, metric) for n in SETS if load(n)]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(runs: list[dict[str, Any]], method: str, metric: str) -> str:
    """The mean; for other methods the paired difference from the stacked VSD ensemble, ± 95 %."""
    pairs = [(run[method][metric], run[OURS][metric]) for run in runs if method in run]
    if not pairs:
        return "–"
    values = torch.tensor(pairs, dtype=torch.float64)
    middle = float(values[:, 0].mean())
    form = ".3f" if abs(middle) >= 0.1 else ".4f" if abs(middle) >= 0.01 else ".6f"
    if method == OURS:
        return f"**{middle:{form}}**"
    gap = values[:, 0] - values[:, 1]
    half = float(t.ppf(0.975, len(gap) - 1) * gap.std() / len(gap) ** 0.5) if len(gap) > 1 else math.nan
    return f"{middle:{form}} ({float(gap.mean()):+{form}} ± {half:{form}})"


def write(page: Path) -> None:
    """Replaces what is between the page's marks."""
    before, _, rest = page.read_text().partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}<!-- table -->\n{tables()}<!-- end -->{after}")


def cost() -> None:
    """CPU seconds of one network by ``vsd.fit`` and of five by ``vsd.Ensemble``, capturing included: 13-50-1, 455 rows,
    3,000 steps of 91 rows; medians of three in turn."""
    x = torch.randn(455, 13)
    y = x.sum(-1).sin() + 0.1 * torch.randn(455)

    def seconds(members: int, dtype: torch.dtype) -> float:
        def make() -> vsd.nn.Regressor:
            net = vsd.nn.bayesianize(vsd.nn.mlp([13, HIDDEN, 1]).to(dtype))
            return vsd.nn.Regressor(net, num_data=455, noise="learned")

        rows, start = (x.to(dtype), y.to(dtype)), time.process_time()
        if members > 1:
            vsd.Ensemble(make, members=members).fit(rows, validation=None, epochs=600, progress=False)
        else:
            model = make()
            vsd.fit(model, vsd.VSDGuide(model), rows, batch_size=91, epochs=600, progress=False)
        return time.process_time() - start

    for dtype in (torch.float32, torch.float64):
        seconds(1, dtype)
        pairs = torch.tensor([[seconds(m, dtype) for m in (1, 5)] for _ in range(3)])
        one, five = pairs.median(0).values.tolist()
        print(f"{dtype}: one {one:.2f} s, five {five:.2f} s, ratio {five / one:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="the folder that holds UCI_Datasets")
    parser.add_argument("work", nargs="?", type=Path, help="a folder for the networks' predictions")
    parser.add_argument("--sets", nargs="*", default=[*SMALL, *LARGE])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write or options.cost:
        return write(options.write) if options.write else cost()
    if options.data is None or options.work is None:
        parser.error("give the folder that holds UCI_Datasets, and one to work in")
    for folder in (RESULTS, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    small = [name for name in options.sets if name in SMALL]
    groups = [small, *[[name] for name in options.sets if name not in SMALL]]
    for seed, names, split in itertools.product(range(options.seeds), groups, range(options.splits)):
        for name in names:
            run_split(name, options, split, seed)
    return None


def run_split(name: str, options: argparse.Namespace, split: int, seed: int) -> None:
    """Trains the members of a split where that is missing, and scores their mixtures."""
    path, found = RESULTS / f"{name}-{split:02d}-seed{seed}.json", {}
    if path.exists() and not options.score:
        return
    for length in LENGTHS:
        work = options.work / f"{path.stem}-{length}.pt"
        if not work.exists():
            if options.score:
                continue
            unfinished = work.with_suffix(".part")
            torch.save(program(name, options.data, split, seed, length), unfinished)
            unfinished.rename(work)
        if (own := torch.load(work)) is not None:
            found[length] = own
    if "long" not in found:
        return
    methods, seconds = score(found), round(sum(own["cpu_seconds"] for own in found.values()), 1)
    result = {"set": name, "split": split, "seed": seed, "cpu_seconds": seconds, "methods": methods}
    path.write_text(json.dumps(result, indent=1) + "\n")
    scores = {k: round(v["log_likelihood"], 3) for k, v in methods.items()}
    print(name, split, seed, f"{seconds:.0f} s", scores, flush=True)


if __name__ == "__main__":
    main()
