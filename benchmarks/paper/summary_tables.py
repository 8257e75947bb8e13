"""The tables in short, for the page of all benchmarks: VSD and VD here beside the paper's VSD."""

from pathlib import Path

from benchmarks.paper import published, store, tables, uci_results, uci_tables
from benchmarks.paper.registry import SETTINGS
from benchmarks.paper.uci_published import PAPER

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[1] / "README.md"
#: a task's name and the variant of VSD: λ as validation rows of MNIST chose it, the default on FC 750×3
IMAGES = {
    "mnist_400x2": ("MNIST, FC 400×2: λ = 10, 100 epochs", "vsd_t2_e100_l10"),
    "mnist_400x2_60k": ("the same, trained on all 60,000 rows", "vsd_t2_e100_l10"),
    "mnist_750x3": ("MNIST, FC 750×3: λ = 1, 15 epochs", "vsd_t2"),
    "cifar10_convnet": ("CIFAR-10, small network: λ = 10, 24 epochs", "vsd_t2_fc_e24_l10"),
}


def render(folder: Path = store.RESULTS) -> str:
    """A table for regressions, one for classes; nothing without results of both."""
    regressions, classes = _regressions(folder), _classes(folder)
    return "\n\n".join((regressions, classes)) if regressions and classes else ""


def _regressions(folder: Path) -> str:
    results = uci_results.load(folder)
    rows = []
    for data in uci_tables.sets_of(results):
        row = [data.capitalize()]
        for column, metric in enumerate(uci_results.METRICS):
            row.append(uci_tables.number(*PAPER[data]["VSD"][column], data, metric, paper=True))
            for variant in ("vsd_t2", "vd"):
                found = uci_results.values(results, data, variant, "tuned", metric)
                row.append(uci_tables.cell(found, data, metric) if found else "–")
        rows.append(row)
    header = ["set", *(f"{name}: {who}" for name in ("RMSE", "log-likelihood") for who in ("paper", "VSD", "VD"))]
    return tables.lines(header, rows) if rows else ""


def _classes(folder: Path) -> str:
    rows = []
    for task, (name, variant) in IMAGES.items():
        results = tables.by_variant(folder, task)
        if variant not in results:
            continue
        row, paper = [name], SETTINGS[task].variants[variant].paper
        for column, (_, key, scale, digits) in enumerate(tables.MEASURES):
            row.append(f"{published.find(published.CLASSIFICATION[task], paper, column)}")
            row += [
                tables.estimate([scale * run["metrics"][key] for run in results.get(one, [])], digits)
                for one in (variant, tables.twin(variant))
            ]
        rows.append(row)
    header = ["task", *(f"{name}: {who}" for name, *_ in tables.MEASURES for who in ("paper", "VSD", "VD"))]
    return tables.lines(header, rows) if rows else ""
