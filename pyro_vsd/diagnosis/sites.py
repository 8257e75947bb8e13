"""What the noise and the mean of each weight are like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_vsd.diagnosis.covariance import best_covariance, best_droprates, best_scales, noise_objective
from pyro_vsd.diagnosis.curvature import curvature_or_reason
from pyro_vsd.diagnosis.rows import Rows, count_rows
from pyro_vsd.infer.parameters import get_parameter
from pyro_vsd.training.data import arguments

__all__ = ["COLLAPSED", "EXPLODED", "measure_gains", "measure_sites"]

# Below, noise of one per cent of what it multiplies: no network feels it. Above, three times what it multiplies:
# nothing comes through.
COLLAPSED, EXPLODED = 1e-4, 10.0


def measure_sites(model: Any, guide: Any) -> dict[str, dict[str, Any]]:
    """Numbers of each weight from its parameters alone, in O(K T²)."""
    starts = _starts(model, guide)
    result = {}
    for name, site in guide.sites.items():
        if site.kind != "weight":
            continue
        noise, theta = guide.noise(name), get_parameter(guide, f"theta.{name}").detach().double()
        alpha, variance = noise.alpha.detach().double().flatten(), noise.variance.detach().double().flatten()
        units = site.event_shape[site.noise_dim]
        levels = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=alpha.dtype, device=alpha.device)
        start = starts.get(name)
        result[name] = {
            "K": units,
            "Q": theta.numel() // alpha.numel(),
            "T": noise.vectors.shape[-2],
            "alpha": dict(zip(("min", "5%", "median", "95%", "max"), alpha.quantile(levels).tolist(), strict=True)),
            "collapsed": float((alpha < COLLAPSED).double().mean()),
            "exploded": float((alpha > EXPLODED).double().mean()),
            "alpha_spread": float(alpha.log().std(correction=0)),
            # ‖Σ‖² is that of α, which a rotation keeps; what is not on the diagonal is off it
            "correlated": max(0.0, 1 - float(variance.square().sum() / alpha.square().sum())),
            "theta_moved": None if start is None else float((theta - start).norm() / start.norm()),
            "theta_growth": None if start is None else float(theta.norm() / start.norm()),
            "trainable": get_parameter(guide, f"theta.{name}").requires_grad,
        }
    return result


def _starts(model: Any, guide: Any) -> dict[str, Tensor]:
    """Where Θ started, for networks that say so; a zero start has no scale to compare with."""
    if not hasattr(model, "latent_sites") or guide.init_loc_fn is not None:
        return {}
    starts = {}
    for name, prior in model.latent_sites().items():
        init = getattr(prior, "init", None)
        if init is not None and bool((init != 0).any()):
            starts[name] = init.detach().double()
    return starts


def measure_gains(
    model: Any, guide: Any, rows: Rows, strengths: dict[str, float], seed: int, at_most: int, largest: int | None,
    max_units: int, device: torch.device,
) -> tuple[dict[str, dict[str, float | None]], dict[str, str]]:  # fmt: skip
    """For each weight F at its noise ``now``, ``rescaled`` to the best size of each unit, at the ``best_diagonal`` and
    at the ``best`` covariance; and reasons for those left out.

    ``found`` is the share of the way from the best independent noise to the best of all that the correlations have
    gone: negative where they are worse than none, ``None`` where there is nothing to find. ``size`` is the median over
    units of the variance over its best.
    """
    totals: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    seen = 0
    for batch in rows.batches(seed, at_most, largest):
        args, kwargs = arguments(batch, device)
        matrices, reasons = curvature_or_reason(model, guide, args, kwargs, max_units)
        size = count_rows(batch)
        seen += size
        for name, matrix in matrices.items():
            totals[name] = totals.get(name, torch.zeros_like(matrix)) + size * matrix
    result = {}
    for name, total in totals.items():
        A, strength = total / seen, strengths[name]
        covariance = guide.noise(name).covariance_matrix.detach().double()
        now = noise_objective(covariance, A, strength)
        own = best_scales(covariance, A, strength)
        rescaled = noise_objective(own, A, strength)
        diagonal = noise_objective(best_droprates(A, strength), A, strength)
        full = noise_objective(best_covariance(A, strength), A, strength)
        # below a hundredth of a nat for each unit there is nothing worth finding
        found = (diagonal - rescaled) / (diagonal - full) if diagonal - full > 0.01 * strength * len(A) else None
        ratio = float((covariance.diagonal() / own.diagonal()).median())
        result[name] = {
            "now": now, "rescaled": rescaled, "best_diagonal": diagonal, "best": full, "found": found, "size": ratio,
        }  # fmt: skip
    return result, reasons
