"""The law of the noise itself: a Gaussian whose covariance is turned by Householder reflections."""

import math
import numbers
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions.checks import as_vectors, broadcast_noise, expanded_batch, finite, positive_finite
from pyro_vsd.ops.householder import CompactWY, compact_wy, covariance_diag, dense

__all__ = ["HouseholderNormal"]


class HouseholderNormal(TorchDistribution):
    r"""Gaussian with :math:`\Sigma = U \operatorname{diag}(\alpha) U^\top`, ``U`` a product of T reflections.

    .. math:: \mathcal N(\mathrm{loc},\; U \operatorname{diag}(\alpha) U^\top), \qquad
              U = H_T \cdots H_1, \quad H_t = I - 2 \frac{v_t v_t^\top}{\lVert v_t \rVert^2}

    With ``loc = 1`` this is the dropout noise :math:`\xi` of the paper. A draw costs :math:`O(TK)`, the density and
    the variance :math:`O(K T^2)`; no ``K × K`` matrix is formed but for ``covariance_matrix``.

    :param loc: a number, or ``batch_shape + (K,)``.
    :param alpha: variances before the rotation (droprates), ``batch_shape + (K,)``, positive.
    :param vectors: raw reflection vectors, ``batch_shape + (T, K)``; ``None`` is T = 0. A zero vector is no reflection.

    >>> noise = HouseholderNormal(1.0, torch.tensor([1.0, 4.0]), torch.tensor([[1.0, 1.0]]))
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
        if not isinstance(loc, (Tensor, numbers.Real)) or (isinstance(loc, Tensor) and loc.is_complex()):
            raise TypeError(f"loc: expected a number or a tensor of real numbers, got {loc!r}.")
        if isinstance(loc, Tensor) and loc.numel() == 0:
            raise ValueError(f"loc: expected at least one entry, got shape {tuple(loc.shape)}.")
        loc = torch.as_tensor(loc, dtype=alpha.dtype, device=alpha.device)
        if loc.dim() == 0:
            loc = loc.expand(K)
        batch_shape = broadcast_noise(alpha, vectors)
        try:
            batch_shape = torch.broadcast_shapes(batch_shape, loc.shape[:-1])
            if loc.shape[-1] != K:
                raise RuntimeError
        except RuntimeError:
            raise ValueError(
                f"loc: expected a number or a shape that broadcasts with {tuple(batch_shape) + (K,)}, got "
                f"{tuple(loc.shape)}."
            ) from None
        self.loc, self.alpha, self.vectors = loc, alpha, vectors
        self._wy: CompactWY | None = None
        super().__init__(batch_shape, torch.Size((K,)), validate_args=validate_args)
        if self._validate_args:
            finite("loc", loc)
            positive_finite("alpha", alpha)
            finite("vectors", vectors)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "HouseholderNormal":
        new = self._get_checked_instance(HouseholderNormal, _instance)
        batch_shape = expanded_batch(self.batch_shape, batch_shape)
        # Parameters keep their own batch shape, which broadcasts: what depends on them is computed once.
        new.loc, new.alpha, new.vectors, new._wy = self.loc, self.alpha, self.vectors, self._wy
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
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
        # A copy computes its own: what is cached hangs on this law's graph.
        return {**self.__dict__, "_wy": None}

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        loc: Any, alpha: Any, vectors: Any = (0, 0)
    ) -> tuple[torch.Size, torch.Size]:
        """Batch and event shape from the shapes of the parameters."""
        batch_shape = torch.broadcast_shapes(tuple(loc)[:-1], tuple(alpha)[:-1], tuple(vectors)[:-2])
        return torch.Size(batch_shape), torch.Size(alpha[-1:])

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
        N, S = self.wy
        eta = (eps * self.alpha.sqrt()).unsqueeze(-2)  # (..., 1, K): one row against each of the reflections' batch
        return (eta - ((eta @ N.mT) @ S.mT) @ N).squeeze(-2) + self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        x = (value - self.loc).unsqueeze(-2)  # (..., 1, K)
        N, S = (part.to(x.dtype) for part in self.wy)  # a value may be of higher precision
        x = (x - ((x @ N.mT) @ S) @ N).squeeze(-2)  # Uᵀ (value − loc)
        half = 0.5 * (x.square() / self.alpha + self.alpha.log() + math.log(2 * math.pi))
        return -half.sum(-1).expand(torch.broadcast_shapes(half.shape[:-1], self.batch_shape))

    def entropy(self) -> Tensor:
        half = 0.5 * (self.alpha.log() + math.log(2 * math.pi) + 1)
        return half.sum(-1).expand(self.batch_shape)
