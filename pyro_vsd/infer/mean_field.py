"""Mean-field posteriors: a Normal on the unconstrained space, sampled at the site itself so that analytic KLs apply."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ExpTransform, IndependentTransform, Transform, identity_transform

__all__ = ["mean_field_posterior", "mean_field_transform"]


def mean_field_transform(support: constraints.Constraint) -> Transform:
    """From the unconstrained space to the support."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    transform: Transform = biject_to(support)
    return transform


def mean_field_posterior(loc: Tensor, scale: Tensor, support: constraints.Constraint, event_dim: int) -> Any:
    """The law of ``transform(Normal(loc, scale))`` as a distribution with ``event_dim`` event dimensions.

    Real sites are Normal and positive ones LogNormal, for which KLs are known.

    >>> import torch
    >>> mean_field_posterior(torch.zeros(3), torch.ones(3), constraints.positive, 0)
    LogNormal()
    """
    transform = mean_field_transform(support)
    if isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    normal = dist.Normal(loc, scale, validate_args=False)
    if transform is identity_transform or transform == identity_transform:
        return normal.to_event(event_dim)
    if isinstance(transform, ExpTransform):
        return dist.LogNormal(loc, scale, validate_args=False).to_event(event_dim)
    # The cache gives log_prob the very number that was drawn: no inverse near the edge of a support.
    law = dist.TransformedDistribution(normal, [transform.with_cache(1)], validate_args=False)
    return law.to_event(event_dim - law.event_dim)
