"""Back to plain PyTorch: the network at its posterior mean, and the same with its noisiest units switched off."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_vsd._utils import check_positive
from pyro_vsd.nn.bayesian_network import BayesianNetwork
from pyro_vsd.nn.likelihoods import ObservationModel

__all__ = ["PrunedNetwork", "mean_network", "prune", "rank_units"]


def mean_network(model: nn.Module, guide: Any) -> nn.Module:
    r"""The network at the posterior mean, as a plain ``nn.Module``: no Pyro in it, ready for ``torch.save``,
    ``torch.compile``, ONNX, or as a point estimate at the cost of one forward pass.

    .. math:: W = \mathbb E[z] \odot \Theta \qquad (\xi = 1)

    Parameters and buffers are copies; shared weights stay shared; names are those of the network that
    :func:`bayesianize` was given, so its ``state_dict`` loads there.

    :param model: an observation model, whose network is returned, or the Bayesian network itself.
    :param guide: what was trained: ``guide.mean()`` gives the mean of each site.

    >>> net = vsd.nn.mlp([4, 8, 3])
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=10)
    >>> plain = vsd.nn.mean_network(model, vsd.VSDGuide(model))
    >>> torch.equal(plain(torch.ones(2, 4)), net(torch.ones(2, 4)))  # not trained yet: Θ is where it started
    True
    """
    return plain_copy(network_of(model), guide.mean())


class PrunedNetwork(NamedTuple):
    """What :func:`prune` gives.

    :ivar network: the plain network, weights of pruned units at zero.
    :ivar pruned: for each site, which of its K units were pruned.

    >>> vsd.nn.PrunedNetwork(nn.Linear(3, 1), {"net.0.weight": torch.tensor([True, False, True])}).counts
    {'net.0.weight': (2, 3)}
    """

    network: nn.Module
    pruned: dict[str, Tensor]

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """For each site the number of pruned units and of all units."""
        return {site: (int(mask.sum()), mask.numel()) for site, mask in self.pruned.items()}


def prune(model: nn.Module, guide: Any, max_alpha: float) -> PrunedNetwork:
    r"""The mean network without the units whose noise exceeds a bound: weights of units k with
    :math:`s_k >` ``max_alpha`` are set to zero.

    :math:`s = \operatorname{diag}(U \operatorname{diag}(\alpha) U^\top)` is the variance of each unit's noise around
    its mean of 1: at 1 signal and noise are equal. Without reflections it is α. With them it is *not*: a rotation
    spreads :math:`\alpha_k` over other units, and to prune by α itself would switch off the wrong ones.

    :param model: an observation model or a Bayesian network.
    :param guide: what was trained, with ``mean()``, ``noise(site)`` and ``noise_dim(site)``.
    :param max_alpha: the largest variance of a unit's noise that stays, positive.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=10)
    >>> vsd.nn.prune(model, vsd.VSDGuide(model), max_alpha=1e6).counts
    {'net.0.weight': (0, 4), 'net.2.weight': (0, 8)}
    """
    check_positive("max_alpha", max_alpha)
    network, mean = network_of(model), dict(guide.mean())
    masks: dict[str, Tensor] = {}
    for site in _weight_sites(network):
        mask = guide.noise(site).variance.detach() > max_alpha
        masks[site] = mask
        shape = [1] * mean[site].dim()
        shape[guide.noise_dim(site)] = -1
        mean[site] = mean[site].masked_fill(mask.reshape(shape), 0.0)
    return PrunedNetwork(plain_copy(network, mean), masks)


def rank_units(model: nn.Module, guide: Any) -> dict[str, Tensor]:
    """For each weight its noise units from the surest to the noisiest, by the variance s of each unit's noise (see
    :func:`prune`): indices ``(K,)``.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=10)
    >>> {site: order.shape for site, order in vsd.nn.rank_units(model, vsd.VSDGuide(model)).items()}
    {'net.0.weight': torch.Size([4]), 'net.2.weight': torch.Size([8])}
    """
    return {site: guide.noise(site).variance.detach().argsort() for site in _weight_sites(network_of(model))}


def network_of(model: nn.Module) -> BayesianNetwork:
    net = model.net if isinstance(model, ObservationModel) else model
    if not isinstance(net, BayesianNetwork):
        raise ValueError(
            f"model: a {type(net).__name__} does not come from vsd.nn.bayesianize, so it has no plain network. Pass "
            "the part of it that does."
        )
    return net


def _weight_sites(net: BayesianNetwork) -> list[str]:
    """The sites that ``bayesianize`` made of weights, by their names in a trace."""
    networks = [module for module in net.modules() if isinstance(module, BayesianNetwork)]
    return [site_name(network, site.name) for network in networks for site in network.weight_sites]


def site_name(network: BayesianNetwork, name: str) -> str:
    return f"{network._pyro_name}.{name}" if network._pyro_name else name


def plain_copy(net: BayesianNetwork, mean: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network with parameters at the mean in the place of its random weights."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, BayesianNetwork):
            for site in module.weight_sites:
                _fix(module, site.keys, site_name(module, site.name), mean)
    plain = net.network
    for parent in list(plain.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, BayesianNetwork):
                parent._modules[name] = child.network
    left = [type(module).__name__ for module in plain.modules() if isinstance(module, PyroModule)]
    if left:
        raise ValueError(f"model: {left[0]} is a PyroModule written by hand, which cannot be made plain.")
    return plain


def _fix(network: BayesianNetwork, keys: tuple[str, ...], site: str, mean: Mapping[str, Tensor]) -> None:
    """Puts a parameter at its mean in all the places of a random weight."""
    if site not in mean:
        raise ValueError(
            f"guide: it has no mean for the site {site!r}, only for {list(mean)}. Pass the model that the guide was "
            "made for."
        )
    parameter = nn.Parameter(mean[site].detach().clone())
    for key in keys:
        path, _, name = key.rpartition(".")
        module = network.network.get_submodule(path)
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
        # in front of the others, where a layer has its weight
        others = dict(module._parameters)
        module._parameters.clear()
        module._parameters[name] = parameter
        module._parameters.update(others)
