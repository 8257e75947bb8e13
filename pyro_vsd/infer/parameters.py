"""Parameters on modules, in good terms with Pyro's global store: two modules never share one behind the user's back."""

import warnings
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

__all__ = ["OwnParameters", "get_parameter", "register_param", "set_parameter"]


def set_parameter(root: nn.Module, path: str, value: nn.Parameter | nn.Module) -> None:
    """Registers a parameter or module below ``root`` under a dotted path, making containers as needed."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    root._modules.pop(leaf, None)
    root._parameters.pop(leaf, None)
    if isinstance(value, nn.Parameter):
        root.register_parameter(leaf, value)
    else:
        root.add_module(leaf, value)


def get_parameter(root: nn.Module, path: str) -> Any:
    """The parameter or module under a dotted path, past ``PyroModule``'s attribute lookup."""
    *parents, leaf = path.split(".")
    for name in parents:
        root = root._modules[name]  # type: ignore[assignment]
    found = root._parameters.get(leaf)
    return root._modules[leaf] if found is None else found


def register_param(name: str, value: nn.Parameter, event_dim: int) -> Tensor:
    """``pyro.param`` under ``name``, or under the first free variant of it where another tensor holds the name."""
    found: Tensor = pyro.param(free_name(name, value), value, event_dim=event_dim)
    return found


def free_name(name: str, value: Tensor) -> str:
    """``name``, unless the store holds another tensor under it: then the first free ``name__1``, ``name__2``, …"""
    store = pyro.get_param_store()
    last = getattr(value, "_store_name", "")  # a short cut past the names of guides that came before
    if last.startswith(name) and last in store and store[last] is value:
        return last
    candidate, count = name, 0
    while candidate in store and store[candidate] is not value:
        count += 1
        candidate = f"{name}__{count}"
    if count:
        value._store_name = candidate  # type: ignore[attr-defined]
    return candidate


class OwnParameters(Messenger):
    """Makes sure that what is optimised is what the model uses.

    Pyro names a module's parameters by their path. A second model with the same paths would have *the first one's*
    parameters handed to the optimiser while computing with its own. Here a parameter of ``module`` whose name is
    taken is registered under a free variant of the name; a parameter of some other module is reported.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        self._ids: set[int] | None = None

    def _pyro_param(self, msg: Any) -> None:
        args = msg["args"]
        if len(args) < 2 or not isinstance(args[1], nn.Parameter):
            return
        name, value = args[:2]
        store = pyro.get_param_store()
        if name not in store or store[name] is value:
            return
        if self._ids is None:
            module = self.module
            self._ids = {id(p) for p in module.parameters()} if isinstance(module, nn.Module) else set()
        if id(value) in self._ids:
            msg["name"] = free_name(name, value)
            msg["args"] = (msg["name"], *args[1:])
        elif not isinstance(self.module, nn.Module):
            warnings.warn(
                f"the parameter {name!r} of a module is not the one that Pyro's parameter store holds under that "
                "name, so it is not trained. Give the module another name, make the model a PyroModule, or call "
                "pyro.clear_param_store() first.",
                stacklevel=2,
            )


def as_parameter(value: Tensor) -> nn.Parameter:
    """A fresh leaf with its own memory."""
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format))
