"""The paper's tables as Markdown, the paper's number beside ours, from the stored results alone."""

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import published, store, uci_results, uci_tables
from benchmarks.paper.registry import SETTINGS
from benchmarks.paper.unit import Setting

__all__ = ["PAGE", "estimate", "page", "rebuild", "render"]

#: the page that holds the tables
PAGE = Path(__file__).resolve().parent / "README.md"
START, END = "<!-- tables: start -->", "<!-- tables: end -->"

Results = dict[str, list[dict[str, Any]]]
Read = Callable[[dict[str, Any]], float]

TITLES = {
    "mnist_400x2": "MNIST, FC 400×2",
    "mnist_400x2_60k": "MNIST, FC 400×2, trained on all 60,000 rows",
    "mnist_750x3": "MNIST, FC 750×3",
    "cifar10_convnet": "CIFAR-10, convolutions of 32 and 64 kernels, hidden layer of 128",
    "lenet5_cifar10_short": "CIFAR-10, LeNet-5, few epochs",
    "alexnet_cifar10_short": "CIFAR-10, AlexNet, few epochs",
    "svhn_convnet": "SVHN, convolutions of 32 and 64 kernels, hidden layer of 128",
}
NAMES = {"fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
# name, scale, digits
MEASURES = (("NLL", "nll", 1, 4), ("error, %", "error", 100, 2), ("ECE", "ece", 1, 4))
DETECTION = (("FPR at 95 % TPR", "fpr_at_95_tpr"), ("detection error", "detection_error"), ("AUROC", "auroc"),
             ("AUPR in", "aupr_in"), ("AUPR out", "aupr_out"))  # fmt: skip


def estimate(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error (n); no error of a single number.

    >>> estimate([1.0, 2.0], 2), estimate([1.0], 1), estimate([], 1)
    ('1.50 ± 0.50 (2)', '1.0 (1)', '–')
    """
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return f"{mean} (1)"
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f} ({len(values)})"


def render(folder: Path = store.RESULTS) -> str:
    """All tables for which there are results."""
    tasks = {task: by_variant(folder, task) for task in SETTINGS if isinstance(SETTINGS[task], Setting)}
    compared = [task for task in tasks if tasks[task] and task in published.CLASSIFICATION]
    parts = [classification(task, tasks[task]) for task in compared]
    parts += [rotation(task, tasks[task]) for task in compared]
    parts += [detection(task, name, tasks[task]) for task in compared for name in SETTINGS[task].ood]
    if tasks["mnist_ablation"]:
        parts.append(ablation(tasks["mnist_ablation"]))
    if tasks["mnist_400x2"]:
        parts.append(norms(tasks["mnist_400x2"]))
    parts.append(searches(folder))
    images = "\n\n".join(part for part in parts if part)
    regression = uci_tables.tables(folder).strip() if uci_results.load(folder) else ""
    titled = [f"## {title}\n\n{text}" for title, text in (("Images", images), ("UCI regression", regression)) if text]
    return "\n\n".join(titled)


def by_variant(folder: Path, task: str) -> Results:
    """Results by variant, in the order of the settings."""
    found: Results = {}
    for result in store.load(folder, task):
        found.setdefault(result["variant"], []).append(result)
    return {name: found[name] for name in SETTINGS[task].variants if name in found}


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    return "\n".join([f"### {title}", "", *([note, ""] if note else []), lines(header, rows)])


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def classification(task: str, results: Results) -> str:
    """NLL, error and ECE."""
    setting: Setting = SETTINGS[task]
    table = published.CLASSIFICATION[task]
    held_out = ["NLL, validation rows"] if setting.num_validation else []
    header = ["method", *(cell for name, *_ in MEASURES for cell in (name, "paper")), *held_out]
    rows = []
    for name, runs in results.items():
        variant = setting.variants[name]
        row = [variant.label]
        for column, (_, key, scale, digits) in enumerate(MEASURES):
            known = published.find(table, variant.paper, column)
            row += [
                estimate([scale * run["metrics"][key] for run in runs], digits),
                "" if known is None else f"{known}",
            ]
        rows.append(row + [estimate([run["validation"]["nll"] for run in runs], 4) for _ in held_out])
    note = (
        f"{setting.epochs} epochs, batches of {setting.batch_size}, {setting.num_samples} samples; "
        "mean ± standard error over seeds (number of seeds)."
    )
    return markdown(TITLES.get(task, task.replace("_", ", ")), header, rows, note)


def rotation(task: str, results: Results) -> str:
    """What reflections change: differences to VD of the same seed."""
    pairs = [(name, base) for name in results if (base := twin(name)) != name and base in results]
    if not pairs:
        return ""
    setting: Setting = SETTINGS[task]
    rows = []
    for name, base in pairs:
        twins = {run["seed"]: run for run in results[base]}
        both = [(run, twins[run["seed"]]) for run in results[name] if run["seed"] in twins]
        if both:
            cells = [
                estimate([scale * (a["metrics"][key] - b["metrics"][key]) for a, b in both], digits)
                for _, key, scale, digits in MEASURES
            ]
            rows.append([f"{setting.variants[name].label} − {setting.variants[base].label}", *cells])
    header = ["difference", *(name for name, *_ in MEASURES)]
    title = f"{TITLES.get(task, task.replace('_', ', '))}: effect of the rotation"
    note = "Paired by seed. A negative difference means that the rotation is better."
    return markdown(title, header, rows, note) if rows else ""


def twin(variant: str) -> str:
    """What the variant without reflections, all else equal, is called; its own name where it has none."""
    return re.sub(r"^vsd_t\d+", "ard_vd", variant)


def detection(task: str, outside: str, results: Results) -> str:
    """Five metrics of the detection of out-of-distribution inputs, by the largest probability."""
    setting: Setting = SETTINGS[task]
    table = published.DETECTION.get((task, outside), {})
    header = ["method", *(name for name, _ in DETECTION)]
    rows = []
    for name, runs in results.items():
        scores = [run["ood"][outside]["max_probability"] for run in runs if outside in run["ood"]]
        if scores:
            label, row = setting.variants[name].label, setting.variants[name].paper
            rows.append([label, *(estimate([one[key] for one in scores], 3) for _, key in DETECTION)])
            if row in table:
                rows.append([f"{row}, paper", *map(str, table[row])])
    title = f"{TITLES.get(task, task.replace('_', ', '))}: {NAMES[outside]} as out-of-distribution inputs"
    note = "Rows are ranked by the largest probability."
    if not table:
        elsewhere = any((SETTINGS[t].data, o) == (setting.data, outside) for t, o in published.DETECTION)
        note += f" The paper has {'this pair for a different network' if elsewhere else 'no such pair of data sets'}."
    return markdown(title, header, rows, note) if rows else ""


def ablation(results: Results) -> str:
    """Variations of VSD on MNIST."""
    setting: Setting = SETTINGS["mnist_ablation"]
    header = ["variant", *(cell for name, *_ in MEASURES for cell in (name, "paper, 750×3"))]
    rows = []
    for name, runs in results.items():
        variant, row = setting.variants[name], [setting.variants[name].label]
        for column, (_, key, scale, digits) in enumerate(MEASURES):
            known = published.find(published.LOW_RANK, variant.paper, column)
            row += [
                estimate([scale * run["metrics"][key] for run in runs], digits),
                "" if known is None else f"{known}",
            ]
        rows.append(row)
    note = f"FC 400×2, {setting.epochs} epochs. The paper's numbers are those of FC 750×3, one seed, 100 epochs."
    return markdown("MNIST: ablations", header, rows, note)


def norms(results: Results) -> str:
    """Spectral norm and stable rank of the last layer."""
    setting: Setting = SETTINGS["mnist_400x2"]
    rows = []
    for name, runs in results.items():
        row, last = [setting.variants[name].label], [list(run["layers"].values())[-1] for run in runs]
        for column, key in enumerate(("spectral_norm", "stable_rank")):
            known = published.find(published.NORMS, setting.variants[name].paper, column)
            row += [estimate([layer[key] for layer in last], 2), "" if known is None else f"{known}"]
        rows.append(row)
    header = ["method", "spectral norm", "paper", "stable rank", "paper"]
    note = "Of the last layer's weight at the posterior mean, FC 400×2. The paper does not say which MLP it measured."
    return markdown("MNIST: spectral norm and stable rank", header, rows, note)


def searches(folder: Path) -> str:
    """Values chosen on validation rows."""
    rows = []
    for path in sorted((folder / "tuning").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("task") in SETTINGS and "trials" in found:
            chosen = ", ".join(f"{name} = {value:g}" for name, value in found["chosen"].items())
            values = [trial["nll"] for trial in found["trials"]]
            spread = f"{min(values):.4f} to {max(values):.4f}"
            rows.append([found["task"], found["variant"], chosen, f"{len(values)}", f"{found['epochs']}", spread])
    if not rows:
        return ""
    header = ["task", "variant", "chosen", "trials", "epochs of a trial", "NLL on validation rows"]
    return markdown("Values chosen by the searches", header, rows, "On 10,000 rows of the training set.")


def page(text: str, tables: str) -> str:
    """The page with its tables replaced."""
    head, rest = text.split(START)
    return f"{head}{START}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def rebuild(path: Path, tables: str) -> None:
    """Puts the tables into a page."""
    store.write(path, page(path.read_text(encoding="utf-8"), tables))
