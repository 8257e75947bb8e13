"""What the options of VSD do: one changed at a time, all else as the library's defaults; on three UCI sets.

Nothing is chosen here but the observation noise, on held-out rows. Each list of candidates holds one, so that all are
reported.
"""

from typing import Any

from benchmarks.paper.settings.uci import FOLDS, STEPS, UCISetting, UCIVariant, kl_list

__all__ = ["DEFAULT", "SETTINGS"]

_T = 2
_ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def _alone(label: str, lr: float | None = None, **options: Any) -> UCIVariant:
    return UCIVariant(label, "VSD", {"default": kl_list("unit", 1.0)}, {"T": _T, **options}, lr=lr)


def _lists() -> dict[str, list[dict[str, float]]]:
    unit = {f"λ = {w:g} per unit": kl_list("unit", w) for w in (0.1, 0.3, 1.0, 3.0, 10.0)}
    weight = {f"λ = {w:g} per weight": kl_list("weight", w) for w in (0.01, 0.1, 0.3, 1.0)}
    return unit | weight


VARIANTS = {
    "lambda": UCIVariant("λ", "VSD", _lists(), {"T": _T}),
    "alpha": UCIVariant(
        "α",
        "VSD",
        {f"α = {a:g} at the start": [kl_list("unit", 1.0)[0] | {"init_alpha": a}] for a in _ALPHAS},
        {"T": _T},
    ),
    "lr_0.03": _alone("learning rate 0.03", lr=3e-2),
    "lr_0.003": _alone("learning rate 0.003", lr=3e-3),
    "lr_0.001": _alone("learning rate 0.001", lr=1e-3),
    "spread_0": _alone("spread of log α 0", spread=0.0),
    "spread_2": _alone("spread of log α 2", spread=2.0),
    "scale_01": _alone("vectors of scale 0.1", scale=0.1),
}
#: the variant and list of settings that is the default
DEFAULT = ("lambda", "λ = 1 per unit")

SETTINGS = [
    UCISetting(f"options_{name}", name, VARIANTS, STEPS[name], folds=FOLDS.get(name, 1))
    for name in ("yacht", "boston", "concrete")
]
