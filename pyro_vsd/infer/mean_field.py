"""Mean-field posteriors: a Normal on the unconstrained space, sampled at the site itself so that analytic KLs apply."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import (
    ComposeTransform,
    ExpTransform,
    IndependentTransform,
    Transform,
    identity_transform,
)

__all__ = ["mean_field_posterior", "mean_field_transform"]

_ABOVE = (constraints.greater_than, constraints.greater_than_eq)


def mean_field_transform(support: constraints.Constraint) -> Transform:
    """From the unconstrained space to the support."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    bound = getattr(support, "lower_bound", None)
    if type(support) in _ABOVE and not isinstance(bound, Tensor) and bound == 0:
        return ExpTransform()  # biject_to would add a shift by 0, and hide that the law is LogNormal
    if support is constraints.lower_cholesky:
        return _VectorToCholesky()
    if support is constraints.positive_definite:
        return ComposeTransform([_VectorToCholesky(), _CholeskyToMatrix()])
    transform: Transform = biject_to(support)
    return transform


class _VectorToCholesky(Transform):
    """``n (n + 1) / 2`` numbers row by row as a lower triangle, its diagonal in logs. Torch's own map for this support
    starts from a full matrix, and so is no bijection."""

    domain, codomain = constraints.real_vector, constraints.lower_cholesky
    bijective = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _VectorToCholesky)

    def _call(self, x: Tensor) -> Tensor:
        n = self.forward_shape(x.shape[-1:])[-1]
        rows, columns = torch.tril_indices(n, n, device=x.device)
        y = x.new_zeros(x.shape[:-1] + (n, n))
        y[..., rows, columns] = x
        return y.tril(-1) + y.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def _inverse(self, y: Tensor) -> Tensor:
        y = y.tril(-1) + y.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        rows, columns = torch.tril_indices(y.shape[-1], y.shape[-1], device=y.device)
        return y[..., rows, columns]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def forward_shape(self, shape: Any) -> Any:
        n = (math.isqrt(8 * shape[-1] + 1) - 1) // 2
        return (*shape[:-1], n, n)

    def inverse_shape(self, shape: Any) -> Any:
        return (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)


class _CholeskyToMatrix(Transform):
    """``L`` to ``L Lᵀ``."""

    domain, codomain = constraints.lower_cholesky, constraints.positive_definite
    bijective = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CholeskyToMatrix)

    def _call(self, x: Tensor) -> Tensor:
        return x @ x.mT

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.linalg.cholesky(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[-1]
        powers = torch.arange(n, 0, -1, dtype=x.dtype, device=x.device)
        return n * math.log(2) + (powers * x.diagonal(dim1=-2, dim2=-1).log()).sum(-1)


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
