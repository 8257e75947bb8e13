r"""Variational Gaussian dropout: multiplicative noise with learned variances under a log-uniform prior.

.. math:: W = \operatorname{diag}(\xi)\,\Theta, \qquad \xi_i \sim \mathcal N(1, \alpha_i),\ \alpha_i \le 1, \qquad
          p(\log |\xi_i|) \propto 1

Kingma, Salimans, Welling, "Variational Dropout and the Local Reparameterization Trick", 2015: their correlated weight
noise, one variance per unit. Their KL is a polynomial, good to about 0.02 up to α = 1 and without meaning above, so α
is held there. It is known up to a constant, since the prior is improper.

**Cost** against MAP: noise per example, 1.5 to 1.9 × the time; K numbers per layer beside the weights. **Prefer it** to
reproduce older results; ARD-VD is the same noise without the bound.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd.baselines.protocol import GuideMethod, KLWeight
from pyro_vsd.distributions import StructuredDropout
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.nn import bayesianize

__all__ = ["VD", "log_uniform_kl", "noise_kl"]

# Kingma et al. 2015, equation 14: fitted to the KL for α up to 1.
C1, C2, C3 = 1.16145124, -1.50204118, 0.58629921


class VD(GuideMethod):
    """Gaussian dropout with a noise variance of at most 1 per unit.

    :param kl_weight: λ, a number or a schedule ``step -> weight``.
    :param init_alpha: the geometric mean of the noise variances at the start.
    :param conv_noise: noise on ``"out"``- or ``"in"``-put channels of convolutions.

    >>> VD(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self, net: nn.Module, *, kl_weight: KLWeight = 1.0, init_alpha: float = 0.2, conv_noise: str = "out"
    ) -> None:
        model = self.observed(bayesianize(net, include=self.include, exclude=self.exclude, inplace=True))
        guide = VSDGuide(model, num_reflections=0, init_alpha=init_alpha, conv_noise=conv_noise)
        self.compose(model, guide, VSD_ELBO(kl_weight=kl_weight, unit_kl=noise_kl))
        self.hold_alpha()

    def step(self, x: Any, y: Tensor) -> float:
        loss = super().step(x, y)
        self.hold_alpha()
        return loss

    @torch.no_grad()
    def hold_alpha(self) -> None:
        """Puts noise variances above 1 back to 1."""
        for log_alpha in self.guide.log_alpha.parameters():
            log_alpha.clamp_(max=0.0)


def log_uniform_kl(alpha: Tensor) -> Tensor:
    r"""The KL of :math:`\mathcal N(1, \alpha)` to the log-uniform prior, up to a constant, for α up to 1; elementwise.

    .. math:: \mathrm{KL} \approx -\tfrac12 \log\alpha - c_1 \alpha - c_2 \alpha^2 - c_3 \alpha^3

    >>> round(log_uniform_kl(torch.ones(())).item(), 4)
    -0.2457
    """
    return -0.5 * alpha.log() - alpha * (C1 + alpha * (C2 + alpha * C3))


def noise_kl(posterior: StructuredDropout) -> Tensor:
    """The KL of a noise vector, for ``VSD_ELBO(unit_kl=…)``."""
    return log_uniform_kl(posterior.alpha).sum(-1)
