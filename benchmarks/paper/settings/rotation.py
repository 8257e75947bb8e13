"""Do correlations help? More reflections, a start from the closed form, mirrored draws; on MNIST and three UCI sets.

UCI: λ is fixed, at the library's default and at one that makes strong noise (0.3 per weight); held-out rows choose the
observation noise alone. ``t*_closed`` sets noise variances and vectors halfway to the best for the network then.
``t2_mirrored`` draws twice for each row of a batch, ξ and 2 − ξ; ``t2_draws2``, of the same cost, independently.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.paper.settings.mnist import mnist_setting
from benchmarks.paper.settings.uci import FOLDS, STEPS, UCISetting, UCIVariant, kl_list
from benchmarks.paper.unit import Variant

__all__ = ["SETTINGS", "RotationVariant"]


@dataclass(frozen=True)
class RotationVariant(Variant):
    """:param closed: halfway, noise variances and vectors are set to the best there are."""

    closed: bool = False


def _uci(label: str, **options: Any) -> UCIVariant:
    lists = {"default": kl_list("unit", 1.0), "strong": kl_list("weight", 0.3)}
    return UCIVariant(label, "Studied", lists, options)


UCI = {f"t{T}": _uci(f"T = {T}", T=T) for T in (0, 1, 2, 5, 10, 20)}
UCI |= {f"t{T}_closed": _uci(f"T = {T}, closed form halfway", T=T, closed=True) for T in (0, 2, 10, 20)}
UCI |= {
    "t2_draws2": _uci("T = 2, two draws", T=2, draws=2),
    "t2_mirrored": _uci("T = 2, two mirrored draws", T=2, draws=2, mirrored=True),
}


def _mnist(T: int, closed: bool = False) -> RotationVariant:
    label = f"T = {T}" + (", closed form halfway" if closed else "")
    return RotationVariant("vsd", {"num_reflections": T}, label, closed=closed)


MNIST = {f"t{T}": _mnist(T) for T in (0, 1, 2, 5, 10, 20)} | {f"t{T}_closed": _mnist(T, True) for T in (0, 10, 20)}
SETTINGS: list[Any] = [
    UCISetting(f"rotation_{name}", name, UCI, STEPS[name], folds=FOLDS.get(name, 1))
    for name in ("yacht", "boston", "concrete")
]
SETTINGS.append(
    mnist_setting(
        "rotation_mnist",
        [784, 400, 400, 10],
        MNIST,
        epochs=10,
        seeds=(0, 1),
        module="benchmarks.paper.rotation_images",
    )
)
