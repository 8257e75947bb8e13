r"""ARD variational dropout under the two-level prior: a scale z per noise unit, with a posterior of its own.

.. math:: W = \operatorname{diag}(z \odot \xi)\,\Theta, \qquad \xi_i \sim \mathcal N(1, \alpha_i), \qquad
          q(z) = \mathrm{LogNormal}(\gamma, \delta)

Nguyen et al., "Structured Dropout Variational Inference for Bayesian Neural Networks", 2021: their hierarchy without
reflections (T = 0), which shows what the hierarchy does by itself.

**Cost** against MAP: 1.5 to 2.2 × the time; ARD-VD's memory, 2K numbers and a draw of z per layer. **Prefer it** to
tell what the hierarchy adds from what the rotation adds.
"""

from collections.abc import Callable

from torch import nn

from pyro_vsd.baselines.protocol import GuideMethod
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.nn import HierarchicalPrior, bayesianize
from pyro_vsd.nn.selection import Selector

__all__ = ["ARDVDHierarchical"]


class ARDVDHierarchical(GuideMethod):
    """Gaussian dropout with a droprate per unit and a hierarchical prior.

    Options:

    :param prior: the prior of z and of the weight given z.
    :param kl_weight: λ, a number or a schedule ``step -> weight``.
    :param init_alpha: the geometric mean of the droprates at the start.
    :param conv_noise: noise on ``"out"``- or ``"in"``-put channels of convolutions.
    :param include: which layers are Bayesian, see :func:`~pyro_vsd.nn.bayesianize`; the others are point estimates.
    :param exclude: which layers are not.

    >>> import torch, pyro_vsd as vsd
    >>> method = ARDVDHierarchical(vsd.nn.mlp([4, 8, 3]), num_data=100)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        prior: HierarchicalPrior = HierarchicalPrior(),  # noqa: B008 (frozen)
        kl_weight: float | Callable[[int], float] = 1.0,
        init_alpha: float = 0.2,
        conv_noise: str = "out",
        include: Selector | None = None,
        exclude: Selector | None = None,
    ) -> None:
        model = self.observed(bayesianize(net, prior, include, exclude, inplace=True, conv_noise=conv_noise))
        guide = VSDGuide(model, num_reflections=0, init_alpha=init_alpha, conv_noise=conv_noise)
        self.compose(model, guide, VSD_ELBO(kl_weight=kl_weight, kl_scale="unit"))
