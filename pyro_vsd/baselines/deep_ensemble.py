r"""Deep ensemble: several networks, each from its own start.

.. math:: q(W) = \frac1M \sum_{m=1}^{M} \delta(W - \Theta_m)

Lakshminarayanan, Pritzel, Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles", 2017
(without adversarial training).

**Cost** against MAP: M times the time and the memory, in prediction too. **Prefer it** where M times the price can be
paid: it finds several modes, which no method around one mode does.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd.baselines.protocol import NetworkMethod, Observation, call, gaussian_penalty

__all__ = ["DeepEnsemble", "reset_parameters_"]


def reset_parameters_(net: nn.Module) -> nn.Module:
    """Draws every layer's parameters anew, in place, each as its class does when it is made."""
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return net


class DeepEnsemble(NetworkMethod):
    """M point estimates, trained together on the same batches; predictions have at most M samples.

    Options:

    :param num_members: M.
    :param init: draws a network's parameters anew, in place; the first member keeps those it came with. For the
        networks of ``vsd.nn`` give :func:`~pyro_vsd.nn.xavier_uniform_`, their own.
    :param prior_scale: σ of the Gaussian prior on the weights of each; ``None`` for none.

    >>> import torch, pyro_vsd as vsd
    >>> method = DeepEnsemble(vsd.nn.mlp([4, 8, 3]), num_data=100, num_members=3)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    3
    """

    def build(
        self,
        net: nn.Module,
        *,
        num_members: int = 5,
        init: Callable[[nn.Module], Any] = reset_parameters_,
        prior_scale: float | None = 1.0,
    ) -> None:
        if not isinstance(num_members, int) or num_members < 1:
            raise ValueError(f"num_members: expected an integer >= 1, got {num_members!r}.")
        self.max_samples, self.prior_scale = num_members, prior_scale
        nets = [net, *(copy.deepcopy(net) for _ in range(num_members - 1))]
        for other in nets[1:]:
            init(other)
        self.nets = nn.ModuleList(nets)
        self.observations = nn.ModuleList(Observation(self.task, self.noise, member) for member in nets)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        """The mean of the members' losses."""
        losses = []
        for net, observation in zip(self.nets, self.observations, strict=True):
            assert isinstance(observation, Observation)
            log_likelihood = self.num_data / len(y) * observation.log_prob(call(net, x), y).sum()
            losses.append(gaussian_penalty(net.parameters(), self.prior_scale) - log_likelihood)
        return torch.stack(losses).mean()

    def draw(self, index: int) -> Callable[[Any], Any]:
        net, observation = self.nets[index], self.observations[index]
        assert isinstance(observation, Observation)
        return lambda x: observation.law(call(net, x))
