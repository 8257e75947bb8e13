"""The callables behind a layer's sample sites: Pyro calls them with the layer in each step, so they keep what is
constant. Classes at module level, for pickle."""

from typing import Any

from pyro.nn import PyroModule
from torch import Tensor

from pyro_vsd.distributions import WeightPrior
from pyro_vsd.nn.priors import Prior

__all__ = ["ScaleSite", "WeightSite", "init_name", "scale_name"]


def init_name(name: str) -> str:
    """The buffer that keeps the weight the network came with."""
    return f"{name}_init"


def scale_name(name: str) -> str:
    """The site of a weight's z."""
    return f"{name}_z"


class _Cached:
    """A law that depends on the layer's initial weight only: made again when that tensor is replaced (``.to()``)."""

    def __init__(self, name: str, prior: Prior, noise_dim: int):
        self.name, self.prior, self.noise_dim = name, prior, noise_dim
        self._init_name = init_name(name)
        self._init: Tensor | None = None
        self._law: Any = None

    def init(self, layer: PyroModule) -> Tensor:
        """The initial weight, past ``PyroModule``'s attribute lookup."""
        found = layer._buffers[self._init_name]
        assert found is not None
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_init": None, "_law": None}


class ScaleSite(_Cached):
    """The prior of z of one layer."""

    def __call__(self, layer: PyroModule) -> Any:
        init = self.init(layer)
        if self._init is not init:
            self._init, self._law = init, self.prior.scales(init, self.noise_dim)
        return self._law


class WeightSite(_Cached):
    """The prior of a layer's weight.

    :param hierarchical: whether the layer has a site for z.
    """

    def __init__(self, name: str, prior: Prior, noise_dim: int, input_dim: int | None, hierarchical: bool):
        super().__init__(name, prior, noise_dim)
        self.input_dim, self.hierarchical = input_dim, hierarchical

    def __call__(self, layer: PyroModule) -> WeightPrior:
        init = self.init(layer)
        if self.hierarchical:
            z_name = scale_name(self.name)
            path = layer._pyro_name
            full_name = f"{path}.{z_name}" if path else z_name
            return self.prior.weight(init, self.noise_dim, self.input_dim, getattr(layer, z_name), full_name)
        if self._init is not init:
            self._init, self._law = init, self.prior.weight(init, self.noise_dim, self.input_dim)
        law: WeightPrior = self._law
        return law
