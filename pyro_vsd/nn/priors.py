"""Priors of a layer's weight: one Gaussian, or a hierarchy with a scale per noise unit."""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Protocol

import pyro.distributions as dist
from torch import Tensor

from pyro_vsd.distributions import ScaleMixtureNormal, WeightNormal, WeightPrior

__all__ = ["GaussianPrior", "HierarchicalPrior", "Prior"]

KINDS = ("inverse_gamma", "gamma", "half_cauchy")


class Prior(Protocol):
    """What :func:`~pyro_vsd.nn.bayesianize` asks of a prior: two functions of the layer's initial weight.

    Write an own class with these two for a prior that is not here; it must be picklable.

    >>> import torch
    >>> isinstance(GaussianPrior().weight(torch.ones(3, 2), noise_dim=-1), WeightPrior)
    True
    """

    def scales(self, init: Tensor, noise_dim: int) -> Any:
        """The prior of z, of event shape ``(K,)``, or ``None`` where there is no hierarchy."""

    def weight(
        self,
        init: Tensor,
        noise_dim: int,
        input_dim: int | None = None,
        z: Tensor | None = None,
        z_name: str | None = None,
    ) -> WeightPrior:
        """The prior of the weight, of the shape of ``init``, given ``z`` where there is one."""


@dataclass(frozen=True)
class GaussianPrior:
    r"""Independent Gaussians on the entries of a weight.

    .. math:: W_{ij} \sim \mathcal N(0, \sigma^2)

    The scale acts only where the prior is scored as stated: ``VSD_ELBO(prior="model")`` and Pyro's own ELBOs. The
    default objective replaces it by its empirical-Bayes optimum, whatever σ says.

    :param scale: σ, positive.

    >>> import torch
    >>> GaussianPrior(0.5).weight(torch.zeros(4, 3), noise_dim=-1).variance.sum()
    tensor(3.)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def scales(self, init: Tensor, noise_dim: int) -> None:
        """No hierarchy: ``None``."""

    def weight(
        self,
        init: Tensor,
        noise_dim: int,
        input_dim: int | None = None,
        z: Tensor | None = None,
        z_name: str | None = None,
    ) -> WeightNormal:
        """The prior of a weight of the shape of ``init``."""
        return WeightNormal(self.scale, init.shape, noise_dim, init, input_dim=input_dim, validate_args=False)


@dataclass(frozen=True)
class HierarchicalPrior:
    r"""The two-level prior: a scale :math:`z_i` per noise unit, shared by all columns, then the weight given z.

    .. math:: z_i \sim p(z), \qquad W_{ij} \mid z \sim \mathcal N(0, z_i / \beta_{ij})

    With :math:`a = b = 1` and with a half-Cauchy of scale 1 the bulk of z lies around one.

    Under the default objective β is at its optimum, so that :math:`\mathbb E[z]` is *no* score of relevance: only
    :math:`z \Theta` meets the data. Use :math:`\mathbb E[z_i] \lVert \Theta_{i:} \rVert`, the norm of a unit in
    ``guide.mean()``. With ``VSD_ELBO(prior="model")`` the scale :math:`\mathbb E[z]` itself shrinks for irrelevant
    units and their noise, ``guide.noise(site).variance``, grows. (Not α: a rotation mixes it between units.)

    :param kind: the hyperprior :math:`p(z)`: ``"inverse_gamma"`` (concentration a, rate b), ``"gamma"``
        (concentration a, rate b) or ``"half_cauchy"`` (scale a, no b).
    :param a: concentration or scale, positive.
    :param b: rate, positive; ``None`` is 1.
    :param beta: which optimum replaces β: the ``"paper"``'s, taken before the expectation over z, or the ``"full"``
        one, taken after it; see :func:`~pyro_vsd.distributions.hierarchical_kl`.
    :param precision: β where the prior is scored as stated (``prior="model"``).

    >>> import torch
    >>> prior = HierarchicalPrior("gamma", a=2.0, b=4.0)
    >>> prior.scales(torch.zeros(5, 3), noise_dim=-1).mean
    tensor([0.5000, 0.5000, 0.5000])
    """

    kind: str = "inverse_gamma"
    a: float = 1.0
    b: float | None = None
    beta: str = "paper"
    precision: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(map(repr, KINDS))}, got {self.kind!r}.")
        if not isinstance(self.beta, str) or self.beta not in ("paper", "full"):
            raise ValueError(f"beta: expected 'paper' or 'full', got {self.beta!r}.")
        _positive("a", self.a)
        if self.b is not None:
            if self.kind == "half_cauchy":
                raise ValueError(f"b: expected None for a half-Cauchy, whose scale is a, got {self.b!r}.")
            _positive("b", self.b)
        _positive("precision", self.precision)

    def scales(self, init: Tensor, noise_dim: int) -> Any:
        """The hyperprior of z: event shape ``(K,)``."""
        a, b = init.new_tensor(self.a), init.new_tensor(1.0 if self.b is None else self.b)
        law: Any
        if self.kind == "half_cauchy":
            law = dist.HalfCauchy(a, validate_args=False)
        elif self.kind == "gamma":
            law = dist.Gamma(a, b, validate_args=False)
        else:
            law = dist.InverseGamma(a, b, validate_args=False)
        return law.expand([init.shape[noise_dim]]).to_event(1)

    def weight(
        self,
        init: Tensor,
        noise_dim: int,
        input_dim: int | None = None,
        z: Tensor | None = None,
        z_name: str | None = None,
    ) -> ScaleMixtureNormal:
        """The prior of a weight of the shape of ``init``, given ``z (..., K)``."""
        if z is None:
            raise ValueError("z: expected the scales of the hierarchy, a tensor (..., K), got None.")
        law = ScaleMixtureNormal(
            z, noise_dim, init.shape, self.precision, self.beta, z_name, init, validate_args=False
        )
        law.input_dim = input_dim
        return law


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}: expected a positive finite number, got {value!r}.")
