r"""Variational structured dropout: correlated Gaussian dropout noise, its covariance made of Householder reflections.

.. math:: W = \operatorname{diag}(\xi)\,\Theta, \qquad \xi \sim \mathcal N(1, U \operatorname{diag}(\alpha)\,U^\top),
          \qquad U = H_T \cdots H_1

Nguyen et al., "Structured Dropout Variational Inference for Bayesian Neural Networks", 2021.

**Cost** against MAP: correlated noise per example, 1.5 to 1.9 × the time at T = 2; :math:`O(TK)` numbers beside the
weights. **Prefer it** where noise per unit is worth learning and units work together: calibrated predictions at about
the price of dropout.
"""

from collections.abc import Callable

from torch import nn

from pyro_vsd.baselines.protocol import GuideMethod
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.nn import bayesianize
from pyro_vsd.nn.selection import Selector

__all__ = ["VSD"]


class VSD(GuideMethod):
    """Structured dropout with the prior's scale optimised out.

    Options:

    :param num_reflections: T.
    :param kl_weight: λ, a number or a schedule ``step -> weight``.
    :param kl_scale: ``"unit"``, the KL of the noise, or ``"weight"``, the paper's with its factor Q.
    :param init_alpha: the geometric mean of the droprates at the start.
    :param conv_noise: noise on ``"out"``- or ``"in"``-put channels of convolutions.
    :param include: which layers are Bayesian, see :func:`~pyro_vsd.nn.bayesianize`; the others are point estimates.
    :param exclude: which layers are not.

    >>> import torch, pyro_vsd as vsd
    >>> method = VSD(vsd.nn.mlp([4, 8, 3]), num_data=100, num_reflections=5)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        num_reflections: int = 2,
        kl_weight: float | Callable[[int], float] = 1.0,
        kl_scale: str = "unit",
        init_alpha: float = 0.2,
        conv_noise: str = "out",
        include: Selector | None = None,
        exclude: Selector | None = None,
    ) -> None:
        model = self.observed(bayesianize(net, include=include, exclude=exclude, inplace=True, conv_noise=conv_noise))
        guide = VSDGuide(model, num_reflections=num_reflections, init_alpha=init_alpha, conv_noise=conv_noise)
        self.compose(model, guide, VSD_ELBO(kl_weight=kl_weight, kl_scale=kl_scale))
