"""Back to plain PyTorch: the network at its posterior mean, and the same with its noisiest units switched off."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_vsd.nn.conversion import plain_class, sources
from pyro_vsd.nn.observation import ObservationModel
from pyro_vsd.nn.sites import ScaleSite, init_name

__all__ = ["PrunedNetwork", "mean_network", "prune", "rank_units"]


def mean_network(model: nn.Module, guide: Any) -> nn.Module:
    r"""The network at the posterior mean, as a plain ``nn.Module``: no Pyro in it, ready for ``torch.save``,
    ``torch.compile``, ONNX, or as a point estimate at the cost of one forward pass.

    .. math:: W = \mathbb E[z] \odot \Theta \qquad (\xi = 1)

    Parameters and buffers are copies; shared weights stay shared; names are those of the network that
    :func:`bayesianize` was given, so its ``state_dict`` loads there.

    :param model: an observation model, whose network is returned, or the Bayesian network itself.
    :param guide: what was trained: ``guide.mean()`` gives the mean of each site.

    >>> import torch
    >>> import pyro_vsd as vsd
    >>> net = vsd.nn.mlp([4, 8, 3])
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=10)
    >>> plain = mean_network(model, vsd.VSDGuide(model))
    >>> torch.equal(plain(torch.ones(2, 4)), net(torch.ones(2, 4)))  # not trained yet: Θ is where it started
    True
    """
    return _plain_copy(_network(model), guide.mean())


class PrunedNetwork(NamedTuple):
    """What :func:`prune` gives.

    :ivar network: the plain network, weights of pruned units at zero.
    :ivar pruned: for each site, which of its K units were pruned.

    >>> import torch
    >>> PrunedNetwork(nn.Linear(3, 1), {"net.0.weight": torch.tensor([True, False, True])}).counts
    {'net.0.weight': (2, 3)}
    """

    network: nn.Module
    pruned: dict[str, Tensor]

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """For each site the number of pruned units and of all units."""
        return {site: (int(mask.sum()), mask.numel()) for site, mask in self.pruned.items()}


def prune(model: nn.Module, guide: Any, max_alpha: float) -> PrunedNetwork:
    r"""The mean network without the units whose noise drowns them: weights of units k with
    :math:`s_k >` ``max_alpha`` are set to zero.

    :math:`s = \operatorname{diag}(U \operatorname{diag}(\alpha) U^\top)` is the variance of each unit's noise around
    its mean of 1: at 1 signal and noise are equal. Without reflections it is α. With them it is *not*: a rotation
    spreads :math:`\alpha_k` over other units, and to prune by α itself would switch off the wrong ones.

    :param model: an observation model or a Bayesian network.
    :param guide: what was trained: ``mean()``, ``noise(site)`` and ``noise_dim(site)`` are asked.
    :param max_alpha: the largest variance of a unit's noise that stays, positive.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=10)
    >>> prune(model, vsd.VSDGuide(model), max_alpha=1e6).counts
    {'net.0.weight': (0, 4), 'net.2.weight': (0, 8)}
    """
    if not max_alpha > 0:
        raise ValueError(f"max_alpha: expected a positive number, got {max_alpha!r}.")
    network, mean = _network(model), dict(guide.mean())
    masks: dict[str, Tensor] = {}
    for site in _weight_sites(network):
        mask = guide.noise(site).variance.detach() > max_alpha
        masks[site] = mask
        shape = [1] * mean[site].dim()
        shape[guide.noise_dim(site)] = -1
        mean[site] = mean[site].masked_fill(mask.reshape(shape), 0.0)
    return PrunedNetwork(_plain_copy(network, mean), masks)


def rank_units(model: nn.Module, guide: Any) -> dict[str, Tensor]:
    """For each weight its noise units from the surest to the noisiest, by the variance s of each unit's noise (see
    :func:`prune`): indices ``(K,)``.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=10)
    >>> {site: order.shape for site, order in rank_units(model, vsd.VSDGuide(model)).items()}
    {'net.0.weight': torch.Size([4]), 'net.2.weight': torch.Size([8])}
    """
    return {site: guide.noise(site).variance.detach().argsort() for site in _weight_sites(_network(model))}


def _network(model: nn.Module) -> nn.Module:
    return model.net if isinstance(model, ObservationModel) else model


def _site(module: PyroModule, name: str) -> str:
    return f"{module._pyro_name}.{name}" if module._pyro_name else name


def _weight_sites(net: nn.Module) -> list[str]:
    """The sites that ``bayesianize`` made of weights."""
    found = []
    for module in net.modules():
        for name in module.__dict__.get("_pyro_samples", ()):
            if init_name(name) in module._buffers:
                found.append(_site(module, name))  # type: ignore[arg-type]
    return found


def _plain_copy(net: nn.Module, mean: Mapping[str, Tensor]) -> nn.Module:
    net = copy.deepcopy(net)
    modules = list(net.modules())
    for module in modules:
        if isinstance(module, PyroModule):
            _fix_samples(module, mean)
    ties = [(module, name, *source) for module in modules for name, source in sources(module).items()]
    for module in modules:
        if isinstance(module, PyroModule):
            _strip(module)
    for module, name, owner, attribute in ties:
        _set_first(module, name, owner._parameters[attribute])  # type: ignore[arg-type]
    return net


def _fix_samples(module: PyroModule, mean: Mapping[str, Tensor]) -> None:
    """Random attributes become parameters at their mean."""
    for name, prior in list(module._pyro_samples.items()):
        del module._pyro_samples[name]
        if isinstance(prior, ScaleSite):
            continue  # E[z] is part of the weight's mean
        site = _site(module, name)
        if site not in mean:
            raise ValueError(
                f"guide: expected the mean of the site {site!r}, got those of {', '.join(map(repr, mean)) or 'none'}. "
                "Pass the model that the guide was made for."
            )
        module._buffers.pop(init_name(name), None)
        module._non_persistent_buffers_set.discard(init_name(name))
        _set_first(module, name, nn.Parameter(mean[site].detach().clone()))


def _set_first(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter in front of the others, where a layer has its weight."""
    others = dict(module._parameters)
    module._parameters.clear()
    module._parameters[name] = parameter
    module._parameters.update(others)


def _strip(module: PyroModule) -> None:
    """Gives a module the class it had before it was Pyro's."""
    plain = plain_class(type(module))
    if plain is None:
        raise ValueError(
            f"model: expected modules that bayesianize made Pyro's, got {type(module).__name__}, a PyroModule written "
            "by hand, which cannot be made plain. Pass the part of it that came from bayesianize."
        )
    for key in [key for key in module.__dict__ if key.startswith("_pyro_")]:
        del module.__dict__[key]
    module.__dict__.pop("_shared_weights", None)
    object.__setattr__(module, "__class__", plain)
