"""The UCI tables: the paper's columns beside ours, and paired differences."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.paper.settings.uci import SETTINGS
from benchmarks.paper.uci_published import PAPER
from benchmarks.paper.uci_results import METRICS, Results, load, mean_and_error, median, paired, values

__all__ = ["LEGEND", "TITLES", "Pair", "cell", "differences", "number", "sets_of", "standing", "tables"]

TITLES = {"rmse": "RMSE (lower is better)", "log_likelihood": "Test log-likelihood (higher is better)"}
# The differences a reader asks for: variant and list of settings, minus another.
PAIRS = [
    (("vsd_t2", "tuned"), ("vd", "tuned")),
    (("vsd_t2", "default"), ("vd", "default")),
    (("vsd_t2", "weight"), ("vd", "weight")),
    (("vsd_t8", "default"), ("vd", "default")),
    (("vsd_t8", "tuned"), ("vd", "tuned")),
    (("vsd_t8", "default"), ("vsd_t2", "default")),
    (("vsd_t8", "tuned"), ("vsd_t2", "tuned")),
    (("vsd_t2", "weight"), ("vsd_t2", "unit")),
    (("vsd_t2", "tuned"), ("vsd_t2", "default")),
    (("vsd_t8", "tuned"), ("vsd_t8", "default")),
    (("vsd_hierarchical", "tuned"), ("vsd_t2", "tuned")),
    (("vsd_fc", "tuned"), ("vsd_t2", "tuned")),
    (("vsd_low_rank", "tuned"), ("vsd_t2", "tuned")),
    (("vsd_t2", "tuned"), ("mc_dropout", "tuned")),
    (("vsd_t2", "tuned"), ("map", "tuned")),
    (("vsd_t2", "tuned"), ("bbb", "tuned")),
    (("vsd_t2", "tuned"), ("deep_ensemble", "tuned")),
    (("vsd_t2_again", "tuned"), ("vd_again", "tuned")),
    (("vsd_t2_again", "default"), ("vd_again", "default")),
    (("vsd_t2_again", "tuned"), ("vsd_t2", "tuned")),
    (("vsd_t2_third", "tuned"), ("vd_third", "tuned")),
    (("vsd_t2_third", "default"), ("vd_third", "default")),
    (("vsd_t2_third", "tuned"), ("vsd_t2_again", "tuned")),
    (("vsd_t2_svi", "default"), ("vsd_t2", "default")),
]
#: of all sets
VARIANTS = {name: kind for setting in SETTINGS for name, kind in setting.variants.items()}
#: endings of variants
ROUNDS = {"": "first", "_again": "second", "_third": "third"}
WORDS = {"tuned": "tuned", "default": "default λ", "weight": "KL per weight", "unit": "KL per unit"}


def standing(results: Results, variant: str = "vsd_t2", last: str = "first") -> dict[str, dict[str, bool]]:
    """Whether ours is within one standard error, the paper's, of the paper's VSD, or better.

    Compared as the paper prints, with two decimals. Our own error does not count: a single bad split would make it,
    and with it the tolerance, large.

    :param last: the last of the rounds that count; of each set, the last there is.
    """
    suffixes = list(ROUNDS)[list(ROUNDS.values()).index(last) :: -1]
    out: dict[str, dict[str, bool]] = {}
    for data, columns in PAPER.items():
        for metric, (mean, error) in zip(METRICS, columns["VSD"], strict=True):
            rounds = [values(results, data, variant + suffix, "tuned", metric) for suffix in suffixes]
            ours = [found for found in rounds if found]
            if ours:
                value = round(mean_and_error(ours[0])[0], 2)
                gap = value - mean if metric == "rmse" else mean - value
                out.setdefault(data, {})[metric] = gap <= error + 1e-9
    return out


def tables(results_folder: str | Path) -> str:
    """All UCI tables as Markdown; what was not run is left out."""
    results = load(results_folder)
    if not results:
        return "No UCI results.\n"
    parts = [READING, ""]
    for column, metric in enumerate(METRICS):
        parts += [f"### {TITLES[metric]}", "", *_main(results, metric, column), ""]
    parts += [*_standing_lines(results), ""]
    parts += ["### Test log-likelihood: the median over splits and seeds", "", MEDIAN_TEXT, "", *_medians(results), ""]
    parts += ["### Coverage of 95 % intervals", "", *_coverage(results), ""]
    parts += ["### Paired differences", "", LEGEND, ""]
    for metric in METRICS:
        parts += [f"**{TITLES[metric]}**", "", *differences(results, metric, PAIRS, _words), ""]
    parts += ["### Chosen λ", "", *_choices(results), ""]
    return "\n".join(parts)


READING = (
    "Mean over splits and seeds ± standard error over the 20 splits, which share rows. In brackets: the number of\n"
    "runs; 20 is one seed, 40 are two. *Default λ* is 1 per unit. *KL per unit* and *KL per weight* are the best λ of\n"
    "that kind, chosen for each split. *Tuned* is the better of both kinds for each split. All choices use held-out\n"
    "training rows."
)
MEDIAN_TEXT = (
    "σ is chosen on few held-out rows. A single split with a far too small σ can dominate the mean above, but not the\n"
    "median."
)
LEGEND = (
    "Mean over splits and seeds ± half of a 95 % interval over the 20 splits. In brackets: the number of differences;\n"
    "20 is one seed, 40 are two. **Bold** means that the interval excludes zero. Among a hundred intervals a few do\n"
    "so by chance. Splits share rows, so the intervals are somewhat too narrow."
)


def sets_of(results: Results) -> list[str]:
    found = {data for data, _, _ in results}
    return [setting.data for setting in SETTINGS if setting.data in found]


def _rows(results: Results) -> Iterable[tuple[str, str, str, str | None]]:
    """Rows of the main tables: variant, list of settings, label, the paper's column."""
    for variant, kind in VARIANTS.items():
        present = [result for (_, name, _), result in results.items() if name == variant]
        if not present:
            continue
        groups = [name for name in ("default", "unit", "weight") if name in present[0]["groups"]]
        yield variant, "tuned", kind.label + (", tuned" if groups else ""), kind.paper
        if variant in [one + suffix for one in ("vsd_t2", "vd") for suffix in ROUNDS]:
            for group in groups:
                yield variant, group, f"{kind.label}, {WORDS[group]}", None


def _main(results: Results, metric: str, column: int) -> list[str]:
    sets = sets_of(results)
    lines = _header(["method", ""], sets)
    for variant, group, label, paper in _rows(results):
        if paper is not None:
            cells = [number(*PAPER[s][paper][column], s, metric, paper=True) for s in sets]
            lines.append(f"| {label} | paper | " + " | ".join(cells) + " |")
        cells = []
        for data in sets:
            found = values(results, data, variant, group, metric)
            cells.append(cell(found, data, metric) if found else "")
        lines.append(f"| {label} | ours | " + " | ".join(cells) + " |")
    return lines


def _header(first: list[str], sets: list[str]) -> list[str]:
    cells = first + [name.capitalize() for name in sets]
    return ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]


def cell(found: dict[int, list[float]], data: str, metric: str) -> str:
    """Mean ± standard error (number of runs)."""
    mean, error, count = mean_and_error(found)
    return f"{number(mean, error, data, metric)} ({count})"


def number(mean: float, error: float, data: str, metric: str, paper: bool = False) -> str:
    digits = 2 if paper else {"naval": 5, "kin8nm": 4}.get(data, 3) if metric == "rmse" else 3
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _standing_lines(results: Results) -> list[str]:
    lines = []
    present = {variant for _, variant, _ in results}
    for suffix, word in ROUNDS.items():
        if f"vsd_t2{suffix}" not in present:
            continue
        found = standing(results, last=word)
        words = f"{word} round" + (" where there is one" if suffix else "")
        for metric, name in zip(METRICS, ("RMSE", "log-likelihood"), strict=True):
            good, bad = ([data for data, flags in found.items() if flags[metric] is value] for value in (True, False))
            missed = f"; not on {', '.join(sorted(bad))}." if bad else "."
            lines.append(
                f"- VSD (T = 2, tuned, {words}) within the paper's standard error of the paper's VSD or better in "
                f"{name}, to the paper's two decimals: {len(good)} of {len(found)} sets{missed}"
            )
    return lines


def _coverage(results: Results) -> list[str]:
    return _by_method(results, "coverage", lambda found: f"{100 * mean_and_error(found)[0]:.1f} %")


def _medians(results: Results) -> list[str]:
    return _by_method(results, "log_likelihood", lambda found: f"{median(found):.3f}")


def _by_method(results: Results, metric: str, text: Callable[[dict[int, list[float]]], str]) -> list[str]:
    """A row a method, tuned; what a cell says is made of the numbers by seed."""
    sets = sets_of(results)
    lines = _header(["method"], sets)
    for variant, group, label, _ in _rows(results):
        if group == "tuned":
            found = [values(results, data, variant, group, metric) for data in sets]
            lines.append(f"| {label} | " + " | ".join(text(v) if v else "" for v in found) + " |")
    return lines


Pair = tuple[tuple[str, str], tuple[str, str]]


def differences(results: Results, metric: str, pairs: list[Pair], words: Callable[[Pair], str]) -> list[str]:
    """A table of paired differences, the sets in columns; pairs without results are left out.

    :param pairs: variant and list of settings, minus another.
    :param words: what a row is called.
    """
    sets = sets_of(results)
    lines = _header(["difference"], sets)
    for pair in pairs:
        found = [paired(results, data, *pair, metric) for data in sets]
        if not any(found):
            continue
        cells = []
        for data, value in zip(sets, found, strict=True):
            if value is None:
                cells.append("")
                continue
            mean, half, count = value
            digits = {"naval": 6, "kin8nm": 4}.get(data, 3) if metric == "rmse" else 3
            text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
            cells.append(f"**{text}** ({count})" if abs(mean) > half else f"{text} ({count})")
        lines.append(f"| {words(pair)} | " + " | ".join(cells) + " |")
    return lines


def _words(pair: Pair) -> str:
    labels = {name: kind.label for name, kind in VARIANTS.items()}
    return " − ".join(f"{labels[variant]} [{WORDS[group]}]" for variant, group in pair)


def _choices(results: Results) -> list[str]:
    """How often each setting won on held-out rows."""
    lines = ["| method | set | settings chosen, splits of all seeds |", "|---|---|---|"]
    for variant, _, label, _ in (row for row in _rows(results) if row[1] == "tuned"):
        for data in sets_of(results):
            counts: dict[str, int] = {}
            for (name, kind, _), result in sorted(results.items()):
                if name == data and kind == variant:
                    for index in result["groups"]["tuned"]["chosen"]:
                        text = _setting_text(result["candidates"][index])
                        counts[text] = counts.get(text, 0) + 1
            if counts:
                words = ", ".join(f"{text}: {count}" for text, count in sorted(counts.items()))
                lines.append(f"| {label} | {data.capitalize()} | {words} |")
    return lines


def _setting_text(candidate: dict[str, float]) -> str:
    words = []
    if "kl_weight" in candidate:
        scale = {1.0: " per weight", 0.0: " per unit"}.get(candidate.get("per_weight", -1.0), "")
        words.append(f"λ {candidate['kl_weight']:g}{scale}")
    words += [f"p {candidate['rate']:g}"] if "rate" in candidate else []
    words += [f"precision {candidate['precision']:g}"] if candidate.get("precision") is not None else []
    return " ".join(words)
