"""Mean-field posteriors: a Normal on the unconstrained space of a site, and supports as plain types.

The site itself is sampled (not through a ``Delta``, as Pyro's autoguides do), so that closed-form KLs apply; supports
can be saved, so that a guide loads without data.
"""

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

from pyro_vsd._utils import base_constraint

__all__ = ["mean_field_posterior", "mean_field_transform", "support_from_plain", "support_to_plain"]

_ABOVE = (constraints.greater_than, constraints.greater_than_eq)


def mean_field_transform(support: constraints.Constraint) -> Transform:
    """From the unconstrained space to the support."""
    support = base_constraint(support)
    bound = getattr(support, "lower_bound", None)
    if type(support) in _ABOVE and not isinstance(bound, Tensor) and bound == 0:
        return ExpTransform()  # biject_to would add a shift by 0, and hide that the distribution is LogNormal
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
    """The distribution of ``transform(Normal(loc, scale))`` with ``event_dim`` event dimensions.

    Real sites are Normal and positive ones LogNormal, for which KLs are known.

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
    posterior = dist.TransformedDistribution(normal, [transform.with_cache(1)], validate_args=False)
    return posterior.to_event(event_dim - posterior.event_dim)


# Constraints without arguments, by name.
_PLAIN = {
    name: getattr(constraints, name)
    for name in (
        "real",
        "positive",
        "nonnegative",
        "unit_interval",
        "simplex",
        "lower_cholesky",
        "corr_cholesky",
        "positive_definite",
    )
}


def support_to_plain(support: Any) -> Any:
    """A support as strings, numbers and lists, or ``None`` where it cannot be written so.

    >>> support_to_plain(constraints.independent(constraints.positive, 1))
    ['independent', 'positive', 1]
    """
    if isinstance(support, constraints.independent):
        base = support_to_plain(support.base_constraint)
        return None if base is None else ["independent", base, support.reinterpreted_batch_ndims]
    for name, value in _PLAIN.items():
        if type(support) is type(value) and _bounds(support) == _bounds(value):
            return name
    bounds = _bounds(support)
    for name in ("interval", "greater_than", "less_than", "greater_than_eq", "half_open_interval"):
        if type(support) is getattr(constraints, name):
            return None if None in bounds else [name, *bounds]
    return None


def _bounds(support: Any) -> list[float | None]:
    """The numbers that bound a support; ``None`` for a bound that differs from entry to entry."""
    names = [key for key in ("lower_bound", "upper_bound") if hasattr(support, key)]
    return [_number(getattr(support, key)) for key in names]


def support_from_plain(plain: Any) -> constraints.Constraint:
    """The inverse of :func:`support_to_plain`.

    >>> support_from_plain(["interval", 0.0, 2.0])
    Interval(lower_bound=0.0, upper_bound=2.0)
    """
    if isinstance(plain, str):
        return _PLAIN[plain]
    if plain[0] == "independent":
        return constraints.independent(support_from_plain(plain[1]), plain[2])
    found: constraints.Constraint = getattr(constraints, plain[0])(*plain[1:])
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return float(value)
