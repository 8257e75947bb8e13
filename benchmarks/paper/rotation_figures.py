"""The figures of the page "Evidence on correlations", from the stored results."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.paper import store, uci_results
from benchmarks.paper.noise_study import REFLECTIONS
from benchmarks.paper.rotation_tables import NAMES, UCI_SETTINGS, Layer, layers

__all__ = ["draw"]

_PLACES = {1: "first hidden layer", 2: "second hidden layer"}
_SHOWN = ("t1", "t2", "t5", "t10", "t20", "t0_closed", "t2_closed", "t10_closed", "t20_closed")


def draw(out: Path, folder: Path = store.RESULTS) -> list[Path]:
    """Draws what there are results for; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    found = [layer for layer in layers(folder) if layer.group == "default"]
    made = [_shares(out / "rotation_shares.png", found)] if any(layer.variant == "t0" for layer in found) else []
    results = uci_results.load(folder, UCI_SETTINGS)
    return [*made, _scores(out / "rotation_scores.png", results)] if results else made


def _shares(path: Path, found: list[Layer]) -> Path:
    """What T reflections can reach beside what training finds from random vectors, for each hidden layer."""
    by = {(layer.data, layer.number, layer.variant): layer for layer in found}
    places = [(data, number) for data, number, variant in by if variant == "t0" and number > 0]
    figure, axes = plt.subplots(1, len(places), figsize=(2.3 * len(places), 3.4), layout="constrained", squeeze=False)
    for ax, (data, number) in zip(axes.flat, places, strict=True):
        reach = by[data, number, "t0"]
        _line(
            ax,
            [(T, reach.share(f"reach{T}")) for T in REFLECTIONS if f"reach{T}" in reach.values],
            "o-",
            "within reach",
        )
        for kind, words, look in (("", "found in training", "s--"), ("_closed", "found, closed form halfway", "^:")):
            there = {T: by.get((data, number, f"t{T}{kind}")) for T in REFLECTIONS}
            _line(ax, [(T, layer.share("sized")) for T, layer in there.items() if layer], look, words)
        title = NAMES.get(data, data.capitalize())
        ax.set(title=f"{title}\n{_PLACES[number]}", xlabel="reflections T", xscale="log", ylim=(-0.1, 1.05))
        ax.set_xticks(REFLECTIONS, [str(T) for T in REFLECTIONS])
        ax.minorticks_off()
        ax.axhline(0, color="#666666", linewidth=0.8)
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("share of the possible gain")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    return _save(figure, path)


def _line(ax: Any, points: list[tuple[int, float]], look: str, label: str) -> None:
    if points:
        ax.plot(*zip(*points, strict=True), look, label=label)


def _scores(path: Path, results: uci_results.Results) -> Path:
    """Differences to T = 0, with their intervals."""
    sets = [setting.data for setting in UCI_SETTINGS if any(data == setting.data for data, _, _ in results)]
    labels = {name: kind.label for name, kind in UCI_SETTINGS[0].variants.items()}
    figure, axes = plt.subplots(
        2, len(sets), figsize=(3.6 * len(sets), 6.2), layout="constrained", sharey=True, squeeze=False
    )
    for row, (metric, name) in enumerate((("rmse", "RMSE"), ("log_likelihood", "log-likelihood"))):
        for ax, data in zip(axes[row], sets, strict=True):
            for group, offset, look, words in (
                ("default", 0.12, "o", "λ = 1 per unit"),
                ("strong", -0.12, "s", "λ = 0.3 per weight"),
            ):
                there = {key: uci_results.paired(results, data, (key, group), ("t0", group), metric) for key in _SHOWN}
                points = [(len(_SHOWN) - i + offset, v) for i, v in enumerate(there.values()) if v is not None]
                if points:
                    y, values = zip(*points, strict=True)
                    means, halves = [v[0] for v in values], [v[1] for v in values]
                    ax.errorbar(means, y, xerr=halves, fmt=look, capsize=2, markersize=4, label=words)
            ax.axvline(0, color="#666666", linewidth=0.8)
            better = "← better" if metric == "rmse" else "better →"
            ax.set(title=data.capitalize(), xlabel=f"{name}, difference to T = 0\n{better}")
            ax.set_yticks(range(len(_SHOWN), 0, -1), [labels[key] for key in _SHOWN])
            ax.set_ylim(0.5, len(_SHOWN) + 0.5)
            ax.grid(axis="x", alpha=0.3)
            if metric == "log_likelihood":  # a single split can take an interval out of all bounds
                low, high = ax.get_xlim()
                ax.set_xlim(max(low, -1.0), min(high, 1.0))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
