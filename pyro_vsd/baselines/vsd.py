r"""Variational structured dropout and its relatives: Gaussian dropout noise, one variance per unit.

.. math:: W = \operatorname{diag}(z \odot \xi)\,\Theta, \qquad
          \xi \sim \mathcal N(1, U \operatorname{diag}(\alpha)\,U^\top), \qquad U = H_T \cdots H_1

The KL is that of the noise with the prior's scale at its optimum. Five methods are one class with different presets:

``vsd``
    z = 1, and T free Householder vectors per layer. **Cost** against MAP: 1.5 to 1.9 × the time at T = 2;
    :math:`O(TK)` parameters. **Prefer it** where units work together: calibrated at about the price of dropout.
``vsd_low_rank``
    Vectors from a small network, :math:`v_t = A \operatorname{relu}(B v_{t-1} + b) + a` with
    :math:`A \in \mathbb R^{K \times r}`. **Cost**: 1.7 to 2.1 × the time; :math:`O(rK)` parameters. **Prefer it** to
    reproduce the paper; free vectors are cheaper and were no worse.
``vsd_hierarchical``
    A scale z per unit with the posterior :math:`q(z) = \mathrm{LogNormal}(\gamma, \delta)`, under a two-level prior.
    **Cost**: 1.8 to 2.3 × the time; 2K parameters more. **Prefer it** where whole units differ in scale.
``ard_vd``
    Without reflections (T = 0): independent noise, :math:`\mathrm{KL} = \tfrac12 \sum_i \log(1 + 1 / \alpha_i)`. This
    is the KL per noise unit, :math:`1/Q` of the KL per weight (Q: all entries of a weight that share a unit).
    **Cost**: 1.5 to 1.7 × the time; K parameters. **Prefer it** to VD in every case, to VSD where units act alone.
``ard_vd_hierarchical``
    Both: the hierarchy without reflections. **Cost**: 1.5 to 2.2 × the time. **Prefer it** to tell what the hierarchy
    adds from what the rotation adds.

Nguyen et al., "Structured Dropout Variational Inference for Bayesian Neural Networks", 2021; ARD-VD: Kharitonov,
Molchanov, Vetrov, "Variational Dropout via Empirical Bayes", 2018.
"""

from typing import Any

from torch import nn

from pyro_vsd.baselines.protocol import GuideMethod, KLWeight
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.nn import GaussianPrior, HierarchicalPrior, bayesianize

__all__ = ["ARDVD", "VSD", "ARDVDHierarchical", "VSDHierarchical", "VSDLowRank"]

# Options of every preset, and those of a preset with reflections.
_NOISE: dict[str, Any] = {"kl_weight": 1.0, "init_alpha": 0.2, "conv_noise": "out"}
_ROTATED: dict[str, Any] = {"num_reflections": 2, "kl_scale": "unit", **_NOISE}


class VSD(GuideMethod):
    """Structured dropout. A preset has the options in its ``defaults``; the others keep the values of ``build``.

    :param num_reflections: T.
    :param kl_scale: ``"unit"``, the KL of the noise, or ``"weight"``, the paper's with its factor Q.
    :param kl_weight: λ, a number or a schedule ``step -> weight``.
    :param init_alpha: the geometric mean of the noise variances at the start.
    :param conv_noise: noise on ``"out"``- or ``"in"``-put channels of convolutions.
    :param rank: r, hidden units of the networks that make the vectors; the paper takes 2, 5 and 10. ``None``: the
        vectors are free.
    :param prior: of the weight; a :class:`~pyro_vsd.nn.HierarchicalPrior` has a scale z per unit.

    >>> method = VSD(vsd.nn.mlp([4, 8, 3]), num_data=100, num_reflections=5)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    defaults = _ROTATED

    @classmethod
    def options(cls) -> dict[str, Any]:
        return cls.defaults

    def build(
        self,
        net: nn.Module,
        *,
        num_reflections: int = 0,
        kl_scale: str = "unit",
        kl_weight: KLWeight = 1.0,
        init_alpha: float = 0.2,
        conv_noise: str = "out",
        rank: int | None = None,
        prior: GaussianPrior | HierarchicalPrior = GaussianPrior(),  # noqa: B008 (frozen)
    ) -> None:
        model = self.observed(bayesianize(net, prior, self.include, self.exclude, inplace=True))
        options: dict[str, Any] = {"init_alpha": init_alpha, "conv_noise": conv_noise}
        if rank is not None:
            options |= {"vectors": "low_rank", "rank": rank}
        guide = VSDGuide(model, num_reflections=num_reflections, **options)
        self.compose(model, guide, VSD_ELBO(kl_weight=kl_weight, kl_scale=kl_scale))


class VSDLowRank(VSD):
    defaults = {"rank": 5, **_ROTATED}


class VSDHierarchical(VSD):
    defaults = {"prior": HierarchicalPrior(), **_ROTATED}


class ARDVD(VSD):
    defaults = _NOISE


class ARDVDHierarchical(VSD):
    defaults = {"prior": HierarchicalPrior(), **_NOISE}
