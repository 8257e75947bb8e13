"""Priors of a layer's weight: a Gaussian, a hierarchy with a scale per noise unit, or any distribution."""

from dataclasses import dataclass
from typing import Any, Protocol

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd._utils import check_choice, check_positive
from pyro_vsd.distributions import ScaleMixtureNormal

__all__ = ["GaussianPrior", "HierarchicalPrior", "Prior", "as_prior"]

_HYPERPRIORS = {"inverse_gamma": dist.InverseGamma, "gamma": dist.Gamma, "half_cauchy": dist.HalfCauchy}


class Prior(Protocol):
    """What :func:`~pyro_vsd.nn.bayesianize` needs of a prior: two functions of the weight that the layer comes with.

    Where the same distribution serves each entry of the weight, pass that distribution instead. A class of your own
    must be picklable.
    """

    def scales(self, init: Tensor, noise_dim: int) -> Any:
        """The prior of z, of event shape ``(K,)``, or ``None`` where there is no hierarchy."""

    def weight(self, init: Tensor, noise_dim: int, z: Tensor | None = None) -> Any:
        """The prior of the weight, of the shape of ``init``, given ``z`` where there is one."""


def as_prior(prior: Any) -> Prior:
    """A prior as :func:`~pyro_vsd.nn.bayesianize` takes it; a distribution is that of each entry."""
    if isinstance(prior, TorchDistributionMixin):
        return _EntryPrior(prior)
    methods = callable(getattr(prior, "weight", None)) and callable(getattr(prior, "scales", None))
    if isinstance(prior, type) or not methods:
        raise TypeError(
            f"prior must be a GaussianPrior, a HierarchicalPrior or one of pyro.distributions, not {prior!r}."
        )
    checked: Prior = prior
    return checked


@dataclass(frozen=True)
class GaussianPrior:
    r"""Independent Gaussians on the entries of a weight.

    .. math:: W_{ij} \sim \mathcal N(0, \sigma^2)

    The scale acts only where the prior is scored as stated: ``VSD_ELBO(prior="model")`` and Pyro's own ELBOs. The
    default objective replaces it by its empirical-Bayes optimum, whatever σ is.

    :param scale: σ, positive.

    >>> vsd.nn.GaussianPrior(0.5).weight(torch.zeros(4, 3), noise_dim=-1).variance.sum()
    tensor(3.)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def scales(self, init: Tensor, noise_dim: int) -> None:
        """No hierarchy: ``None``."""

    def weight(self, init: Tensor, noise_dim: int, z: Tensor | None = None) -> Any:
        """The prior of a weight of the shape of ``init``."""
        zero = init.new_zeros(())
        return dist.Normal(zero, zero + self.scale, validate_args=False).expand(init.shape).to_event(init.dim())


@dataclass(frozen=True)
class _EntryPrior:
    """The same distribution for each entry of a weight."""

    entry: Any

    def __post_init__(self) -> None:
        if self.entry.batch_shape or self.entry.event_shape or self.entry.support is not constraints.real:
            raise ValueError(f"prior must be the distribution of one number, positive or negative, not {self.entry}.")

    def scales(self, init: Tensor, noise_dim: int) -> None:
        """No hierarchy: ``None``."""

    def weight(self, init: Tensor, noise_dim: int, z: Tensor | None = None) -> Any:
        return _like(self.entry, init).expand(init.shape).to_event(init.dim())


@dataclass(frozen=True)
class HierarchicalPrior:
    r"""The two-level prior: a scale :math:`z_i` per noise unit, shared by all columns, then the weight given z.

    .. math:: z_i \sim p(z), \qquad W_{ij} \mid z \sim \mathcal N(0, z_i / \beta_{ij})

    With :math:`a = b = 1` and with a half-Cauchy of scale 1 the bulk of z lies around one.

    Under the default objective β is at its optimum, so :math:`\mathbb E[z]` is *no* score of relevance: only
    :math:`z \Theta` reaches the data. Use :math:`\mathbb E[z_i] \lVert \Theta_{i:} \rVert`, the norm of a unit in
    ``guide.mean()``. With ``VSD_ELBO(prior="model")`` the scale :math:`\mathbb E[z]` itself shrinks for irrelevant
    units and their noise, ``guide.noise(site).variance``, grows. (Not α: a rotation mixes it between units.)

    :param hyperprior: :math:`p(z)`: ``"inverse_gamma"`` (concentration a, rate b), ``"gamma"`` (concentration a,
        rate b), ``"half_cauchy"`` (scale a, no b), or any distribution of a positive number. Its KL is in closed form
        where one is registered, else sampled.
    :param a: concentration or scale, positive.
    :param b: rate, positive; ``None`` is 1.
    :param beta: which optimum replaces β: the ``"paper"``'s, taken before the expectation over z, or the ``"full"``
        one, taken after it; see :func:`~pyro_vsd.distributions.hierarchical_kl`.
    :param precision: β where the prior is scored as stated (``prior="model"``).
    :param channels: the channels of convolutions that z, and with it the noise, runs along: ``"out"`` or ``"in"``.

    >>> prior = vsd.nn.HierarchicalPrior("gamma", a=2.0, b=4.0)
    >>> prior.scales(torch.zeros(5, 3), noise_dim=-1).mean
    tensor([0.5000, 0.5000, 0.5000])
    """

    hyperprior: Any = "inverse_gamma"
    a: float = 1.0
    b: float | None = None
    beta: str = "paper"
    precision: float = 1.0
    channels: str = "out"

    def __post_init__(self) -> None:
        check_choice("beta", self.beta, ("paper", "full"))
        check_choice("channels", self.channels, ("out", "in"))
        check_positive("precision", self.precision)
        check_positive("a", self.a)
        if self.b is not None:
            check_positive("b", self.b)
        if isinstance(self.hyperprior, torch.distributions.Distribution):
            support: Any = self.hyperprior.support
            positive = getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound")
            if self.hyperprior.batch_shape or self.hyperprior.event_shape or support.is_discrete or not positive:
                raise ValueError(f"hyperprior must be the distribution of one positive number, not {self.hyperprior}.")
            if self.a != 1.0 or self.b is not None:
                raise ValueError("a and b go with the name of a hyperprior, not with a distribution.")
            return
        check_choice("hyperprior", self.hyperprior, tuple(_HYPERPRIORS))
        if self.hyperprior == "half_cauchy" and self.b is not None:
            raise ValueError(f"b={self.b} has no meaning for a half-Cauchy, whose scale is a.")

    def scales(self, init: Tensor, noise_dim: int) -> Any:
        """The hyperprior of z: event shape ``(K,)``."""
        if isinstance(self.hyperprior, str):
            numbers = (self.a,) if self.hyperprior == "half_cauchy" else (self.a, 1.0 if self.b is None else self.b)
            made = _HYPERPRIORS[self.hyperprior](*map(init.new_tensor, numbers), validate_args=False)
        else:
            made = _like(self.hyperprior, init)
        return made.expand([init.shape[noise_dim]]).to_event(1)

    def weight(self, init: Tensor, noise_dim: int, z: Tensor | None = None) -> ScaleMixtureNormal:
        """The prior of a weight of the shape of ``init``, given ``z (..., K)``."""
        if z is None:
            raise ValueError("z: the scales of the hierarchy, a tensor (..., K), are missing.")
        return ScaleMixtureNormal(z, noise_dim, init.shape, self.precision, self.beta, validate_args=False)


def _like(distribution: Any, init: Tensor) -> Any:
    """A distribution with parameters of the dtype and on the device of ``init``."""
    parameters = {name: torch.as_tensor(getattr(distribution, name)) for name in distribution.arg_constraints}
    if all(value.dtype == init.dtype and value.device == init.device for value in parameters.values()):
        return distribution
    return type(distribution)(**{name: value.to(init) for name, value in parameters.items()}, validate_args=False)
