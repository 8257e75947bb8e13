"""The tables of the page "Evidence for the options", from the stored results."""

from pathlib import Path

from benchmarks.paper import store, uci_results, uci_tables
from benchmarks.paper.settings.options import DEFAULT, SETTINGS

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options_evidence.md"


def render(folder: Path = store.RESULTS) -> str:
    """Differences to the defaults in both metrics; nothing without results."""
    results = uci_results.load(folder, SETTINGS)
    variants = SETTINGS[0].variants

    def words(pair: uci_tables.Pair) -> str:
        (name, group), _ = pair
        return group if len(variants[name].groups) > 1 else variants[name].label

    every = [(name, group) for name, kind in variants.items() for group in kind.groups]
    pairs = [(one, DEFAULT) for one in every if one not in (DEFAULT, ("alpha", "α = 0.2 at the start"))]
    parts = []
    for metric in uci_results.METRICS if results else ():
        lines = uci_tables.differences(results, metric, pairs, words)
        parts.append("\n".join([f"**{uci_tables.TITLES[metric]}**", "", *lines]))
    return "\n\n".join([f"Differences to the defaults.\n{uci_tables.LEGEND}", *parts] if parts else [])
