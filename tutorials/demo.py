"""The program behind `make demo`: a VSD network and a plain one on handwritten digits, their metrics and a figure.

    python tutorials/demo.py [--epochs 100] [--figure demo.png]
"""

import argparse
import time

import matplotlib.pyplot as plt
import pyro
import torch
from tqdm import tqdm

import pyro_vsd as vsd

SIZES = [64, 100, 100, 10]
BATCH = 100
RATE = 3e-3


def train_plain(train: vsd.datasets.Data, epochs: int) -> torch.nn.Module:
    """Train a plain network without noise."""
    net = vsd.nn.mlp(SIZES)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    for _ in tqdm(range(epochs), desc="plain", unit="epoch"):
        for x, y in train.batches(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net


def train_vsd(train: vsd.datasets.Data, epochs: int) -> tuple[vsd.nn.Classifier, vsd.VSDGuide]:
    """Train the same network with structured dropout noise on the inputs of every layer."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(SIZES)), num_data=len(train))
    guide = vsd.VSDGuide(model)
    vsd.fit(
        model, guide, train, epochs=epochs, batch_size=BATCH, progress=True,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=RATE, fused=True),
    )  # fmt: skip
    return model, guide


def predict_plain(net: torch.nn.Module, x: torch.Tensor) -> vsd.ClassificationPrediction:
    with torch.no_grad():
        return vsd.ClassificationPrediction.from_samples(net(x).softmax(-1).unsqueeze(0))


def shuffled_pixels(x: torch.Tensor) -> torch.Tensor:
    """Out-of-distribution images: the same grey values in a random order, different for each image."""
    return x.gather(-1, torch.rand_like(x).argsort(-1))


def print_side_by_side(reports: dict[str, vsd.metrics.Report]) -> None:
    print(f"\n{'metric':<22}" + "".join(f"{name:>16}" for name in reports) + "  better")
    first = next(iter(reports.values()))
    for metric in first.to_dict():
        values = "".join(f"{report[metric]:>16.4f}" for report in reports.values())
        print(f"{metric:<22}{values}  {first.better(metric)}".rstrip())
    print("The metrics from fpr_at_95_tpr on evaluate the detection of images with shuffled pixels.")


def draw(path: str, y: torch.Tensor, predictions: dict[str, tuple], figsize: tuple[float, float] = (11, 7)) -> None:
    figure, axes = plt.subplots(2, 2, figsize=figsize, layout="constrained")
    for row, (name, (inside, outside)) in zip(axes, predictions.items(), strict=True):
        vsd.plots.reliability(inside, y, ax=row[0])
        vsd.plots.entropy_histogram({"digits": inside, "shuffled pixels": outside}, ax=row[1])
        row[0].set_title(f"{name}: reliability")
        row[1].set_title(f"{name}: predictive entropy")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--figure", default="demo.png")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)  # matrices are too small to benefit from a second thread
    pyro.set_rng_seed(options.seed)
    train, test = vsd.datasets.digits()
    outside = shuffled_pixels(test.x)
    print(f"{len(train)} training and {len(test)} test images of 8 × 8 pixels; network {SIZES}")

    start = time.perf_counter()
    net = train_plain(train, options.epochs)
    middle = time.perf_counter()
    model, guide = train_vsd(train, options.epochs)
    end = time.perf_counter()
    print(f"training took {middle - start:.1f} s for the plain network, {end - middle:.1f} s for VSD")
    predictions = {
        "plain network": (predict_plain(net, test.x), predict_plain(net, outside)),
        "VSD": tuple(vsd.predict(model, guide, x, num_samples=100) for x in (test.x, outside)),
    }
    print_side_by_side({name: vsd.metrics.report(pair[0], test.y, ood=pair[1]) for name, pair in predictions.items()})
    draw(options.figure, test.y, predictions)
    print(f"\nfigure: {options.figure}")


if __name__ == "__main__":
    main()
