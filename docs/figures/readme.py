"""The picture of the README: what noise VSD learns on digits, and what that does under shift.

    python docs/figures/readme.py   # trains one network, ten seconds; the curves are those of benchmarks/shift.py
"""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import pyro_vsd as vsd

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "shift"
CURVES = {
    "plain_no_weight_decay": ("plain", "#bbbbbb"),
    "plain": ("plain, weight decay tuned", "#666666"),
    "MC_dropout": ("MC dropout", "#E69F00"),
    "deep_ensemble_of_5": ("deep ensemble", "#009E73"),
    "VSD": ("VSD", "#0072B2"),
    "VSD_ensemble": ("VSD ensemble", "#D55E00"),
}
OUTSIDE = {"shuffled pixels": "shuffled\npixels", "rotated by 90°": "rotated\nby 90°"}


def results(method: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"digits-{method}-?.json"))]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, _ = vsd.datasets.digits()
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 100, 10])), num_data=len(train))
    guide = vsd.VSDGuide(model)
    vsd.fit(model, guide, train, seed=0)
    covariance = guide.noise("net.0.weight").covariance_matrix.detach()

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.3), layout="constrained", width_ratios=(1, 1, 1.25, 1.15))
    scale = covariance.diagonal().sqrt()
    image = axes[0].imshow(scale.log10().reshape(8, 8), cmap="cividis")
    ticks = [-1, -0.5, 0, 0.5]
    bar = figure.colorbar(image, ax=axes[0], shrink=0.8, ticks=ticks)
    bar.set_ticklabels([f"{10**tick:.2g}" for tick in ticks])
    axes[0].set_title("Learned noise of each pixel\n(standard deviation)")
    correlation = (covariance / scale / scale.unsqueeze(-1)).fill_diagonal_(0)
    limit = correlation.abs().max()
    image = axes[1].imshow(correlation, cmap="RdBu_r", vmin=-limit, vmax=limit)
    figure.colorbar(image, ax=axes[1], shrink=0.8)
    axes[1].set_title("Its correlations\n(64 × 64 pixels)")
    for ax in axes[:2]:
        ax.set(xticks=[], yticks=[])

    for number, (method, (name, colour)) in enumerate(CURVES.items()):
        found = results(method)
        strengths = [float(s) for s in found[0]["pixel noise"]]
        values = [statistics.fmean(f["clean"]["ece"] for f in found)]
        values += [statistics.fmean(f["pixel noise"][f"{s:g}"]["ece"] for f in found) for s in strengths]
        axes[2].plot([0, *strengths], values, "o-", color=colour, markersize=4, label=name)
        scores = [statistics.fmean(f["OOD"][kind]["auroc"] for f in found) for kind in OUTSIDE]
        axes[3].bar([k + 0.14 * (number - 2.5) for k in range(2)], scores, 0.12, color=colour)
    axes[2].set(xlabel="pixel noise on test images", ylim=(0, None))
    axes[2].set_title("Calibration error under shift\n(lower is better)")
    axes[2].legend(frameon=False, fontsize="small")
    axes[3].axhline(0.5, color="#666666", linewidth=1, linestyle=":")
    axes[3].set_xticks(range(2), list(OUTSIDE.values()))
    axes[3].set(ylim=(0, 1))
    axes[3].set_title("Detecting other images\n(AUROC, higher is better)")
    for ax in axes[2:]:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "readme.png", dpi=100)


if __name__ == "__main__":
    main()
