"""What the start of the reflection vectors does for out-of-distribution rows: VD, VSD, and VSD with unscaled vectors.

    python -m benchmarks.start digits               # against images with shuffled pixels, four seeds; two minutes
    python -m benchmarks.start mnist DATA           # against FashionMNIST, 15 epochs, two seeds
    python -m benchmarks.start table

Each run leaves a small JSON file in ``results/start``; those that are there are not made again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pyro_vsd as vsd

RESULTS = Path(__file__).parent / "results" / "start"
GUIDES: dict[str, dict[str, Any]] = {
    "VD": {"num_reflections": 0},
    "VSD, scaled start": {},
    "VSD, start not scaled": {"scale_vectors": False},
}
SEEDS = {"digits": 4, "mnist": 2}
METRICS = ("nll", "error_rate", "auroc")

Task = tuple[list[int], dict[str, Any], tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]


def digits(seed: int) -> Task:
    train, test = vsd.datasets.digits()
    generator = torch.Generator().manual_seed(seed)
    other = torch.stack([x[torch.randperm(64, generator=generator)] for x in test.x])
    options = {"epochs": 100, "batch_size": 100, "lr": 3e-3}
    return [64, 100, 100, 10], options, (train.x, train.y), (test.x, test.y), other


def mnist(root: str) -> Task:
    from torchvision import datasets

    def rows(kind: Any, train: bool) -> tuple[Tensor, Tensor]:
        data = kind(root, train=train)
        return data.data.flatten(1).float() / 255, data.targets

    test = tuple(t[:3000] for t in rows(datasets.MNIST, False))
    other = rows(datasets.FashionMNIST, False)[0][:3000]
    options = {"epochs": 15, "batch_size": 100, "lr": 1e-3}
    return [784, 400, 400, 10], options, rows(datasets.MNIST, True), (test[0], test[1]), other


def run(task: Task, guide_options: dict[str, Any], seed: int) -> dict[str, float]:
    sizes, options, train, (x, y), other = task
    torch.manual_seed(seed)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(sizes)), num_data=len(train[1]))
    guide = vsd.VSDGuide(model, **guide_options)
    vsd.fit(model, guide, train, seed=seed, progress=False, **options)
    clean, strange = (vsd.predict(model, guide, rows, num_samples=50, seed=0) for rows in (x, other))
    report = vsd.metrics.report(clean, y)
    auroc = vsd.metrics.ood(clean, strange, "entropy")["auroc"]
    return {"nll": report["nll"], "error_rate": report["error_rate"], "auroc": auroc}


def table() -> None:
    for name in SEEDS:
        for label in GUIDES:
            found = [json.loads(p.read_text()) for p in sorted(RESULTS.glob(f"{name}-{_slug(label)}-*.json"))]
            if found:
                means = {m: round(sum(f[m] for f in found) / len(found), 4) for m in METRICS}
                print(f"{name} {label} ({len(found)} seeds): {means}")


def _slug(label: str) -> str:
    return label.replace(", ", "_").replace(" ", "_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*SEEDS, "table"])
    parser.add_argument("data", nargs="?", help="the folder of MNIST and FashionMNIST")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.task == "table":
        return table()
    if options.task == "mnist" and options.data is None:
        parser.error("give the folder of MNIST and FashionMNIST")
    for seed in range(SEEDS[options.task]):
        task = digits(seed) if options.task == "digits" else mnist(options.data)
        for label, guide_options in GUIDES.items():
            path = RESULTS / f"{options.task}-{_slug(label)}-{seed}.json"
            if not path.exists():
                found = run(task, guide_options, seed)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found) + "\n")
                print(path.stem, found, flush=True)
    return None


if __name__ == "__main__":
    main()
