"""The posteriors of a weight: q*, whose columns are independent, and q_t, whose draws share one noise vector."""

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions.checks import (
    as_vectors,
    broadcast_batches,
    check_finite,
    check_floating,
    check_positive_finite,
    event_axis,
    expanded_batch,
    unit_shaped,
)
from pyro_vsd.distributions.householder_normal import HouseholderNormal
from pyro_vsd.distributions.lazy_weight import Draw, LazyWeight, NoiseSource
from pyro_vsd.ops.householder import compact_wy, covariance_diag
from pyro_vsd.ops.noise import NoiseTerms, noise_terms, rotated_noise

__all__ = ["ColumnProduct", "StructuredDropout"]


class ColumnProduct(TorchDistribution):
    r"""The column-product posterior :math:`q^*` of a weight :math:`\Theta` (``K × Q``).

    .. math:: q^*(W) = \prod_{j=1}^{Q} \mathcal N\bigl(W_{:j};\; \Theta_{:j},\;
              \operatorname{diag}(\Theta_{:j}) \Sigma \operatorname{diag}(\Theta_{:j})\bigr), \qquad
              \Sigma = U \operatorname{diag}(\alpha) U^\top

    Each column is :math:`\Theta_{:j} \odot \xi_j` with its own noise :math:`\xi_j \sim \mathcal N(1, \Sigma)`. Where
    a weight is zero there is no density: :meth:`log_prob` and :meth:`entropy` raise. A draw costs :math:`O(TKQ)`.

    :param theta: ``batch_shape + event_shape``; the event has rank 2 or more.
    :param alpha: noise variances, ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None`` for T = 0.
    :param noise_dim: the axis of the event along which the K noise units run. ``-2`` is the paper's ``K × Q``; the
        weight of an ``nn.Linear`` is ``(out, in)``: ``-1``.
    :param event_dim: the rank of the event. By default the dimensions of ``theta`` that are not batch dimensions of
        ``alpha`` or ``vectors``, and at least two.
    :param terms: ``noise_terms(alpha.log(), vectors)`` where they are at hand; then nothing is checked.

    >>> q = vsd.distributions.ColumnProduct(torch.ones(3, 2), torch.full((3,), 0.5))
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
        terms: NoiseTerms | None = None,
        validate_args: bool | None = None,
    ):
        if terms is None or vectors is None:
            check_floating("theta", theta)
            vectors = as_vectors(vectors, alpha)
            noise_batch = broadcast_batches(alpha=(alpha, 1), vectors=(vectors, 2))
            event_dim = max(2, theta.dim() - len(noise_batch)) if event_dim is None else event_dim
            if not 2 <= event_dim <= theta.dim():
                raise ValueError(
                    f"theta must be a weight of rank 2 or more; its shape is {tuple(theta.shape)}, with event_dim "
                    f"{event_dim}. A vector has no columns: use HouseholderNormal."
                )
            noise_dim = event_axis(noise_dim, event_dim, theta.shape)
            check_units(theta, alpha, noise_dim)
            batch_shape = broadcast_batches(theta=(theta, event_dim), alpha=(alpha, 1), vectors=(vectors, 2))
        else:
            batch_shape = alpha.shape[:-1]
            event_dim = theta.dim() - len(batch_shape)
        self.theta, self.alpha, self.vectors, self.noise_dim = theta, alpha, vectors, noise_dim
        self._terms = terms
        super().__init__(batch_shape, theta.shape[theta.dim() - event_dim :], validate_args=validate_args)
        if self._validate_args:
            check_finite("theta", theta)
            check_positive_finite("alpha", alpha)
            check_finite("vectors", vectors)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new = self._get_checked_instance(type(self), _instance)
        # Parameters keep their own batch shape, which broadcasts: what depends on them is computed once.
        new.__dict__.update(self.__dict__)
        new._batch_shape = expanded_batch(self.batch_shape, batch_shape)
        return new

    @property
    def num_units(self) -> int:
        """K."""
        return self.event_shape[self.noise_dim]

    @property
    def num_columns(self) -> int:
        """Q: all entries of the weight per noise unit."""
        return self.event_shape.numel() // max(self.num_units, 1)

    def along_units(self, per_unit: Tensor) -> Tensor:
        """A tensor ``(..., K)`` shaped to multiply the weight along its noise axis."""
        return unit_shaped(per_unit, self.noise_dim, len(self.event_shape))

    @property
    def terms(self) -> NoiseTerms:
        """Standard deviations, WY form and the KL's sum, computed on first use."""
        terms = self._terms
        if terms is None:
            alpha = self.alpha
            terms = noise_terms(alpha.double().log(), self.vectors)
            ratio = terms.log_ratio.to(torch.promote_types(alpha.dtype, torch.float32))
            terms = terms._replace(std=alpha.sqrt(), log_ratio=ratio)
            # Terms made without gradients must not serve those who want them.
            if torch.is_grad_enabled() or not (alpha.requires_grad or self.vectors.requires_grad):
                self._terms = terms
        return terms

    def __getstate__(self) -> dict[str, Any]:
        # A copy computes its own: the cached terms belong to this distribution's graph.
        return {**self.__dict__, "_terms": None}

    @property
    def noise(self) -> HouseholderNormal:
        """The distribution of the noise ξ."""
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
        s = self.along_units(self.unit_variance)
        return (self.loc.square() * s).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        columns = list(shape)
        K = columns.pop(len(shape) + self.noise_dim)
        batch = shape[: len(shape) - len(self.event_shape)]
        terms = self.terms
        eps = torch.randn(batch + (self.num_columns, K), dtype=terms.std.dtype, device=terms.std.device)
        xi = rotated_noise(eps, terms.std, terms.N, terms.W)  # (..., Q, K)
        return self.loc * xi.reshape(*columns, K).movedim(-1, self.noise_dim)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        loc = self._nonzero_loc("log_prob")
        # ξ_j = W_:j / Θ_:j, and the change of variables costs log |Θ|
        xi = (value / loc).movedim(self.noise_dim, -1).flatten(-len(self.event_shape), -2)  # (..., Q, K)
        noise = HouseholderNormal(1.0, self.alpha.unsqueeze(-2), self.vectors.unsqueeze(-3), validate_args=False)
        log_det = loc.abs().log().flatten(-len(self.event_shape)).sum(-1)
        result = noise.log_prob(xi).sum(-1) - log_det
        return result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))

    def entropy(self) -> Tensor:
        log_det = self._nonzero_loc("entropy").abs().log().flatten(-len(self.event_shape)).sum(-1)
        return (self.num_columns * self.noise.entropy() + log_det).expand(self.batch_shape)

    def _nonzero_loc(self, what: str) -> Tensor:
        loc = self.loc
        if self._validate_args and bool((loc == 0).any()):
            raise ValueError(
                f"{what}: theta has {int((loc == 0).sum())} zero(s). Noise leaves a zero weight at zero, so there is "
                "no density; the empirical-Bayes KL does not need one."
            )
        return loc


class StructuredDropout(ColumnProduct):
    r"""Structured dropout of a weight: :math:`W = \operatorname{diag}(z \odot \xi)\, \Theta` with
    :math:`\xi \sim \mathcal N(1, U \operatorname{diag}(\alpha) U^\top)`, one :math:`\xi` for a whole draw.

    **What** ``log_prob`` **is.** For ``Q > 1`` columns a draw is a function of ``K`` numbers in a space of ``K Q``,
    so the distribution of the draws, :math:`q_t`, has *no joint density*. ``log_prob``, ``entropy`` and the KL are
    those of the column product :math:`q^*` (:class:`ColumnProduct`), which has the same marginal for each column. This
    is unbiased: :math:`\log q^*` is a sum over columns, so
    :math:`\mathbb E_{q_t}[\log q^*(W)] = \mathbb E_{q^*}[\log q^*(W)]`; the same holds for the log-density of any
    prior that factorises over columns. Drawing from :math:`q_t` and scoring under :math:`q^*` therefore estimates
    :math:`\mathrm{KL}(q^* \Vert p)` without bias.

    **What a draw is.** A :class:`~pyro_vsd.distributions.lazy_weight.LazyWeight`: a tensor of the shape of ``theta``
    that applies its noise to activations, one vector per example, in ``F.linear``, convolutions and ``@``;
    ``.dense()`` gives the dense draw. A draw costs :math:`O(TK)` per example.

    :param theta: ``batch_shape + event_shape``; the event has rank 2 or more.
    :param alpha: noise variances, ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None`` for T = 0.
    :param noise_dim: the axis of the event along which the K noise units run.
    :param scale: z of a hierarchical prior, ``batch_shape + (K,)``, positive, or ``None`` for 1.
    :param event_dim: the rank of the event; see :class:`ColumnProduct`.
    :param terms: see :class:`ColumnProduct`.
    :param source: where the noise of draws comes from; by default torch's global generator.

    >>> q = vsd.distributions.StructuredDropout(torch.ones(2, 3), torch.full((3,), 0.1), torch.ones(1, 3), noise_dim=-1)
    >>> weight = q.rsample()
    >>> torch.nn.functional.linear(torch.ones(5, 3), weight).shape
    torch.Size([5, 2])
    >>> weight.dense().shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        theta: Tensor,
        alpha: Tensor,
        vectors: Tensor | None = None,
        noise_dim: int = -2,
        scale: Tensor | None = None,
        *,
        event_dim: int | None = None,
        terms: NoiseTerms | None = None,
        source: NoiseSource | None = None,
        validate_args: bool | None = None,
    ):
        super().__init__(
            theta, alpha, vectors, noise_dim, event_dim=event_dim, terms=terms, validate_args=validate_args
        )
        self.scale, self.source = scale, source
        if scale is not None:
            if terms is None:
                self._check_scale(scale)
            self._batch_shape = torch.broadcast_shapes(self._batch_shape, scale.shape[:-1])

    def _check_scale(self, scale: Tensor) -> None:
        check_floating("scale", scale)
        if scale.shape[-1:] != (self.num_units,):
            raise ValueError(f"scale must have a shape (..., {self.num_units}), not {tuple(scale.shape)}.")
        broadcast_batches(scale=(scale, 1), alpha=(self.alpha, 1), theta=(self.theta, len(self.event_shape)))
        if self._validate_args:
            check_positive_finite("scale", scale)

    @property
    def loc(self) -> Tensor:
        return self.theta if self.scale is None else self.theta * self.along_units(self.scale)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        # A draw made without gradients has none, whoever uses it.
        shape, detach = torch.Size(sample_shape) + self.batch_shape, not torch.is_grad_enabled()
        return LazyWeight(Draw(self, shape, self.source or NoiseSource(), detach))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)


def check_units(theta: Tensor, alpha: Tensor, noise_dim: int) -> None:
    """Raises unless ``alpha (..., K)`` has as many units as ``theta`` along ``noise_dim``."""
    if theta.shape[noise_dim] != alpha.shape[-1]:
        raise ValueError(
            f"alpha must have {theta.shape[noise_dim]} noise units, the size of theta {tuple(theta.shape)} along "
            f"noise_dim {noise_dim}; its shape is {tuple(alpha.shape)}."
        )
