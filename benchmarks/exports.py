"""What exported samplers cost, and how near their draws come to many.

    python benchmarks/exports.py                # both parts, about five minutes
    python benchmarks/exports.py --only cost

**Error** of the prediction from 32 draws, chosen in three ways, and from more random ones, against 20,000 random draws:
root mean square over rows and seeds, as a ratio to that of 32 random draws. Half the rows of digits are noise images.

**Cost** of the ONNX file of a sampler with 32 draws, as ratios: its bytes to those of the plain network's file; the
time of a call in onnxruntime to that of one call of the plain network, of 32 calls, and of ``vsd.predict`` with 32
samples. One thread, float32, medians of interleaved calls.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import pyro_vsd as vsd

DRAWS, MANY, SEEDS = 32, 20_000, 20


# ---- error


def problem(name: str) -> tuple[Any, Any, Tensor]:
    """A trained model, its guide and rows to predict."""
    torch.manual_seed(0)
    if name == "diabetes":
        train, test = vsd.datasets.diabetes()
        net: nn.Module = vsd.nn.mlp([10, 50, 1])
        model: Any = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=len(train), noise="learned")
    else:
        train, test = vsd.datasets.digits()
        net = vsd.nn.mlp([64, 100, 100, 10])
        if name == "digits, convolutions":
            layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
            net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
        prior = vsd.nn.HierarchicalPrior() if name == "digits, hierarchical" else vsd.nn.GaussianPrior()
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net, prior), num_data=len(train))
    guide = vsd.VSDGuide(model)
    adam = torch.optim.Adam(guide.parameter_groups(lr=3e-3))
    vsd.fit(model, guide, train, epochs=100 if name == "diabetes" else 20, optimizer=adam, seed=0, progress=False)
    rows = test.x[:100]
    return model, guide, rows if name == "diabetes" else torch.cat([rows, torch.rand(100, 64)])


def summary(mean: Tensor, spread: Tensor, classes: bool) -> dict[str, Tensor]:
    """What is compared: the mean, and the part of the uncertainty that comes from the draws."""
    return {"probs": mean, "mutual information": spread} if classes else {"mean": mean, "stddev": spread}


def of_prediction(prediction: Any) -> dict[str, Tensor]:
    classes = isinstance(prediction, vsd.ClassificationPrediction)
    return summary(prediction.mean, prediction.mutual_information if classes else prediction.stddev, classes)


def of_sampler(out: dict[str, Tensor]) -> dict[str, Tensor]:
    if "probs" in out:
        return of_prediction(vsd.ClassificationPrediction.from_samples(out["samples"]))
    return summary(out["mean"], out["stddev"], classes=False)


def error() -> None:
    print(f"| problem | quantity | {DRAWS} random | mirrored | matched | 100 random | 1,000 random |")
    print("|---|---|---|---|---|---|---|")
    for name in ("digits", "digits, hierarchical", "digits, convolutions", "diabetes"):
        model, guide, x = problem(name)
        many = of_prediction(vsd.predict(model, guide, x, num_samples=MANY, seed=-1, keep_samples=False))
        ways: dict[str, Callable[[int], dict[str, Tensor]]] = {}
        for noise in ("random", "mirrored", "matched"):
            ways[noise] = lambda s, noise=noise: of_sampler(  # type: ignore[misc]
                vsd.export.sampler(model, guide, DRAWS, s, noise)(x)  # noqa: B023
            )
        for n in (100, 1000):
            ways[str(n)] = lambda s, n=n: of_prediction(  # type: ignore[misc]
                vsd.predict(model, guide, x, num_samples=n, seed=s, keep_samples=False)  # noqa: B023
            )
        found = {way: [draw(seed) for seed in range(SEEDS)] for way, draw in ways.items()}
        for quantity, target in many.items():
            errors = [
                torch.stack([out[quantity] - target for out in outs]).square().mean().sqrt().item()
                for outs in found.values()
            ]
            print(f"| {name} | {quantity} | 1 ({errors[0]:.4f}) |", end=" ")
            print(" | ".join(f"{value / errors[0]:.2f}" for value in errors[1:]), "|", flush=True)


# ---- cost


class Transformer(nn.Module):
    """Classifies sequences of 32 tokens: two layers, 64 wide."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 10)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(x)).mean(1))
        return out


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP 784-400-400-10": (lambda: vsd.nn.mlp([784, 400, 400, 10]), lambda n: torch.randn(n, 784)),
    "LeNet-5": (lambda: vsd.nn.lenet5(), lambda n: torch.randn(n, 1, 28, 28)),
    "transformer": (Transformer, lambda n: torch.randint(0, 1000, (n, 32))),
}


def session(path: Path) -> Callable[[Tensor], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    run = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = run.get_inputs()[0].name
    return lambda x: run.run(None, {name: x.numpy()})


def seconds(calls: dict[str, Callable[[], Any]], repeats: int = 15) -> dict[str, float]:
    """Medians of interleaved calls."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def cost() -> None:
    print(f"| network | file | rows | to one plain call | to {DRAWS} plain calls | to `predict` |")
    print("|---|---|---|---|---|---|")
    for name, (make, rows) in NETWORKS.items():
        torch.manual_seed(0)
        model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=100)
        guide, x = vsd.VSDGuide(model), rows(2)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{part}.onnx" for part in ("sampler", "plain")]
            vsd.export.onnx(model, guide, paths[0], x, draws=DRAWS)
            plain = vsd.nn.mean_network(model, guide).eval()
            batch = {0: torch.export.Dim("batch")}
            program = torch.export.export(plain, (x,), dynamic_shapes=(batch,), strict=False)
            torch.onnx.export(program, f=paths[1], dynamo=True, external_data=False, verbose=False)
            sizes = [path.stat().st_size for path in paths]
            sampler, network = map(session, paths)
            for n in (1, 8, 100):
                x = rows(n)
                taken = seconds(
                    {
                        "sampler": lambda x=x: sampler(x),  # noqa: B023
                        "plain": lambda x=x: network(x),  # noqa: B023
                        "loop": lambda x=x: [network(x) for _ in range(DRAWS)],  # noqa: B023
                        "predict": lambda x=x: vsd.predict(model, guide, x, num_samples=DRAWS),  # noqa: B023
                    }
                )
                one, loop, predict = (taken["sampler"] / taken[key] for key in ("plain", "loop", "predict"))
                size = sizes[0] / sizes[1]
                print(f"| {name} | {size:.2f} | {n} | {one:.1f} | {loop:.2f} | {predict:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["error", "cost"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only != "cost":
        error()
    if options.only != "error":
        cost()


if __name__ == "__main__":
    main()
