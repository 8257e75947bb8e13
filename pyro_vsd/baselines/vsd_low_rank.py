r"""Variational structured dropout whose Householder vectors come from a small network.

.. math:: W = \operatorname{diag}(\xi)\,\Theta, \qquad \xi \sim \mathcal N(1, U \operatorname{diag}(\alpha)\,U^\top),
          \qquad v_t = A \operatorname{relu}(B v_{t-1} + b) + a, \quad A \in \mathbb R^{K \times r}

Nguyen et al., "Structured Dropout Variational Inference for Bayesian Neural Networks", 2021, appendix.

**Cost** against MAP: VSD's and that of a small network per layer, 1.7 to 2.1 × the time; :math:`O(rK)` numbers more.
**Prefer it** to reproduce the paper; free vectors are cheaper and were no worse.
"""

from collections.abc import Callable

from torch import nn

from pyro_vsd.baselines.protocol import GuideMethod
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.nn import bayesianize
from pyro_vsd.nn.selection import Selector

__all__ = ["VSDLowRank"]


class VSDLowRank(GuideMethod):
    """Structured dropout with vectors from low-rank networks.

    Options:

    :param rank: hidden units of the networks, r; the paper takes 2, 5 and 10.
    :param num_reflections: T.
    :param kl_weight: λ, a number or a schedule ``step -> weight``.
    :param kl_scale: ``"unit"``, the KL of the noise, or ``"weight"``, the paper's with its factor Q.
    :param init_alpha: the geometric mean of the droprates at the start.
    :param conv_noise: noise on ``"out"``- or ``"in"``-put channels of convolutions.
    :param include: which layers are Bayesian, see :func:`~pyro_vsd.nn.bayesianize`; the others are point estimates.
    :param exclude: which layers are not.

    >>> import torch, pyro_vsd as vsd
    >>> method = VSDLowRank(vsd.nn.mlp([4, 8, 3]), num_data=100, rank=2)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        rank: int = 5,
        num_reflections: int = 2,
        kl_weight: float | Callable[[int], float] = 1.0,
        kl_scale: str = "unit",
        init_alpha: float = 0.2,
        conv_noise: str = "out",
        include: Selector | None = None,
        exclude: Selector | None = None,
    ) -> None:
        model = self.observed(bayesianize(net, include=include, exclude=exclude, inplace=True, conv_noise=conv_noise))
        guide = VSDGuide(
            model,
            num_reflections=num_reflections,
            vectors="low_rank",
            rank=rank,
            init_alpha=init_alpha,
            conv_noise=conv_noise,
        )
        self.compose(model, guide, VSD_ELBO(kl_weight=kl_weight, kl_scale=kl_scale))
