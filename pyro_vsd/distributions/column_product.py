"""q*: the law of a weight whose columns are independent; the one that the objective pays for."""

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions.checks import (
    as_vectors,
    broadcast_noise,
    event_axis,
    expanded_batch,
    finite,
    floating,
    positive_finite,
    unit_shaped,
)
from pyro_vsd.distributions.householder_normal import HouseholderNormal
from pyro_vsd.ops.householder import CompactWY, compact_wy, covariance_diag
from pyro_vsd.ops.noise import structured_noise

__all__ = ["ColumnProduct"]


class ColumnProduct(TorchDistribution):
    r"""The column-product posterior :math:`q^*` of a weight :math:`\Theta` (``K × Q``).

    .. math:: q^*(W) = \prod_{j=1}^{Q} \mathcal N\bigl(W_{:j};\; \Theta_{:j},\;
              \operatorname{diag}(\Theta_{:j}) \Sigma \operatorname{diag}(\Theta_{:j})\bigr), \qquad
              \Sigma = U \operatorname{diag}(\alpha) U^\top

    Each column is :math:`\Theta_{:j} \odot \xi_j` with its own noise :math:`\xi_j \sim \mathcal N(1, \Sigma)`. Where
    a weight is zero the law has no density: :meth:`log_prob` and :meth:`entropy` raise. A draw costs :math:`O(TKQ)`.

    :param theta: ``batch_shape + event_shape``; the event has rank 2 or more.
    :param alpha: droprates, ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None`` for T = 0.
    :param noise_dim: the axis of the event along which the K noise units run. ``-2`` is the paper's ``K × Q``; the
        weight of an ``nn.Linear`` is ``(out, in)``: ``-1``.
    :param event_dim: the rank of the event. By default the dimensions of ``theta`` that are not batch dimensions of
        ``alpha`` or ``vectors``, and at least two.

    >>> q = ColumnProduct(torch.ones(3, 2), torch.full((3,), 0.5))
    >>> q.event_shape, q.variance[0]
    (torch.Size([3, 2]), tensor([0.5000, 0.5000]))
    """

    arg_constraints = {
        "alpha": constraints.independent(constraints.positive, 1),
        "vectors": constraints.independent(constraints.real, 2),
    }
    has_rsample = True

    def __init__(
        self,
        theta: Tensor,
        alpha: Tensor,
        vectors: Tensor | None = None,
        noise_dim: int = -2,
        *,
        event_dim: int | None = None,
        validate_args: bool | None = None,
    ):
        floating("theta", theta)
        vectors = as_vectors(vectors, alpha)
        noise_batch = broadcast_noise(alpha, vectors)
        if event_dim is None:
            event_dim = max(2, theta.dim() - len(noise_batch))
        if not isinstance(event_dim, int):
            raise TypeError(f"event_dim: expected an integer or None, got {event_dim!r}.")
        if not 2 <= event_dim <= theta.dim():
            raise ValueError(
                f"theta: expected a weight of rank 2 or more, got shape {tuple(theta.shape)} with event_dim "
                f"{event_dim}. A vector has no columns: use HouseholderNormal."
            )
        noise_dim = event_axis(noise_dim, event_dim, theta.shape)
        if theta.shape[noise_dim] != alpha.shape[-1]:
            raise ValueError(
                f"alpha: expected {theta.shape[noise_dim]} noise units, the size of theta {tuple(theta.shape)} along "
                f"noise_dim {noise_dim}, got shape {tuple(alpha.shape)}."
            )
        try:
            batch_shape = torch.broadcast_shapes(noise_batch, theta.shape[: theta.dim() - event_dim])
        except RuntimeError:
            raise ValueError(
                f"expected batch shapes that broadcast, got theta {tuple(theta.shape)} with event_dim {event_dim}, "
                f"alpha {tuple(alpha.shape)} and vectors {tuple(vectors.shape)}."
            ) from None
        self.theta, self.alpha, self.vectors, self.noise_dim = theta, alpha, vectors, noise_dim
        self._wy: CompactWY | None = None
        super().__init__(batch_shape, theta.shape[theta.dim() - event_dim :], validate_args=validate_args)
        if self._validate_args:
            finite("theta", theta)
            positive_finite("alpha", alpha)
            finite("vectors", vectors)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ColumnProduct":
        new = self._get_checked_instance(ColumnProduct, _instance)
        return self._expand_into(new, batch_shape)

    def _expand_into(self, new: Any, batch_shape: Any) -> Any:
        # Parameters keep their own batch shape, which broadcasts: what depends on them is computed once.
        new.theta, new.alpha, new.vectors, new._wy = self.theta, self.alpha, self.vectors, self._wy
        new.noise_dim = self.noise_dim
        batch_shape = expanded_batch(self.batch_shape, batch_shape)
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        theta: Any,
        alpha: Any,
        vectors: Any = (0, 0),
        noise_dim: int = -2,
        scale: Any = (0,),
        event_dim: int | None = None,
    ) -> tuple[torch.Size, torch.Size]:
        """Batch and event shape from the shapes of the parameters."""
        noise_batch = torch.broadcast_shapes(tuple(alpha)[:-1], tuple(vectors)[:-2])
        batch_dim = len(theta) - (event_dim or max(2, len(theta) - len(noise_batch)))
        batch_shape = torch.broadcast_shapes(noise_batch, tuple(theta)[:batch_dim], tuple(scale)[:-1])
        return torch.Size(batch_shape), torch.Size(theta[batch_dim:])

    @property
    def num_units(self) -> int:
        """K."""
        return self.event_shape[self.noise_dim]

    @property
    def num_columns(self) -> int:
        """Q: all entries of the weight per noise unit."""
        return self.event_shape.numel() // max(self.num_units, 1)

    def _along(self, per_unit: Tensor) -> Tensor:
        """A tensor ``(..., K)`` shaped to multiply the weight along its noise axis."""
        return unit_shaped(per_unit, self.noise_dim, len(self.event_shape))

    @property
    def wy(self) -> CompactWY:
        """The compact WY form of U, computed on first use."""
        wy = self._wy
        if wy is None:
            wy = compact_wy(self.vectors)
            if self._may_keep(self.vectors):
                self._wy = wy
        return wy

    @staticmethod
    def _may_keep(*parameters: Tensor) -> bool:
        """Whether what is computed of these now may be kept: made without gradients, it must not serve those who
        want them."""
        return torch.is_grad_enabled() or not any(p.requires_grad for p in parameters)

    def __getstate__(self) -> dict[str, Any]:
        # A copy computes its own: what is cached hangs on this law's graph.
        return {**self.__dict__, "_wy": None}

    @property
    def noise(self) -> HouseholderNormal:
        """The law of the noise ξ."""
        return HouseholderNormal(1.0, self.alpha, self.vectors, validate_args=False)

    @property
    def loc(self) -> Tensor:
        """The mean with the batch shape of the parameters, not expanded."""
        return self.theta

    @property
    def mean(self) -> Tensor:
        return self.loc.expand(self.batch_shape + self.event_shape)

    @property
    def unit_variance(self) -> Tensor:
        """``s = diag(Σ)``, ``(..., K)``."""
        return covariance_diag(compact_wy(self.vectors.double()), self.alpha)

    @property
    def variance(self) -> Tensor:
        s = self._along(self.unit_variance)
        return (self.loc.square() * s).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        columns = list(shape)
        K = columns.pop(len(shape) + self.noise_dim)
        batch = shape[: len(shape) - len(self.event_shape)]
        eps = torch.randn(batch + (self.num_columns, K), dtype=self.alpha.dtype, device=self.alpha.device)
        xi = structured_noise(eps, self.alpha.sqrt(), *self.wy)  # (..., Q, K)
        return self.loc * xi.reshape(*columns, K).movedim(-1, self.noise_dim)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        loc = self.loc
        self._check_nonzero(loc, "log_prob")
        # ξ_j = W_:j / Θ_:j, and the change of variables pays log |Θ|
        xi = (value / loc).movedim(self.noise_dim, -1).flatten(-len(self.event_shape), -2)  # (..., Q, K)
        noise = HouseholderNormal(1.0, self.alpha.unsqueeze(-2), self.vectors.unsqueeze(-3), validate_args=False)
        log_det = loc.abs().log().flatten(-len(self.event_shape)).sum(-1)
        result = noise.log_prob(xi).sum(-1) - log_det
        return result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))

    def entropy(self) -> Tensor:
        loc = self.loc
        self._check_nonzero(loc, "entropy")
        log_det = loc.abs().log().flatten(-len(self.event_shape)).sum(-1)
        return (self.num_columns * self.noise.entropy() + log_det).expand(self.batch_shape)

    def _check_nonzero(self, loc: Tensor, what: str) -> None:
        if self._validate_args and bool((loc == 0).any()):
            raise ValueError(
                f"{what}: expected a theta without zeros, got {int((loc == 0).sum())} zero(s) in shape "
                f"{tuple(loc.shape)}. Multiplicative noise leaves a zero weight at zero, so there is no density; the "
                "empirical-Bayes KL does not need one."
            )
