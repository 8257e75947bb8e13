"""Dense twins: each quantity of the library once more, in the plainest way, with ``K × K`` matrices and loops.

Tests compare values and gradients with these; everything here is differentiable by autograd.
"""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

__all__ = [
    "as_columns",
    "column_entropy",
    "column_kl",
    "column_log_prob",
    "columns",
    "covariance",
    "empirical_bayes_kl",
    "noise",
    "reflections",
    "structured_noise",
    "unit_shaped",
]


def reflections(vectors: Tensor) -> Tensor:
    """``U = H_T ... H_1`` of ``vectors (..., T, K)`` as a ``(..., K, K)`` matrix; a zero vector is no reflection."""
    T, K = vectors.shape[-2:]
    eye = torch.eye(K, dtype=vectors.dtype).expand(vectors.shape[:-2] + (K, K))
    U = eye
    for t in range(T):
        v = vectors[..., t, :]
        square = v.square().sum(-1)[..., None, None]
        outer = v.unsqueeze(-1) * v.unsqueeze(-2)
        H = eye - 2 * torch.where(square > 0, outer / torch.where(square > 0, square, 1.0), 0.0)
        U = H @ U
    return U


def covariance(alpha: Tensor, vectors: Tensor) -> Tensor:
    """``Σ = U diag(α) Uᵀ``."""
    U = reflections(vectors)
    return U @ torch.diag_embed(alpha) @ U.mT


def noise(alpha: Tensor, vectors: Tensor, loc: Tensor | float = 1.0) -> MultivariateNormal:
    """The law of ξ."""
    Sigma = covariance(alpha, vectors)
    loc = torch.as_tensor(loc, dtype=alpha.dtype)
    loc = loc.expand(torch.broadcast_shapes(loc.shape, Sigma.shape[:-1]))
    return MultivariateNormal(loc, covariance_matrix=Sigma)


def structured_noise(eps: Tensor, alpha: Tensor, vectors: Tensor) -> Tensor:
    """``ξ = 1 + U (√α ⊙ ε)`` for rows ``eps (..., n, K)``."""
    return 1 + (eps * alpha.sqrt().unsqueeze(-2)) @ reflections(vectors).mT


def as_columns(value: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """A weight ``batch + event`` as its columns ``batch + (Q, K)``, the noise axis last."""
    moved = value.movedim(noise_dim, -1)
    return moved.reshape(moved.shape[: moved.dim() - event_dim] + (-1, moved.shape[-1]))


def unit_shaped(per_unit: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """``(..., K)`` shaped to multiply a weight along its noise axis."""
    for _ in range(event_dim - 1):
        per_unit = per_unit.unsqueeze(-2)
    return per_unit.movedim(-1, noise_dim)


def columns(theta: Tensor, alpha: Tensor, vectors: Tensor, noise_dim: int, event_dim: int) -> MultivariateNormal:
    """The law of each column of the weight: batch shape ``batch + (Q,)``, event ``(K,)``."""
    theta = as_columns(theta, noise_dim, event_dim)  # (..., Q, K)
    D = torch.diag_embed(theta)
    return MultivariateNormal(theta, covariance_matrix=D @ covariance(alpha, vectors).unsqueeze(-3) @ D)


def column_log_prob(law: MultivariateNormal, value: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """The density of a weight whose columns are independent."""
    return law.log_prob(as_columns(value, noise_dim, event_dim)).sum(-1)


def column_entropy(law: MultivariateNormal) -> Tensor:
    return law.entropy().sum(-1)


def column_kl(law: MultivariateNormal, mean: Tensor, scale: Tensor, noise_dim: int, event_dim: int) -> Tensor:
    """KL of independent columns to a prior with independent entries; ``mean`` and ``scale`` have the weight's shape."""
    mean, scale = (as_columns(v, noise_dim, event_dim) for v in (mean, scale))
    return kl_divergence(law, MultivariateNormal(mean, covariance_matrix=torch.diag_embed(scale.square()))).sum(-1)


def empirical_bayes_kl(alpha: Tensor, vectors: Tensor, num_columns: float) -> Tensor:
    """``Q/2 Σ_i log((1 + Σ_ii) / α_i)``."""
    s = covariance(alpha, vectors).diagonal(dim1=-1, dim2=-2)
    return num_columns / 2 * ((1 + s) / alpha).log().sum(-1)
