"""The tables of the page "Evidence on correlations", from the stored results."""

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper import store, uci_results, uci_tables
from benchmarks.paper.noise_study import REFLECTIONS
from benchmarks.paper.settings.rotation import SETTINGS
from benchmarks.paper.settings.uci import UCISetting
from benchmarks.paper.tables import MEASURES, by_variant, estimate, markdown

__all__ = ["NAMES", "PAGE", "UCI_SETTINGS", "Layer", "layers", "render"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rotation_evidence.md"

#: training rows: the KL counts once for all of them
ROWS = {"yacht": 277, "boston": 455, "concrete": 927, "mnist": 50_000}
NAMES = {"mnist": "MNIST 400×2"}
LISTS = {"default": "λ = 1 per unit, the default", "strong": "λ = 0.3 per weight, strong noise on inputs"}
_LAYERS = ("inputs", "first hidden", "second hidden")
_BASE = [("t1", "t0"), ("t2", "t0"), ("t5", "t0"), ("t10", "t0"), ("t20", "t0"), ("t10", "t2"), ("t20", "t2"),
         ("t20", "t10")]  # fmt: skip
_MORE = [
    ("t0_closed", "t0"),
    ("t2_closed", "t2"),
    ("t10_closed", "t10"),
    ("t20_closed", "t20"),
    ("t2_draws2", "t2"),
    ("t2_mirrored", "t2_draws2"),
]
UCI_SETTINGS = [setting for setting in SETTINGS if isinstance(setting, UCISetting)]


class Layer(NamedTuple):
    """F of a layer's noise, of one network each: lists of equal length by kind of noise."""

    data: str
    variant: str
    group: str
    number: int
    values: dict[str, list[float]]

    def gain(self) -> float:
        """What the best noise would gain over the best independent noise, in nats; the mean over networks."""
        return statistics.fmean(self.values["independent"]) - statistics.fmean(self.values["best"])

    def share(self, kind: str) -> float:
        """Which part of that gain this kind of noise has; sums over networks, so that small gains count little."""
        return (statistics.fmean(self.values["independent"]) - statistics.fmean(self.values[kind])) / self.gain()


def layers(folder: Path = store.RESULTS) -> list[Layer]:
    """All that was measured of noise, seeds and splits together."""
    found: dict[tuple[str, str, str, int], dict[str, list[float]]] = {}
    for setting in SETTINGS:
        for result in store.load(folder, setting.task):
            for group, number, values in _measured(result["noise"]):
                into = found.setdefault((setting.data, result["variant"], group, number), {})
                for kind, numbers in values.items():
                    into.setdefault(kind, []).extend(numbers)
    return [Layer(*key, values) for key, values in found.items()]


def _measured(noise: dict[str, Any]) -> list[tuple[str, int, dict[str, list[float]]]]:
    if "default" not in noise:  # a classifier: one network, layers by the names of their weights
        one = [{kind: [value] for kind, value in layer.items()} for layer in noise.values()]
        return [("default", number, values) for number, values in enumerate(one)]
    return [(group, i, layer) for group, found in noise.items() for i, layer in enumerate(found.values())]


def render(folder: Path = store.RESULTS) -> str:
    """All tables for which there are results."""
    found = layers(folder)
    parts = [_possible(found), _found(found)]
    results = uci_results.load(folder, UCI_SETTINGS)
    labels = {name: kind.label for name, kind in UCI_SETTINGS[0].variants.items()}
    if results:
        parts.append(f"### Differences of scores\n\n{uci_tables.LEGEND}")
    for metric in uci_results.METRICS if results else ():
        for group, words in LISTS.items():
            pairs = [((one, group), (other, group)) for one, other in _BASE + _MORE]
            lines = uci_tables.differences(results, metric, pairs, lambda pair: " − ".join(labels[v] for v, _ in pair))
            if len(lines) > 2:
                parts.append("\n".join([f"#### {uci_tables.TITLES[metric]}: {words}", "", *lines]))
    parts.append(_mnist(folder))
    return "\n\n".join(part for part in parts if part)


def _possible(found: list[Layer]) -> str:
    rows = []
    for layer in found:
        if layer.variant == "t0" and layer.group == "default":
            cells = [f"{layer.share(f'reach{T}'):.0%}" if f"reach{T}" in layer.values else "" for T in REFLECTIONS]
            per_row = 1000 * layer.gain() / ROWS[layer.data]
            name = NAMES.get(layer.data, layer.data.capitalize())
            rows.append([name, _LAYERS[layer.number], f"{layer.gain():.1f}", f"{per_row:.2f}", *cells])
    header = ["network", "noise on", "gain, nats", "in 1/1000 nat per row", *(f"T = {T}" for T in REFLECTIONS)]
    return markdown("Upper bound on the gain, and the share that T reflections can reach", header, rows) if rows else ""


def _found(found: list[Layer]) -> str:
    """Shares of the gain that the trained correlations have, and what the sizes of the noise leave."""
    variants = ["t0", "t1", "t2", "t5", "t10", "t20", "t0_closed", "t2_closed", "t10_closed", "t20_closed"]
    by_place: dict[tuple[str, int], dict[str, Layer]] = {}
    for layer in found:
        if layer.group == "default":
            by_place.setdefault((layer.data, layer.number), {})[layer.variant] = layer
    names = [name.replace("t", "T = ", 1).replace("_closed", ", closed") for name in variants]
    shares, left = [], []
    for (data, number), there in by_place.items():
        place = [NAMES.get(data, data.capitalize()), _LAYERS[number]]
        shares.append([*place, *(f"{there[v].share('sized'):.0%}" if v in there else "" for v in variants)])
        left.append([*place, *(f"{_lag(there[v]):.2f}" if v in there else "" for v in variants)])
    if not shares:
        return ""
    title = "Share of the gain found in training: correlations as trained, noise variances at their best"
    return "\n\n".join([
        markdown(title, ["network", "noise on", *names], shares),
        markdown("Gain left by the noise variances, 1/1000 nat per row", ["network", "noise on", *names], left),
    ])  # fmt: skip


def _lag(layer: Layer) -> float:
    """What the best sizes would gain over the trained ones, in 1/1000 nat per row."""
    trained, sized = (statistics.fmean(layer.values[kind]) for kind in ("trained", "sized"))
    return 1000 * (trained - sized) / ROWS[layer.data]


def _mnist(folder: Path) -> str:
    results = by_variant(folder, "rotation_mnist")
    setting = next(setting for setting in SETTINGS if setting.task == "rotation_mnist")
    rows = [
        [setting.variants[name].label]
        + [estimate([scale * run["metrics"][key] for run in runs], digits) for _, key, scale, digits in MEASURES]
        for name, runs in results.items()
    ]
    note = f"FC 400×2, {setting.epochs} epochs, {setting.num_samples} samples."
    return markdown("MNIST", ["noise", *(name for name, *_ in MEASURES)], rows, note) if rows else ""
