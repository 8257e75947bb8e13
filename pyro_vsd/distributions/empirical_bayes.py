"""The KL terms in which the prior's scale has been replaced by its optimum."""

import numbers

import torch
from torch import Tensor

from pyro_vsd.distributions.checks import (
    as_vectors,
    broadcast_noise,
    event_axis,
    finite,
    floating,
    positive_finite,
    unit_shaped,
)
from pyro_vsd.ops.householder import compact_wy, covariance_diag
from pyro_vsd.ops.noise import noise_terms

__all__ = ["beta_star", "empirical_bayes_kl", "hierarchical_kl", "hierarchical_terms"]


def empirical_bayes_kl(alpha: Tensor, vectors: Tensor | None, num_columns: float) -> Tensor:
    r"""KL of q* to the zero-mean Gaussian prior whose precisions are at their optimum :math:`\beta^*`.

    .. math:: \mathrm{KL}_{EB} = \frac{Q}{2} \sum_i \log \frac{1 + s_i}{\alpha_i},
              \qquad s = \operatorname{diag}(U \operatorname{diag}(\alpha) U^\top)

    It does not depend on Θ. Costs :math:`O(K T^2)` time and :math:`O(K T)` memory, forward and backward.

    :param alpha: droprates, ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None``.
    :param num_columns: Q; 1 gives the KL of the noise itself.
    :returns: ``batch_shape``.

    >>> empirical_bayes_kl(torch.ones(4), None, num_columns=2)  # 4 log 2
    tensor(2.7726)
    """
    vectors = as_vectors(vectors, alpha)
    broadcast_noise(alpha, vectors)
    positive_finite("alpha", alpha)
    finite("vectors", vectors)
    _check_columns(num_columns)
    ratio = noise_terms(alpha.double().log(), vectors).log_ratio.to(torch.promote_types(alpha.dtype, torch.float32))
    return 0.5 * num_columns * ratio


def beta_star(theta: Tensor, alpha: Tensor, vectors: Tensor | None = None, noise_dim: int = -2) -> Tensor:
    r"""The prior precisions that make the KL smallest: :math:`\beta^*_{ij} = 1 / (\Theta_{ij}^2 (1 + s_i))`.

    :param theta: the weight, ``batch_shape + (…)``.
    :param alpha: ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None``.
    :param noise_dim: the axis of the noise units.
    :returns: the shape of ``theta``.

    >>> beta_star(torch.ones(2, 1), torch.tensor([1.0, 3.0]))
    tensor([[0.5000],
            [0.2500]])
    """
    vectors = as_vectors(vectors, alpha)
    positive_finite("alpha", alpha)
    finite("vectors", vectors)
    floating("theta", theta)
    finite("theta", theta)
    if theta.dim() < 2:
        raise ValueError(f"theta: expected a weight of rank 2 or more, got shape {tuple(theta.shape)}.")
    event_dim = max(2, theta.dim() - len(broadcast_noise(alpha, vectors)))
    noise_dim = event_axis(noise_dim, event_dim, theta.shape)
    if theta.shape[noise_dim] != alpha.shape[-1]:
        raise ValueError(
            f"alpha: expected {theta.shape[noise_dim]} noise units, the size of theta {tuple(theta.shape)} along "
            f"noise_dim {noise_dim}, got shape {tuple(alpha.shape)}."
        )
    s = covariance_diag(compact_wy(vectors.double()), alpha)
    return 1 / (theta.square() * (1 + unit_shaped(s, noise_dim, event_dim)))


def hierarchical_kl(
    alpha: Tensor, vectors: Tensor | None, z_loc: Tensor, z_scale: Tensor, num_columns: float, beta: str = "paper"
) -> Tensor:
    r"""Expected KL of q*(W | z) to p(W | z) under ``q(z) = LogNormal(γ, √δ)``, β at its optimum.

    ``beta="paper"``, the optimum taken before the expectation (:func:`beta_star`):

    .. math:: \frac{Q}{2} \sum_i \Bigl[ e^{\gamma_i + \delta_i / 2} - \gamma_i - 1 + \log\frac{1 + s_i}{\alpha_i} \Bigr]

    ``beta="full"``, the optimum taken after it, :math:`\beta_{ij} = 1/(\mathbb E[z_i] \Theta_{ij}^2 (1 + s_i))`:

    .. math:: \frac{Q}{2} \sum_i \Bigl[ \frac{\delta_i}{2} + \log\frac{1 + s_i}{\alpha_i} \Bigr]

    The KL of ``q(z)`` itself is not in it.

    :param z_loc: γ, mean of log z, ``batch_shape + (K,)``.
    :param z_scale: √δ, standard deviation of log z, ``batch_shape + (K,)``.
    :returns: ``batch_shape``.

    >>> zero = torch.zeros(4)
    >>> hierarchical_kl(torch.ones(4), None, zero, zero + 1e-6, 2)  # z = 1: the empirical-Bayes KL
    tensor(2.7726)
    """
    kl = empirical_bayes_kl(alpha, vectors, num_columns)
    for name, value in (("z_loc", z_loc), ("z_scale", z_scale)):
        floating(name, value)
        if value.shape[-1:] != alpha.shape[-1:]:
            raise ValueError(f"{name}: expected a shape (..., {alpha.shape[-1]}), got {tuple(value.shape)}.")
    try:
        torch.broadcast_shapes(kl.shape, z_loc.shape[:-1], z_scale.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got alpha {tuple(alpha.shape)}, z_loc {tuple(z_loc.shape)} and "
            f"z_scale {tuple(z_scale.shape)}."
        ) from None
    finite("z_loc", z_loc)
    positive_finite("z_scale", z_scale)
    return kl + num_columns * hierarchical_terms(z_loc, z_scale, beta)


def hierarchical_terms(z_loc: Tensor, z_scale: Tensor, beta: str) -> Tensor:
    """What the hierarchy adds to the empirical-Bayes KL, per column, unchecked: ``batch_shape``."""
    delta = z_scale.square()
    if beta == "paper":
        return 0.5 * ((z_loc + 0.5 * delta).exp() - z_loc - 1).sum(-1)
    if beta == "full":
        return 0.25 * delta.sum(-1)
    raise ValueError(f"beta: expected 'paper' or 'full', got {beta!r}.")


def _check_columns(num_columns: float) -> None:
    if not isinstance(num_columns, numbers.Real) or not 0 < float(num_columns) < float("inf"):
        raise ValueError(f"num_columns: expected a positive number, got {num_columns!r}.")
