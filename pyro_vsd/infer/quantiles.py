"""Quantiles of the entries of a weight."""

import numpy as np
import torch
from torch import Tensor

from pyro_vsd.distributions import StructuredDropout

__all__ = ["weight_quantiles"]

# Enough halvings to reach float64 from a bracket of a few hundred standard deviations.
_HALVINGS = 80


def weight_quantiles(law: StructuredDropout, scale_law: object, q: Tensor) -> Tensor:
    r"""Quantiles of :math:`W_{ij} = \Theta_{ij} z_i \xi_i`: those of the unit's factor times the weight.

    :param law: the posterior without z.
    :param scale_law: q(z), an independent LogNormal, or ``None``.
    :returns: ``(len(q),) + batch_shape + event_shape``.
    """
    theta = law.theta
    q = q.to(theta)
    std = law.unit_variance.sqrt()  # (..., K)
    factors = []
    for levels in (q, 1 - q):  # a negative weight turns the order round
        levels = levels.reshape((-1,) + (1,) * std.dim())
        if scale_law is None:
            factors.append(1 + std * torch.distributions.Normal(0.0, 1.0).icdf(levels))
        else:
            base = scale_law.base_dist  # type: ignore[attr-defined]
            factors.append(_scaled_normal_quantile(std, base.loc, base.scale, levels))
    upward, downward = (law._along(factor) for factor in factors)
    theta = theta.expand(law.batch_shape + law.event_shape)
    return torch.where(theta >= 0, upward, downward) * theta


def _scaled_normal_quantile(std: Tensor, z_loc: Tensor, z_scale: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of ``z ξ`` with ``log z ~ N(z_loc, z_scale²)`` and ``ξ ~ N(1, std²)``, by bisection of the mixture's
    distribution function, log z on 64 Gauss–Hermite nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    z = (z_loc + z_scale * torch.as_tensor(nodes).to(z_loc).reshape((-1,) + (1,) * z_loc.dim())).exp()
    w = torch.as_tensor(weights / weights.sum()).to(z_loc)
    bound = z.amax(0) * (1 + 40 * std)
    low, high = (-bound).expand(levels.shape[:1] + bound.shape), bound.expand(levels.shape[:1] + bound.shape)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        cdf = torch.special.ndtr((middle.unsqueeze(1) / z - 1) / std)  # (q, nodes, ..., K)
        below = torch.tensordot(cdf, w, dims=([1], [0])) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)
