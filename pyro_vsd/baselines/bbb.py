r"""Bayes by Backprop (BBB): a factorised Gaussian over weights, under a prior that is a mixture of two scales.

.. math::
    q(w) = \prod_i \mathcal N(w_i; \mu_i, \sigma_i^2), \qquad
    p(w) = \prod_i \big[\pi\, \mathcal N(w_i; 0, \sigma_1^2) + (1 - \pi)\, \mathcal N(w_i; 0, \sigma_2^2)\big]

for weights and biases. The KL has no closed form: it is averaged over the draws of the step, two as in the paper. A
draw of the weights serves the whole batch. In Pyro's terms: a model whose weights are sample sites, an ``AutoNormal``
guide and ``Trace_ELBO``.

**Reference**: Blundell et al., *Weight Uncertainty in Neural Networks*, 2015.

**Cost** against MAP: as many passes as draws, each with a draw of all weights and their densities: with two, about 10 ×
the time on wide Linear layers and 4 × on LeNet; twice the parameters, and a copy of the weights per draw. **Prefer it**
where the prior matters: any density will do. With a Gaussian prior the method bbb_lrt has the same posterior and calmer
gradients.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions import TorchDistribution
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd.baselines.layers import chosen_layers
from pyro_vsd.baselines.protocol import GuideMethod, latent_sites_of, network_init
from pyro_vsd.nn.conversion import to_pyro
from pyro_vsd.nn.selection import Selector
from pyro_vsd.nn.sites import init_name

__all__ = ["BBB", "TwoScaleNormal"]


class BBB(GuideMethod):
    """Bayes by Backprop for Linear and convolution layers, biases included.

    Options:

    :param pi: π, the share of the prior's wide component. The paper searches π in ¼, ½, ¾,
        :math:`-\\log \\sigma_1` in 0, 1, 2 and :math:`-\\log \\sigma_2` in 6, 7, 8.
    :param sigma1: the prior's wide scale.
    :param sigma2: the prior's narrow scale.
    :param init_scale: σ of every weight at the start; the means start at the network's weights.
    :param num_particles: draws of the weights per step.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.
    :param include: which layers are Bayesian, see :func:`~pyro_vsd.nn.bayesianize`; the others are point estimates.
    :param exclude: which layers are not.

    >>> import pyro_vsd as vsd
    >>> method = BBB(vsd.nn.mlp([4, 8, 3]), num_data=100)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        pi: float = 0.5,
        sigma1: float = 1.0,
        sigma2: float = math.exp(-6),
        init_scale: float = 0.05,
        num_particles: int = 2,
        kl_weight: float | Callable[[int], float] = 1.0,
        include: Selector | None = None,
        exclude: Selector | None = None,
    ) -> None:
        layers = chosen_layers(net, include, exclude)
        to_pyro(net)
        for layer in layers.values():
            for name, p in list(layer.named_parameters()):
                setattr(layer, name, PyroSample(TwoScaleNormal(pi, sigma1, sigma2, p.detach(), validate_args=False)))
                # tells observation models the dtype and the device of a network without parameters
                layer.register_buffer(init_name(name), p.detach(), persistent=False)
        model = self.observed(net)
        guide = AutoNormal(latent_sites_of(model), init_loc_fn=network_init, init_scale=init_scale)
        self.kl_weight = kl_weight
        self.compose(model, guide, Trace_ELBO(num_particles=num_particles))
        with self.own_store():
            guide()  # makes its parameters

    def loss(self, x: Any, y: Tensor) -> Tensor:
        with _LatentScale(self.kl_weight(self.num_steps) if callable(self.kl_weight) else self.kl_weight):
            return super().loss(x, y)


class _LatentScale(Messenger):
    """Scales the densities of latent sites, in the model and in the guide: their difference is the KL."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.scale


class TwoScaleNormal(TorchDistribution):
    r"""Independent mixtures :math:`\pi\, \mathcal N(0, \sigma_1^2) + (1 - \pi)\, \mathcal N(0, \sigma_2^2)`.

    :param pi: the share of the first component, between 0 and 1.
    :param sigma1: its scale.
    :param sigma2: the scale of the second.
    :param init: a tensor of the event's shape, where a posterior's mean starts.

    >>> TwoScaleNormal(0.25, 2.0, 1.0, torch.zeros(3)).variance
    tensor([1.7500, 1.7500, 1.7500])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, pi: float, sigma1: float, sigma2: float, init: Tensor, *, validate_args: bool | None = None):
        if not 0 < pi < 1:
            raise ValueError(f"pi: expected a number between 0 and 1, got {pi!r}.")
        for name, value in (("sigma1", sigma1), ("sigma2", sigma2)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a positive number, got {value!r}.")
        self.pi, self.sigma1, self.sigma2, self.init = pi, sigma1, sigma2, init
        super().__init__(torch.Size(), init.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new = self._get_checked_instance(TwoScaleNormal, _instance)
        new.pi, new.sigma1, new.sigma2, new.init = self.pi, self.sigma1, self.sigma2, self.init
        TorchDistribution.__init__(new, torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.init).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        return self.mean + self.pi * self.sigma1**2 + (1 - self.pi) * self.sigma2**2

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        eps, u = (draw(shape, dtype=self.init.dtype, device=self.init.device) for draw in (torch.randn, torch.rand))
        return eps * torch.where(u < self.pi, self.sigma1, self.sigma2)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        square = value.square()
        wide, narrow = (
            math.log(share / sigma) - square / (2 * sigma**2)
            for share, sigma in ((self.pi, self.sigma1), (1 - self.pi, self.sigma2))
        )
        # log(e^wide + e^narrow). Below -80 the narrow share is nothing, and its exponential a subnormal number, which
        # processors are slow at.
        density = wide + F.softplus((narrow - wide).clamp(min=-80.0))
        density = density.flatten(value.dim() - len(self.event_shape)).sum(-1)
        constant = 0.5 * math.log(2 * math.pi) * self.event_shape.numel()
        return (density - constant).expand(torch.broadcast_shapes(density.shape, self.batch_shape))
