"""Vectorised particles: whether a network gives the same in one pass for all of them as in one pass for each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_vsd._utils import evaluation_mode
from pyro_vsd.distributions import LazyWeight
from pyro_vsd.distributions.lazy_weight import ParticleTensor

__all__ = ["why_not_vectorized"]

# In training their statistics would mix particles; evaluation mode would not show it.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Layers round differently in a larger batch, in float32 by far less than this share of the largest density.
TOLERANCE = 1e-3


def why_not_vectorized(
    model: Any, single: Callable[[], tuple[Any, Any]], together: Callable[[], tuple[Any, Any]], num_particles: int
) -> str | None:
    """Why ``vectorize_particles`` would be wrong for this model, or ``None``.

    A layer that counts dimensions from the left (batch norm, pooling, attention, ``softmax(dim=1)``) takes particles
    for examples or examples for channels: most raise, some go on with wrong numbers. So the first and the last
    particle are run again, each alone, and the densities of the observations compared. Once for each objective: four
    passes without gradients, in evaluation mode; the generator is put back. Models with latent sites in plates are
    run, not compared.

    :param single: model trace and guide trace of one particle.
    :param together: the same of all particles in one pass.
    """
    with poutine.block(), torch.no_grad(), evaluation_mode(poutine.unwrap(model)), torch.random.fork_rng(devices=[]):
        single()  # an error here is unrelated to particles
        try:
            with _no_batch_norms():
                model_trace, guide_trace = together()
        except Exception as error:  # whatever a layer raises
            return str(error).split("\n", 1)[0] or type(error).__name__
        found = _densities(model_trace)
        if any(_plated(site) for site in _latent(guide_trace)):
            return None
        for particle in {0, num_particles - 1}:
            replayed = poutine.replay(poutine.unwrap(model), trace=_one(guide_trace, particle))
            arguments = guide_trace.nodes["_INPUT"]
            alone = _densities(poutine.trace(replayed).get_trace(*arguments["args"], **arguments["kwargs"]))
            for name, expected in alone.items():
                value = found[name][particle].reshape(-1)
                expected = expected.reshape(-1)
                if value.shape != expected.shape or not _close(value, expected):
                    return f"the log-likelihood of {name!r} differs from that of each particle alone"
    return None


@contextmanager
def _no_batch_norms() -> Iterator[None]:
    def refuse(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, BATCH_NORMS) and isinstance(inputs[0], ParticleTensor):
            raise ValueError(f"{type(module).__name__} has no statistics of particles")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _latent(trace: Any) -> list[dict[str, Any]]:
    sites = [site for site in trace.nodes.values() if site["type"] == "sample" and not site["is_observed"]]
    return [site for site in sites if not poutine.util.site_is_subsample(site)]


def _plated(site: dict[str, Any]) -> bool:
    return any(frame.name != "num_particles_vectorized" for frame in site["cond_indep_stack"])


def _densities(trace: Any) -> dict[str, Tensor]:
    """Log-densities of the observed sites, particles first where there are some."""
    return {
        name: site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]).as_subclass(Tensor)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _one(trace: Any, particle: int) -> Any:
    """A guide's trace with the values of one particle."""
    chosen = trace.copy()
    for site in _latent(trace):
        value, fn = site["value"], site["fn"]
        if isinstance(value, LazyWeight):
            picked: Any = LazyWeight(value.draw.particle(particle))
        else:
            picked = value[particle].reshape(fn.event_shape)
        chosen.nodes[site["name"]] = {**site, "value": picked}
    return chosen


def _close(value: Tensor, expected: Tensor) -> bool:
    if not bool(expected.isfinite().all()):
        return True  # the loss will say so
    return bool((value - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max()))
