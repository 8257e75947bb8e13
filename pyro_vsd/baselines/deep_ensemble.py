r"""Deep ensemble: several networks, each from its own start.

.. math:: q(W) = \frac1M \sum_{m=1}^{M} \delta(W - \Theta_m)

Lakshminarayanan, Pritzel, Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles", 2017
(without adversarial training).

**Cost** against MAP: M times the time and the memory, in prediction too. **Prefer it** where M times the price can be
paid: it finds several modes, which no method around one mode does.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from pyro_vsd._utils import check_integer, reset_parameters_
from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.stacked import EnsembleMethod, Init
from pyro_vsd.prediction import Prediction

__all__ = ["DeepEnsemble"]


class DeepEnsemble(EnsembleMethod):
    """M point estimates, trained together on the same batches; predictions have at most M samples, and after
    ``stack`` (weights and each member's own σ or temperature, from held-out rows) all M.

    :param num_members: M.
    :param init: draws a network's parameters anew, in place; the first member keeps its own. For the networks of
        ``vsd.nn`` give :func:`~pyro_vsd.nn.xavier_uniform_`.
    :param prior_scale: σ of the Gaussian prior on the weights of each; ``None`` for none.

    >>> method = DeepEnsemble(vsd.nn.mlp([4, 8, 3]), num_data=100, num_members=3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    3
    """

    chooses_layers = False

    def build(
        self,
        net: nn.Module,
        *,
        num_members: int = 5,
        init: Init = reset_parameters_,
        prior_scale: float | None = 1.0,
    ) -> None:
        check_integer("num_members", num_members, 1)
        self.max_samples = num_members
        shared: dict[str, Any] = {"num_data": self.num_data, "task": self.task, "noise": self.noise}
        members = [MAP(net, prior_scale=prior_scale, **shared) for _ in range(num_members)]
        for member in members[1:]:
            init(member.net)
        self.members = nn.ModuleList(members)

    def predict(self, x: Any, num_samples: int = 100, **options: Any) -> Prediction:
        """With equal weights the first ``num_samples`` members, else the stacked mixture of all."""
        of_all = super().predict if self.stacking is not None else super(EnsembleMethod, self).predict
        return of_all(x, num_samples, **options)

    def draw(self, index: int) -> Callable[[Any], Any]:
        distribution_of: Callable[[Any], Any] = self.members[index].draw(0)
        return distribution_of
