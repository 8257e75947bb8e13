"""The distribution of the noise: a Gaussian whose covariance is rotated by Householder reflections."""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions.checks import (
    as_vectors,
    broadcast_batches,
    check_finite,
    check_positive_finite,
    expanded_batch,
)
from pyro_vsd.ops.householder import CompactWY, compact_wy, covariance_diag, dense, rotate_each

__all__ = ["HouseholderNormal"]


class HouseholderNormal(TorchDistribution):
    r"""Gaussian with :math:`\Sigma = U \operatorname{diag}(\alpha) U^\top`, ``U`` a product of T reflections.

    .. math:: \mathcal N(\mathrm{loc},\; U \operatorname{diag}(\alpha) U^\top), \qquad
              U = H_T \cdots H_1, \quad H_t = I - 2 \frac{v_t v_t^\top}{\lVert v_t \rVert^2}

    With ``loc = 1`` this is the dropout noise :math:`\xi` of the paper. A draw costs :math:`O(TK)`, the density and
    the variance :math:`O(K T^2)`; no ``K × K`` matrix is formed but for ``covariance_matrix``.

    :param loc: a number, or ``batch_shape + (K,)``.
    :param alpha: noise variances before the rotation, ``batch_shape + (K,)``, positive.
    :param vectors: raw reflection vectors, ``batch_shape + (T, K)``; ``None`` is T = 0. A zero vector is no reflection.

    >>> noise = vsd.distributions.HouseholderNormal(1.0, torch.tensor([1.0, 4.0]), torch.tensor([[1.0, 1.0]]))
    >>> noise.variance
    tensor([4., 1.])
    >>> noise.rsample((3,)).shape
    torch.Size([3, 2])
    """

    arg_constraints = {
        "loc": constraints.real_vector,
        "alpha": constraints.independent(constraints.positive, 1),
        "vectors": constraints.independent(constraints.real, 2),
    }
    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self, loc: float | Tensor, alpha: Tensor, vectors: Tensor | None = None, *, validate_args: bool | None = None
    ):
        vectors = as_vectors(vectors, alpha)
        K = alpha.shape[-1]
        loc = torch.as_tensor(loc, dtype=alpha.dtype, device=alpha.device)
        if loc.dim() == 0:
            loc = loc.expand(K)
        if loc.shape[-1] != K:
            raise ValueError(f"loc must be a number or have a shape (..., {K}), not {tuple(loc.shape)}.")
        batch_shape = broadcast_batches(loc=(loc, 1), alpha=(alpha, 1), vectors=(vectors, 2))
        self.loc, self.alpha, self.vectors = loc, alpha, vectors
        self._wy: CompactWY | None = None
        super().__init__(batch_shape, torch.Size((K,)), validate_args=validate_args)
        if self._validate_args:
            check_finite("loc", loc)
            check_positive_finite("alpha", alpha)
            check_finite("vectors", vectors)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "HouseholderNormal":
        new = self._get_checked_instance(HouseholderNormal, _instance)
        # Parameters keep their own batch shape, which broadcasts: what depends on them is computed once.
        new.__dict__.update(self.__dict__)
        new._batch_shape = expanded_batch(self.batch_shape, batch_shape)
        return new

    @property
    def wy(self) -> CompactWY:
        """The compact WY form of U, computed on first use."""
        wy = self._wy
        if wy is None:
            wy = compact_wy(self.vectors)
            # One made without gradients must not serve those who want them.
            if torch.is_grad_enabled() or not self.vectors.requires_grad:
                self._wy = wy
        return wy

    def __getstate__(self) -> dict[str, Any]:
        # A copy computes its own: the cached form belongs to this distribution's graph.
        return {**self.__dict__, "_wy": None}

    @property
    def mean(self) -> Tensor:
        return self.loc.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        return covariance_diag(compact_wy(self.vectors.double()), self.alpha).expand(
            self.batch_shape + self.event_shape
        )

    @property
    def covariance_matrix(self) -> Tensor:
        U = dense(self.wy)
        return ((U * self.alpha.unsqueeze(-2)) @ U.mT).expand(self.batch_shape + self.event_shape * 2)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        eps = torch.randn(shape, dtype=self.alpha.dtype, device=self.alpha.device)
        return rotate_each(self.wy, eps * self.alpha.sqrt()) + self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        x = value - self.loc
        wy = CompactWY(*(part.to(x.dtype) for part in self.wy))  # a value may be of higher precision
        x = rotate_each(wy, x, inverse=True)
        half = 0.5 * (x.square() / self.alpha + self.alpha.log() + math.log(2 * math.pi))
        return -half.sum(-1).expand(torch.broadcast_shapes(half.shape[:-1], self.batch_shape))

    def entropy(self) -> Tensor:
        half = 0.5 * (self.alpha.log() + math.log(2 * math.pi) + 1)
        return half.sum(-1).expand(self.batch_shape)
