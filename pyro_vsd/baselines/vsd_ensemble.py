r"""An ensemble of networks with structured dropout, each from its own start and with its own weight of the KL.

.. math:: p(y \mid x) = \sum_m w_m\, p_m(y \mid x), \qquad
          p_m(y \mid x) = \mathbb E_{q_m(W)}\, p(y \mid x, W), \quad q_m \text{ trained with } \lambda_m

Weights, and each member's σ or temperature, are fitted on held-out rows by ``stack``. :class:`~pyro_vsd.Ensemble` is
the same with its own training loop, in which members of small networks run as one program. Stacking of predictive
distributions: Yao, Vehtari, Simpson and Gelman, 2018.

**Cost** against MAP: M times that of VSD. **Prefer it** where λ is not to be chosen by hand.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pyro_vsd._utils import reset_parameters_
from pyro_vsd.baselines.protocol import KLWeight
from pyro_vsd.baselines.stacked import EnsembleMethod, Init
from pyro_vsd.baselines.vsd import VSD

__all__ = ["VSDEnsemble"]


class VSDEnsemble(EnsembleMethod):
    """M networks with structured dropout.

    :param kl_weight: λ of each member; their number is M.
    :param init: draws a network's parameters anew, in place; the first member keeps its own.
    :param num_reflections: T.
    :param init_alpha: the geometric mean of the noise variances at the start.

    >>> method = VSDEnsemble(vsd.nn.mlp([4, 8, 3]), num_data=100, kl_weight=(0.1, 1.0))
    >>> method.predict(torch.randn(5, 4), num_samples=10).num_samples
    10
    """

    def build(
        self,
        net: nn.Module,
        *,
        kl_weight: Sequence[KLWeight] = (0.03, 0.1, 0.3, 1.0, 3.0),
        init: Init = reset_parameters_,
        num_reflections: int = 2,
        init_alpha: float = 0.2,
    ) -> None:
        if not kl_weight:
            raise ValueError("kl_weight must have an entry for each member; it is empty.")
        shared: dict[str, Any] = {"num_data": self.num_data, "task": self.task, "noise": self.noise}
        shared |= {"include": self.include, "exclude": self.exclude}
        shared |= {"num_reflections": num_reflections, "init_alpha": init_alpha}
        members = []
        for weight in kl_weight:
            members.append(VSD(net, kl_weight=weight, **shared))  # which copies the network
            init(net)
        self.members = nn.ModuleList(members)
