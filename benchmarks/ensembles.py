"""Ensembles on the UCI sets: stacked VSD, stacked plain networks, both together, and single networks.

    python benchmarks/ensembles.py DATA                         # all sets, 20 splits; continues where it was stopped
    python benchmarks/ensembles.py DATA --sets yacht --splits 3
    python benchmarks/ensembles.py --table                      # the table of what is there
    python benchmarks/ensembles.py --cost                       # what five members cost, of one

One hidden layer of 50, two reflections, float32, the defaults of ``vsd.Ensemble.fit``. Ten members, five by VSD with λ
from 0.03 to 3 and five plain, are trained without 15 % of the training rows and again on all of them. On those rows the
mixtures are fitted; the methods are mixtures of some of the members. Nothing is chosen by test rows. Test
log-likelihood and RMSE are in the targets' units. Each split leaves a small JSON file in ``results/ensembles``.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paper.uci_published import PAPER
from torch import Tensor

import pyro_vsd as vsd

RESULTS = Path(__file__).parent / "results" / "ensembles"
SMALL, LARGE = ("yacht", "boston", "energy", "concrete", "wine"), ("kin8nm", "power", "naval")
HIDDEN, HELD_OUT, SAMPLES = 50, 0.15, 100
VSD = [0.03, 0.1, 0.3, 1.0, 3.0]
SINGLE = VSD.index(1.0)
# Members of each mixture by number; the plain ones are the last five.
MIXTURES = {
    "vsd": [0, 1, 2, 3, 4],
    "plain": [5, 6, 7, 8, 9],
    "mixed5": [0, 1, 3, 5, 6],
    "mixed10": list(range(10)),
}


def train(rows: tuple[Tensor, Tensor], seed: int) -> vsd.Ensemble:
    def make() -> vsd.nn.Regressor:
        net = vsd.nn.bayesianize(vsd.nn.mlp([rows[0].shape[1], HIDDEN, 1]))
        return vsd.nn.Regressor(net, num_data=len(rows[0]), noise="learned")

    members = [*VSD, *[None] * 5]
    return vsd.Ensemble(make, members=len(members), kl_weight=members, seed=seed).fit(
        rows, validation=None, progress=False
    )


def one_sigma(predictions: Sequence[vsd.Prediction], y: Tensor, levels: Tensor) -> vsd.ensemble.Stacking:
    """Equal weights and one σ for all, the best on these rows."""
    equal = vsd.ensemble.Stacking.equal(len(predictions))

    def with_sigma(log_sigma: float) -> vsd.ensemble.Stacking:
        return vsd.ensemble.Stacking(equal.weights, (log_sigma - levels).exp(), levels=levels)

    scores = {g: float(with_sigma(g / 10).mix(predictions).log_prob(y).mean()) for g in range(-60, 11)}
    return with_sigma(max(scores, key=lambda g: scores[g]) / 10)


def run(name: str, root: str, split: int, seed: int) -> dict[str, Any]:
    data, test = vsd.datasets.uci(name, root, split)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 * seed + split))
    count = math.ceil(HELD_OUT * len(data))
    held, rest = order[:count], order[count:]
    start = time.process_time()
    twin = train((data.x[rest], data.y[rest]), seed)
    before = twin.member_predictions(data.x[held], num_samples=SAMPLES, seed=0)
    final = train((data.x, data.y), seed)
    seconds = time.process_time() - start
    again = final.member_predictions(data.x[held], num_samples=SAMPLES, seed=0)
    predictions = final.member_predictions(test.x, num_samples=SAMPLES, seed=0)
    y = test.y.double() * test.y_std + test.y_mean

    def scored(chosen: list[int], stacking: vsd.ensemble.Stacking) -> dict[str, Any]:
        mixed = stacking.carried_over([again[m] for m in chosen]).mix([predictions[m] for m in chosen])
        mixed = mixed.to(torch.float64).rescaled(test.y_std, test.y_mean)
        found = {"log_likelihood": vsd.metrics.log_likelihood(mixed, y), "rmse": vsd.metrics.rmse(mixed, y)}
        found |= {"crps": vsd.metrics.crps(mixed, y), "coverage": vsd.metrics.coverage(mixed, y)}
        return found | {"weights": stacking.weights.tolist()}

    methods = {"single": scored([SINGLE], vsd.ensemble.Stacking.equal(1))}
    methods["single_stacked"] = scored([SINGLE], vsd.ensemble.stack([before[SINGLE]], data.y[held]))
    for mixture, chosen in MIXTURES.items():
        stacking = vsd.ensemble.stack([before[m] for m in chosen], data.y[held])
        methods[f"{mixture}_stacked"] = scored(chosen, stacking)
        assert stacking.levels is not None
        if mixture in ("vsd", "plain"):
            sigma = one_sigma([before[m] for m in chosen], data.y[held], stacking.levels)
            methods[f"{mixture}_one_sigma"] = scored(chosen, sigma)
    return {"set": name, "split": split, "seed": seed, "cpu_seconds": round(seconds, 1), "methods": methods}


def table() -> None:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for metric in ("log_likelihood", "rmse"):
        print(f"\n{metric}: mean over splits; difference of vsd_stacked to it, with its standard error")
        for name in (*SMALL, *LARGE):
            runs = [r["methods"] for r in found if r["set"] == name]
            if not runs:
                continue
            paper = PAPER[name]["VSD"][metric == "log_likelihood"]
            print(f"{name} ({len(runs)} runs), paper's VSD {paper[0]} ± {paper[1]}")
            for method in runs[0]:
                values = torch.tensor([r[method][metric] for r in runs], dtype=torch.float64)
                ours = torch.tensor([r["vsd_stacked"][metric] for r in runs], dtype=torch.float64)
                gap = ours - values
                error = float(gap.std() / len(runs) ** 0.5) if len(runs) > 1 else math.nan
                print(f"  {method:16s} {float(values.mean()):8.4f}   {float(gap.mean()):+.4f} ± {error:.4f}")


def cost() -> None:
    """CPU seconds of one network by ``vsd.fit`` and of five by ``vsd.Ensemble``, capturing included: 13-50-1, 455 rows,
    about 3,000 steps of 41 or 42 rows; medians of three in turn."""
    x = torch.randn(455, 13)
    y = x.sum(-1).sin() + 0.1 * torch.randn(455)

    def seconds(members: int, dtype: torch.dtype) -> float:
        def make() -> vsd.nn.Regressor:
            net = vsd.nn.bayesianize(vsd.nn.mlp([13, HIDDEN, 1]).to(dtype))
            return vsd.nn.Regressor(net, num_data=455, noise="learned")

        rows, start = (x.to(dtype), y.to(dtype)), time.process_time()
        if members > 1:
            vsd.Ensemble(make, members=members).fit(rows, validation=None, progress=False)
        else:
            model = make()
            vsd.fit(model, vsd.VSDGuide(model), rows, batch_size=45, progress=False)
        return time.process_time() - start

    for dtype in (torch.float32, torch.float64):
        seconds(1, dtype)
        pairs = torch.tensor([[seconds(m, dtype) for m in (1, 5)] for _ in range(3)])
        one, five = pairs.median(0).values.tolist()
        print(f"{dtype}: one {one:.2f} s, five {five:.2f} s, ratio {five / one:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="the folder that holds UCI_Datasets")
    parser.add_argument("--sets", nargs="*", default=[*SMALL, *LARGE])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table or options.cost:
        return table() if options.table else cost()
    if options.data is None:
        parser.error("give the folder that holds UCI_Datasets")
    RESULTS.mkdir(parents=True, exist_ok=True)
    small = [name for name in options.sets if name in SMALL]
    groups = [small, *[[name] for name in options.sets if name not in SMALL]]
    for seed in range(options.seeds):
        for names in groups:
            for split in range(options.splits):
                for name in names:
                    path = RESULTS / f"{name}-{split:02d}-seed{seed}.json"
                    if path.exists():
                        continue
                    result = run(name, options.data, split, seed)
                    path.write_text(json.dumps(result, indent=1) + "\n")
                    scores = {k: round(v["log_likelihood"], 3) for k, v in result["methods"].items()}
                    print(name, split, seed, f"{result['cpu_seconds']:.0f} s", scores, flush=True)
    return None


if __name__ == "__main__":
    main()
