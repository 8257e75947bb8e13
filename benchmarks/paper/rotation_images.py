"""Do correlations help in a classifier? Also training from the closed form, and how much of the gain was found."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.paper import images
from benchmarks.paper.data import Parts
from benchmarks.paper.noise_study import compared, reach
from benchmarks.paper.reflections import best_reflections
from benchmarks.paper.unit import Unit
from pyro_vsd.baselines import Method
from pyro_vsd.datasets import Data
from pyro_vsd.diagnosis import curvature

__all__ = ["run", "units"]

units = images.units

# Training rows that a curvature is measured on, and how many at once.
_ROWS, _BATCH = 5_000, 500
# Steps of the search that a start from the closed form takes.
_POLISH = 10


def run(unit: Unit, data: Path | None, work: Path, **how: Any) -> dict[str, Any]:
    """The unit's result with ``noise``, the comparison of each layer's."""
    variant = unit.setting.variants[unit.variant]
    epochs = variant.epochs or unit.setting.epochs

    def halfway(epoch: int, method: Method, parts: Parts) -> None:
        if variant.closed and epoch + 1 == epochs // 2:
            set_noise(method, parts.train)

    def more(method: Method, parts: Parts) -> dict[str, Any]:
        return {"noise": noise_of(method, parts.train)}

    # a few steps on random images say nothing of the noise
    hooks = {} if how.get("smoke") else {"callback": halfway, "more": more}
    return images.run(unit, data, work, **hooks, **how)


def curvatures(method: Any, data: Data) -> dict[str, torch.Tensor]:
    """``{site: A}`` from the first rows of the training set, for the whole of it."""
    total: dict[str, torch.Tensor] = {}
    num_batches = min(_ROWS, len(data)) // _BATCH
    for k in range(num_batches):
        rows = slice(k * _BATCH, (k + 1) * _BATCH)
        for site, A in curvature(method.model, method.guide, data.x[rows], data.y[rows], max_units=1024).items():
            total[site] = total.get(site, 0) + A / num_batches
    return total


@torch.no_grad()
def set_noise(method: Any, data: Data) -> None:
    """Droprates and vectors of every weight at the best there are for the network as it is."""
    for site, A in curvatures(method, data).items():
        log_alpha, vectors = (method.guide.get_parameter(f"{role}.{site}") for role in ("log_alpha", "vectors"))
        values = best_reflections(A, 1.0, len(vectors), polish=_POLISH)
        for parameter, value in zip((log_alpha, vectors), values, strict=True):
            parameter.copy_(value)
            method.optimizer.state.pop(parameter, None)  # moments of the values before


def noise_of(method: Any, data: Data) -> dict[str, dict[str, float]]:
    """For each weight, F of its noise and of the best; the reach of T reflections where there are none."""
    out = {}
    for site, A in curvatures(method, data).items():
        log_alpha, vectors = (
            method.guide.get_parameter(f"{role}.{site}").detach() for role in ("log_alpha", "vectors")
        )
        out[site] = compared(A, log_alpha, vectors, 1.0)
        if len(vectors) == 0:
            out[site] |= {key: value[0] for key, value in reach(A[None], 1.0).items()}
    return out
