"""The program behind `make demo`: a plain network, the same with weight decay, and VSD on handwritten digits.

It shows where VSD is better and where it is not: negative log-likelihood (NLL) and calibration error (ECE) of test
images as they are and under growing pixel noise, and how well images of another kind are detected. Three seeds.

    python tutorials/demo.py [--epochs 200] [--seeds 3] [--figure demo.png]
"""

import argparse
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SIZES = [64, 100, 100, 10]
NOISE = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
PRINTED = (0.0, 0.2, 0.4)
SHOWN = 0.3  # the noise of the reliability diagram
COLOURS = {"plain": "#999999", "weight decay": "#E69F00", "VSD": "#0072B2"}
Predict = Callable[[torch.Tensor], vsd.ClassificationPrediction]


def train_plain(train: vsd.datasets.Data, epochs: int, weight_decay: float = 0.0) -> Predict:
    """A network without noise, with the optimiser and the schedule that ``vsd.fit`` uses by default."""
    net = vsd.nn.mlp(SIZES)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in train.batches(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
    return lambda x: vsd.ClassificationPrediction.from_samples(net(x).softmax(-1).detach().unsqueeze(0))


def train_vsd(train: vsd.datasets.Data, epochs: int) -> Predict:
    """The same network with learned noise on the inputs of every layer."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(SIZES)), num_data=len(train))
    guide = vsd.VSDGuide(model)
    vsd.fit(model, guide, train, epochs=epochs, progress=False)
    return lambda x: vsd.predict(model, guide, x, num_samples=100)


def shifted_images(x: torch.Tensor) -> dict[str | float, torch.Tensor]:
    """Test images under pixel noise, by its strength, and images that are no digits."""
    images: dict[str | float, torch.Tensor] = {s: (x + s * torch.randn_like(x)).clamp(0, 1) for s in NOISE}
    images["rotated by 90°"] = x.reshape(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    images["shuffled pixels"] = x.gather(-1, torch.rand_like(x).argsort(-1))
    return images


def print_table(scores: dict[str, dict[str, torch.Tensor]], seconds: dict[str, torch.Tensor]) -> None:
    """The mean over seeds of each metric; the best one of a row has a star."""
    print(f"\n{'':34}" + "".join(f"{name:>14}" for name in scores))
    for row in next(iter(scores.values())):
        if row.startswith(("NLL", "ECE", "error")) and float(row.split()[-1]) not in PRINTED:
            continue
        means = [float(of[row].mean()) for of in scores.values()]
        best = max(means) if row.startswith("AUROC") else min(means)
        print(f"{row:34}" + "".join(f"{value:13.3f}{'*' if value == best else ' '}" for value in means))
    print(f"{'seconds to train':34}" + "".join(f"{float(value.median()):13.1f} " for value in seconds.values()))
    print("AUROC: detection by the entropy of the prediction; 0.5 is guessing. *: the best of a row")


def draw(path: str, scores: dict[str, dict[str, torch.Tensor]], pooled: dict[str, vsd.metrics.Bins]) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.9), layout="constrained")
    for name, colour in COLOURS.items():
        for ax, metric in zip(axes, ("NLL", "ECE"), strict=False):
            values = torch.stack([scores[name][f"{metric}, pixel noise {s}"] for s in NOISE])
            ax.plot(NOISE, values.mean(1), "o-", color=colour, markersize=4, label=name)
            ax.fill_between(NOISE, values.amin(1), values.amax(1), color=colour, alpha=0.2, linewidth=0)
            ax.set(xlabel="pixel noise", ylabel=metric)
            ax.set_yscale("log")
        bins = pooled[name]
        enough = bins.size >= 5  # a share of fewer images says nothing
        axes[2].plot(bins.confidence[enough], bins.accuracy[enough], "o-", color=colour, markersize=4)
    axes[2].plot([0, 1], [0, 1], ":", color="#666666", linewidth=1)
    axes[2].set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    kinds = [row for row in scores["VSD"] if row.startswith("AUROC")]
    for number, (name, colour) in enumerate(COLOURS.items()):
        values = torch.stack([scores[name][kind] for kind in kinds])
        where = torch.arange(len(kinds)) + 0.25 * (number - 1)
        axes[3].bar(where, values.mean(1), 0.22, color=colour)
        axes[3].plot(where.expand(values.shape[1], -1).T, values, ".", color="black", markersize=3)
    axes[3].axhline(0.5, color="#666666", linewidth=1, linestyle=":")
    axes[3].set_xticks(range(len(kinds)), [kind.split(", ")[1].replace(" ", "\n", 1) for kind in kinds])
    axes[3].set(ylabel="AUROC", ylim=(0, 1.02))
    titles = ("NLL: lower is better", "Calibration error: lower is better", f"Reliability at pixel noise {SHOWN}")
    for ax, title in zip(axes, (*titles, "Detection of images of another kind"), strict=True):
        ax.set_title(title, fontsize="medium")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", default="demo.png")
    options = parser.parse_args()

    torch.set_num_threads(1)  # matrices are too small to benefit from a second thread
    train, test = vsd.datasets.digits()
    methods: dict[str, Callable[[], Predict]] = {
        "plain": lambda: train_plain(train, options.epochs),
        "weight decay": lambda: train_plain(train, options.epochs, weight_decay=3e-4),
        "VSD": lambda: train_vsd(train, options.epochs),
    }
    print(f"{len(train)} training and {len(test)} test images of 8 × 8 pixels; network {SIZES}")
    train_plain(train, 5)  # so that the first network is not timed with torch's own start
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    noisy: dict[str, list[torch.Tensor]] = {name: [] for name in methods}
    for seed in range(options.seeds):
        for name, method in methods.items():
            pyro.set_rng_seed(seed)
            start = time.perf_counter()
            predict = method()
            seconds[name].append(time.perf_counter() - start)
            print(f"seed {seed}: {name} trained in {seconds[name][-1]:.1f} s", flush=True)
            pyro.set_rng_seed(1000 + seed)  # the same images for all methods
            found = {kind: predict(x) for kind, x in shifted_images(test.x).items()}
            row = {f"NLL, pixel noise {s}": vsd.metrics.nll(found[s], test.y) for s in NOISE}
            row |= {f"ECE, pixel noise {s}": vsd.metrics.ece(found[s], test.y) for s in NOISE}
            row |= {f"error rate, pixel noise {s}": vsd.metrics.error_rate(found[s], test.y) for s in NOISE}
            for kind in ("rotated by 90°", "shuffled pixels"):
                row[f"AUROC, {kind}"] = vsd.metrics.ood(found[0.0], found[kind], "entropy")["auroc"]
            rows[name].append(row)
            noisy[name].append(found[SHOWN].probs)
    scores = {name: {k: torch.tensor([r[k] for r in of]) for k in of[0]} for name, of in rows.items()}
    print_table(scores, {name: torch.tensor(of) for name, of in seconds.items()})
    labels = test.y.repeat(options.seeds)
    draw(options.figure, scores, {n: vsd.metrics.reliability_bins(torch.cat(p), labels, 10) for n, p in noisy.items()})
    print(f"\nfigure: {options.figure}")


if __name__ == "__main__":
    main()
