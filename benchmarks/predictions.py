"""What ``vsd.predict`` costs, and how much its results vary from seed to seed.

    python benchmarks/predictions.py --quick         # digits and diabetes, about two minutes
    python benchmarks/predictions.py --data FOLDER   # MNIST (FOLDER/MNIST/raw) instead of digits, about half an hour
    python benchmarks/predictions.py --only cost     # the times alone

**Cost**: ``predict`` with 100 samples against 100 passes of the plain network over the same rows; one thread, float32,
medians of interleaved runs. Goals: 1.15 for 1,000 rows of the MLP 784-400-400-10, and 1.0 for one row.

**Spread**: the standard deviation of a test set's metrics over independent predictions of one trained network, for
three ways to draw the noise: one draw per sample that all rows *share*, one for each sample and *row*, and shared draws
in *mirrored* pairs (ξ, 2 − ξ).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import pyro_vsd as vsd

WAYS = ("shared", "mirrored", "per row")
SAMPLES = (20, 100, 500)
# The network and the training rows of each problem.
PROBLEMS = {
    "mnist": ([784, 400, 400, 10], 10_000),
    "digits": ([64, 100, 100, 10], None),
    "diabetes": ([10, 50, 1], None),
}


# ---- spread


def load(problem: str, folder: str | None) -> tuple[Any, Any]:
    if problem == "mnist":
        assert folder is not None
        return vsd.datasets.mnist(folder, flatten=True)
    found: tuple[Any, Any] = getattr(vsd.datasets, problem)()
    return found


def train(problem: str, folder: str | None, test_rows: int) -> tuple[Any, Any, Tensor, Tensor]:
    """A trained model, its guide, test inputs and targets."""
    (sizes, train_rows), (data, test) = PROBLEMS[problem], load(problem, folder)
    data = data[:train_rows] if train_rows else data
    torch.manual_seed(0)
    net = vsd.nn.bayesianize(vsd.nn.mlp(sizes))
    regression = problem == "diabetes"
    model: Any = (
        vsd.nn.Regressor(net, num_data=len(data), noise="learned")
        if regression
        else vsd.nn.Classifier(net, num_data=len(data))
    )
    guide = vsd.VSDGuide(model)
    vsd.fit(model, guide, data, epochs=5 if problem == "mnist" else 100, batch_size=100, seed=0, progress=False)
    return model, guide, test.x[:test_rows], test.y[:test_rows]


@torch.no_grad()
def shared_draws(model: Any, guide: Any, x: Tensor, num_samples: int, seed: int, mirrored: bool) -> Tensor:
    """Outputs of the network, ``(samples, rows, outputs)``, with one dense weight per sample; mirrored pairs stand side
    by side."""
    torch.manual_seed(seed)
    net = vsd.nn.mean_network(model, guide)
    sites = list(guide.sites)
    outputs: list[Tensor] = []
    while len(outputs) < num_samples:
        noise = {site: guide.noise(site).sample() for site in sites}
        for sign in (1, -1) if mirrored else (1,):
            weights = {
                site.removeprefix("net."): guide.posterior(site).theta * (1 + sign * (xi - 1))  # noise_dim is -1
                for site, xi in noise.items()
            }
            outputs.append(functional_call(net, weights, (x,)))
    return torch.stack(outputs)


def metrics(model: Any, samples: Tensor, y: Tensor) -> dict[str, float]:
    """Of one prediction, made of each sample's probabilities or means."""
    prediction: Any
    if isinstance(model, vsd.nn.Classifier):
        prediction = vsd.ClassificationPrediction.from_samples(samples)
        return {"nll": vsd.metrics.nll(prediction, y), "ece": vsd.metrics.ece(prediction, y)}
    scales = model.log_sigma.detach().exp().expand_as(samples)
    prediction = vsd.RegressionPrediction.from_samples(samples, scales)
    error = vsd.metrics.calibration_error(prediction, y)
    return {"nll": -vsd.metrics.log_likelihood(prediction, y), "calibration error": error}


def spread(problem: str, folder: str | None, seeds: int, test_rows: int) -> list[dict[str, Any]]:
    """Mean and standard deviation of each metric. The 500 samples of a seed serve as 25 predictions of 20 samples, 5
    of 100 and one of 500."""
    model, guide, x, y = train(problem, folder, test_rows)
    found: dict[tuple[str, int], list[dict[str, float]]] = {(way, S): [] for S in SAMPLES for way in WAYS}
    for seed in range(seeds):
        for way in WAYS:
            if way == "per row":
                options: Any = {"num_samples": max(SAMPLES), "seed": seed, "coherent": False, "progress": False}
                samples = vsd.predict(model, guide, x, **options).samples
            else:
                samples = shared_draws(model, guide, x, max(SAMPLES), seed, way == "mirrored")
                samples = samples.softmax(-1) if samples.shape[-1] > 1 else samples.squeeze(-1)
            for S in SAMPLES:
                found[way, S] += [metrics(model, part, y) for part in samples.split(S)]
        print(f"{problem}: seed {seed}", flush=True)
    rows = []
    for (way, S), values in found.items():
        row: dict[str, Any] = {
            "problem": problem,
            "test rows": len(x),
            "samples": S,
            "draws": way,
            "predictions": len(values),
        }
        for name in values[0]:
            each = [value[name] for value in values]
            row[name] = {"mean": statistics.mean(each), "sd": statistics.stdev(each)}
        rows.append(row)
    return rows


def show_spread(rows: list[dict[str, Any]]) -> None:
    print(
        "\n| problem | samples | draws | predictions | NLL | its sd | ECE | its sd |\n|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        numbers = [row["nll"], row.get("ece") or row["calibration error"]]
        cells = " | ".join(f"{number['mean']:.5f} | {number['sd']:.5f}" for number in numbers)
        print(f"| {row['problem']} | {row['samples']} | {row['draws']} | {row['predictions']} | {cells} |")


# ---- cost


def medians(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turns after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if i >= 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "MLP 784-400-400-10": (lambda: vsd.nn.mlp([784, 400, 400, 10]), (784,)),
    "MLP 64-100-100-10": (lambda: vsd.nn.mlp([64, 100, 100, 10]), (64,)),
    "LeNet-5": (lambda: vsd.nn.lenet5(10, 1, 28), (1, 28, 28)),
}


def cost() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for name, (make, shape) in NETWORKS.items():
        net = make()
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=60_000)
        guide = vsd.VSDGuide(model)
        for rows in (1, 100, 1000):
            x = torch.randn(rows, *shape)

            @torch.no_grad()
            def passes(x: Tensor = x, net: Any = net) -> None:
                for _ in range(100):
                    net(x)

            def predict(coherent: bool, x: Tensor = x, model: Any = model, guide: Any = guide) -> None:
                vsd.predict(model, guide, x, num_samples=100, seed=0, coherent=coherent, progress=False)

            ways = {"passes": passes, "shared": lambda: predict(True), "per row": lambda: predict(False)}
            if rows == 1000 and name == "LeNet-5":
                del ways["per row"]  # takes minutes
            seconds = medians(ways, repeats=3 if rows == 1000 else 9)
            ratios = {way: seconds[way] / seconds["passes"] for way in ways if way != "passes"}
            found.append({"network": name, "rows": rows, "100 passes, ms": 1e3 * seconds["passes"], **ratios})
            print(found[-1], flush=True)
    return found


def show_cost(rows: list[dict[str, Any]]) -> None:
    print("\n| network | rows | 100 passes, ms | predict, shared | predict, per row |\n|---|---|---|---|---|")
    for row in rows:
        ratios = [f"{row[way]:.2f}" if way in row else "–" for way in ("shared", "per row")]
        cells = " | ".join([f"{row['100 passes, ms']:.1f}", *ratios])
        print(f"| {row['network']} | {row['rows']} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST/raw")
    parser.add_argument("--quick", action="store_true", help="digits instead of MNIST")
    parser.add_argument("--only", choices=("cost", "spread"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--test-rows", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.data is None and not options.quick and options.only != "cost":
        parser.error("name the folder with MNIST by --data, or add --quick.")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    results: dict[str, Any] = {"torch": torch.__version__}
    if options.only != "cost":
        results["spread"] = []
        for problem in ("diabetes", "digits" if options.quick else "mnist"):
            results["spread"] += spread(problem, options.data, options.seeds, options.test_rows)
        show_spread(results["spread"])
    if options.only != "spread":
        results["cost"] = cost()
        show_cost(results["cost"])
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
