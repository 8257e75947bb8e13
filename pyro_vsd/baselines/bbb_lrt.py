r"""A factorised Gaussian with the local reparameterisation: noise on pre-activations in the place of weights.

.. math::
    q(W) = \prod_{ij} \mathcal N(W_{ij}; \mu_{ij}, \sigma_{ij}^2), \qquad
    (xW)_j \sim \mathcal N\Big(\sum_i x_i \mu_{ij}, \sum_i x_i^2 \sigma_{ij}^2\Big)

under the prior :math:`\mathcal N(0, \sigma_p^2)`, with the KL in closed form. Every example has its own noise, so
gradients have a far smaller variance than with one draw of the weights for the whole batch. Positions of an example (in
a convolution, or tokens) share weights; their noise is drawn independently, as is usual, with the posterior's moments.

**Reference**: Kingma, Salimans & Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015; Blundell
et al., *Weight Uncertainty in Neural Networks*, 2015.

**Cost** against MAP: two products per layer, about 2 × the time; twice the parameters, twice the pre-activations.
**Prefer it** to plain Bayes by Backprop whenever a Gaussian prior will do: same posterior, calmer gradients.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd.baselines.layers import LayerwiseMethod, RandomLayer, chosen_layers, linear_map
from pyro_vsd.baselines.protocol import KLWeight

__all__ = ["BBBLocal", "LocalLayer", "gaussian_kl"]


class BBBLocal(LayerwiseMethod):
    """Bayes by Backprop with the local reparameterisation, for Linear and convolution layers, biases included.

    :param prior_scale: σ of the Gaussian prior.
    :param init_scale: σ of every weight at the start; the means start at the network's weights.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.

    >>> BBBLocal(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self, net: nn.Module, *, prior_scale: float = 1.0, init_scale: float = 0.05, kl_weight: KLWeight = 1.0
    ) -> None:
        layers = chosen_layers(self, net)
        self.replace(net, layers, lambda layer: LocalLayer(layer, prior_scale, init_scale), kl_weight)


class LocalLayer(RandomLayer):
    """A layer with a factorised Gaussian posterior, drawn at its outputs; its options are those of the method."""

    def __init__(self, layer: Any, prior_scale: float, init_scale: float):
        super().__init__(layer)
        self.prior_scale = prior_scale
        start = 2 * math.log(init_scale)
        self.log_variance = nn.ParameterDict({name: torch.full_like(p, start) for name, p in layer.named_parameters()})

    def variance(self, x: Tensor) -> Tensor:
        """The variance of the outputs."""
        variances = {name: value.exp() for name, value in self.log_variance.items()}
        return linear_map(self.mean, x.square(), variances["weight"], variances.get("bias"))

    def forward(self, x: Tensor) -> Tensor:
        variance = self.variance(x)  # before the mean: the order in which ELRG's gradients are summed
        return self.noisy(self.mean(x), variance)

    def kl(self) -> Tensor:
        pairs = [(mean, self.log_variance[name]) for name, mean in self.mean.named_parameters()]
        terms = [gaussian_kl(m.square().sum(), v.exp().sum(), v, self.prior_scale) for m, v in pairs]
        return torch.stack(terms).sum()


def gaussian_kl(square: Tensor, variance: Tensor, log_variance: Tensor, prior_scale: float) -> Tensor:
    r""":math:`\frac12 \sum [(\sigma^2 + \mu^2) / \sigma_p^2 - 1 - \log(\sigma^2 / \sigma_p^2)]`, from the sums of
    squared means and of variances."""
    constant = log_variance.numel() * (2 * math.log(prior_scale) - 1)
    return 0.5 * ((square + variance) / prior_scale**2 - log_variance.sum() + constant)
