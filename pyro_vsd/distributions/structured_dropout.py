"""q_t: the law that weights are drawn from; one noise vector for a whole draw."""

from typing import Any

import torch
from torch import Tensor

from pyro_vsd.distributions.checks import floating, positive_finite
from pyro_vsd.distributions.column_product import ColumnProduct
from pyro_vsd.distributions.lazy_weight import Draw, LazyWeight
from pyro_vsd.ops.noise import NoiseTerms, noise_terms

__all__ = ["StructuredDropout"]


class StructuredDropout(ColumnProduct):
    r"""Structured dropout of a weight: :math:`W = \operatorname{diag}(z \odot \xi)\, \Theta` with
    :math:`\xi \sim \mathcal N(1, U \operatorname{diag}(\alpha) U^\top)`, one :math:`\xi` for a whole draw.

    **What** ``log_prob`` **is.** For ``Q > 1`` columns a draw is a function of ``K`` numbers in a space of ``K Q``,
    so the law of the draws, :math:`q_t`, has *no joint density*. ``log_prob``, ``entropy`` and the KL are those of
    the column product :math:`q^*` (:class:`ColumnProduct`), which has the same marginal for each column. That is what
    the objective pays for, and it is unbiased: :math:`\log q^*` is a sum over columns, so
    :math:`\mathbb E_{q_t}[\log q^*(W)] = \mathbb E_{q^*}[\log q^*(W)]`; the same holds for the log-density of any
    prior that factorises over columns. Drawing from :math:`q_t` and scoring under :math:`q^*` therefore estimates
    :math:`\mathrm{KL}(q^* \Vert p)` without bias.

    **What a draw is.** A :class:`~pyro_vsd.distributions.lazy_weight.LazyWeight`: a tensor of the shape of ``theta``
    that puts its noise on activations, one vector per example, in ``F.linear``, convolutions and ``@``; ``.dense()``
    gives the dense draw. A draw costs :math:`O(TK)` per example.

    :param theta: ``batch_shape + event_shape``; the event has rank 2 or more.
    :param alpha: droprates, ``batch_shape + (K,)``.
    :param vectors: ``batch_shape + (T, K)``, or ``None`` for T = 0.
    :param noise_dim: the axis of the event along which the K noise units run.
    :param scale: z of a hierarchical prior, ``batch_shape + (K,)``, positive, or ``None`` for 1.
    :param event_dim: the rank of the event; see :class:`ColumnProduct`.

    >>> q = StructuredDropout(torch.ones(2, 3), torch.full((3,), 0.1), torch.ones(1, 3), noise_dim=-1)
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
        validate_args: bool | None = None,
    ):
        self.scale: Tensor | None = None
        self._terms: NoiseTerms | None = None
        super().__init__(theta, alpha, vectors, noise_dim, event_dim=event_dim, validate_args=validate_args)
        if scale is not None:
            self._set_scale(scale)

    @classmethod
    def from_terms(
        cls, theta: Tensor, log_alpha: Tensor, vectors: Tensor, terms: NoiseTerms, noise_dim: int, scale: Tensor | None
    ) -> "StructuredDropout":
        """The law from terms already at hand, unchecked: the guide's way, once per step and site."""
        new = cls.__new__(cls)
        new.theta, new.vectors, new.noise_dim, new.scale = theta, vectors, noise_dim, scale
        new._log_alpha, new._terms, new._wy = log_alpha, terms, None
        batch_shape = log_alpha.shape[:-1]
        if scale is not None:
            batch_shape = torch.broadcast_shapes(batch_shape, scale.shape[:-1])
        event_shape = theta.shape[len(log_alpha.shape) - 1 :]
        torch.distributions.Distribution.__init__(new, batch_shape, event_shape, validate_args=False)
        return new

    def _set_scale(self, scale: Tensor) -> None:
        floating("scale", scale)
        if scale.dim() < 1 or scale.shape[-1] != self.num_units:
            raise ValueError(f"scale: expected a shape (..., {self.num_units}), got {tuple(scale.shape)}.")
        if self._validate_args:
            positive_finite("scale", scale)
        try:
            self._batch_shape = torch.broadcast_shapes(self._batch_shape, scale.shape[:-1])
        except RuntimeError:
            raise ValueError(
                f"scale: expected a batch shape that broadcasts with {tuple(self._batch_shape)}, got a tensor of shape "
                f"{tuple(scale.shape)}."
            ) from None
        self.scale = scale

    @property
    def alpha(self) -> Tensor:
        """Droprates ``(..., K)``."""
        alpha = self._alpha
        if alpha is None:
            alpha = self._log_alpha.exp()
            if self._may_keep(self._log_alpha):
                self._alpha = alpha
        return alpha

    @alpha.setter
    def alpha(self, value: Tensor) -> None:
        self._alpha = value

    _alpha: Tensor | None = None
    _log_alpha: Tensor

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_terms": None}
        return {**state, "_alpha": None} if "_log_alpha" in state else state

    @property
    def terms(self) -> NoiseTerms:
        """Standard deviations, WY form and the KL's sum, computed on first use."""
        terms = self._terms
        if terms is None:
            alpha = self.alpha
            terms = noise_terms(alpha.double().log(), self.vectors)
            ratio = terms.log_ratio.to(torch.promote_types(alpha.dtype, torch.float32))
            terms = terms._replace(std=alpha.sqrt(), log_ratio=ratio)
            if self._may_keep(alpha, self.vectors):
                self._terms = terms
        return terms

    @property
    def requires_grad(self) -> bool:
        """Whether a draw has a gradient."""
        tensors = (self.theta, self.terms.std, self.terms.N, self.scale)
        return any(t is not None and t.requires_grad for t in tensors)

    @property
    def loc(self) -> Tensor:
        return self.theta if self.scale is None else self.theta * self._along(self.scale)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "StructuredDropout":
        new = self._get_checked_instance(StructuredDropout, _instance)
        new.scale, new._terms = self.scale, self._terms
        if self._alpha is None:
            new._log_alpha, new._alpha = self._log_alpha, self.alpha
        expanded: StructuredDropout = self._expand_into(new, batch_shape)
        return expanded

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        # A draw made without gradients has none, whoever uses it.
        law = self if torch.is_grad_enabled() or not self.requires_grad else self._detached()
        return LazyWeight(Draw(law, torch.Size(sample_shape) + self.batch_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self._detached().rsample(sample_shape)

    def _detached(self) -> "StructuredDropout":
        detached = self.expand(self.batch_shape)
        detached.theta, detached.alpha, detached.vectors = (
            self.theta.detach(),
            self.alpha.detach(),
            self.vectors.detach(),
        )
        detached.scale = None if self.scale is None else self.scale.detach()
        detached._terms = None if self._terms is None else NoiseTerms(*(t.detach() for t in self._terms))
        detached._wy = None
        return detached
