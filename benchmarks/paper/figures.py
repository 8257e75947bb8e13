"""The paper's figures from the stored results: reliability, entropies of test and OOD inputs, training.

A result holds bins, not predictions. Rows that fall into the same bins are made again from them, and drawn by the
library's own figures: calibration errors and histograms are those of the run, up to the rounding of the record.
"""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import pyro_vsd as vsd
from benchmarks.paper import store
from benchmarks.paper.registry import SETTINGS
from benchmarks.paper.tables import NAMES, TITLES, by_variant
from benchmarks.paper.unit import Setting

__all__ = ["draw", "rows_of_confidence", "rows_of_entropy"]

# More lines than this no reader tells apart.
MOST = 6
# Which are drawn together, by the ending of the file's name: as long as the task's, and 100 epochs.
SHOWN = {
    "": ("vsd_t2_fc", "ard_vd_fc", "vsd_t2", "ard_vd", "mc_dropout", "mc_dropout_fc", "map", "deep_ensemble", "swag"),
    "_e100": ("vsd_t2_e100_l3", "ard_vd_e100_l3", "vsd_t2_e100_l10", "vsd_t2_e100", "mc_dropout_e100", "map_e100"),
}


def rows_of_confidence(bins: dict[str, Any], num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Probabilities and labels with these sizes, accuracies and mean confidences of bins.

    >>> probs, y = rows_of_confidence({"size": [4], "accuracy": [0.75], "confidence": [0.8]})
    >>> vsd.metrics.accuracy(probs, y), round(vsd.metrics.ece(probs, y), 4)
    (0.75, 0.05)
    """
    probs, labels = [], []
    for size, accuracy, confidence in zip(bins["size"], bins["accuracy"], bins["confidence"], strict=True):
        row = torch.full((num_classes,), (1 - confidence) / (num_classes - 1), dtype=torch.float64)
        row[0] = confidence
        probs.append(row.expand(size, -1))
        labels.append((torch.arange(size) >= round(size * accuracy)).long())
    return torch.cat(probs), torch.cat(labels)


def rows_of_entropy(counts: list[int], num_classes: int) -> Tensor:
    """Probabilities whose entropies are the middles of the histogram's bins, from 0 to log C.

    >>> probs = rows_of_entropy([1, 0, 0, 2], 10)
    >>> [round(float(h) / math.log(10), 3) for h in vsd.metrics.predictive_entropy(probs)]
    [0.125, 0.875, 0.875]
    """
    middles = (torch.arange(len(counts), dtype=torch.float64) + 0.5) / len(counts) * math.log(num_classes)
    low = torch.full_like(middles, 1 / num_classes)
    high = torch.ones_like(middles)
    # the entropy of (p, the rest equal) falls as p grows: bisection
    for _ in range(60):
        middle = (low + high) / 2
        too_sure = _entropy(middle, num_classes) < middles
        low, high = torch.where(too_sure, low, middle), torch.where(too_sure, middle, high)
    others = ((1 - low) / (num_classes - 1))[:, None].expand(-1, num_classes - 1)
    return torch.cat([low[:, None], others], 1).repeat_interleave(torch.tensor(counts), 0)


def _entropy(top: Tensor, num_classes: int) -> Tensor:
    return torch.special.entr(top) + (num_classes - 1) * torch.special.entr((1 - top) / (num_classes - 1))


def draw(out: Path, folder: Path = store.RESULTS) -> list[Path]:
    """Draws what there are results for; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for task, setting in SETTINGS.items():
        if isinstance(setting, Setting) and task in TITLES:
            results = by_variant(folder, task)
            for ending, shown in SHOWN.items():
                names = [name for name in shown if name in results][:MOST]
                if names:
                    made += _together(out / f"{task}{ending}", setting, {name: results[name][0] for name in names})
    return made


def _together(stem: Path, setting: Setting, results: dict[str, dict[str, Any]]) -> list[Path]:
    """The figures of some variants, one run each; ``stem`` begins the files' names."""
    labels = {name: setting.variants[name].label for name in results}
    made = [_reliability(stem, setting.task, labels, results), _losses(stem, setting.task, labels, results)]
    made += [_entropies(stem, setting, outside, labels, results) for outside in setting.ood]
    return made


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _reliability(stem: Path, task: str, labels: dict[str, str], results: dict[str, Any]) -> Path:
    columns = min(3, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    for ax in axes.flat[len(labels) :]:
        ax.set_visible(False)
    for ax, (name, label) in zip(axes.flat, labels.items(), strict=False):
        bins = results[name]["reliability"]
        probs, y = rows_of_confidence(bins)
        vsd.plots.reliability(probs, y, num_bins=bins["num_bins"], ax=ax)
        ax.set_title(label, fontsize="medium")
    figure.suptitle(TITLES[task])
    return _save(figure, stem.with_name(f"{stem.name}_reliability.png"))


def _entropies(stem: Path, setting: Setting, outside: str, labels: dict[str, str], results: dict[str, Any]) -> Path:
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for row, (key, title) in enumerate((("test", "test set"), (outside, NAMES[outside]))):
        series = {}
        for name, label in labels.items():
            entropy = results[name]["entropy"]
            series[label] = rows_of_entropy(entropy[key], round(math.exp(entropy["max"])))
        size = len(results[next(iter(labels))]["entropy"][key])
        vsd.plots.entropy_histogram(series, bins=size, ax=axes[row, 0]).set_title(title)
        vsd.plots.entropy_cdf(series, ax=axes[row, 1]).set_title(title)
        # most rows of the test set are sure: a linear scale shows nothing else
        axes[row, 0].set_yscale("log")
    # one legend for all, below: inside, six names would cover the curves
    handles, names = axes[0, 1].get_legend_handles_labels()
    for ax in axes.flat:
        ax.get_legend().remove()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{TITLES[setting.task]}: predictive entropy")
    return _save(figure, stem.with_name(f"{stem.name}_entropy_{outside}.png"))


def _losses(stem: Path, task: str, labels: dict[str, str], results: dict[str, Any]) -> Path:
    figure, ax = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    for index, (name, label) in enumerate(labels.items()):
        loss = results[name]["history"]["loss"]
        ax.plot(range(1, len(loss) + 1), loss, label=label, linestyle=("-", "--", ":", "-.")[index % 4])
    ax.set(xlabel="epoch", ylabel="objective per row", yscale="log", title=TITLES[task])
    ax.legend(frameon=False, fontsize="small")
    return _save(figure, stem.with_name(f"{stem.name}_loss.png"))
