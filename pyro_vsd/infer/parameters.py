"""Parameters on modules, and Pyro's global store: two modules never share a parameter by accident."""

import sys
import warnings
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_vsd._utils import free_name

__all__ = ["OwnParameters", "as_parameter", "asked_by_optimizer", "check_gathered", "holder_of", "set_parameter"]


def asked_by_optimizer() -> bool:
    """Whether the generator that calls this is being read by a torch optimiser. Pyro and torch read parameters for
    other reasons, too, and none is a good answer to those."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.optim")


def as_parameter(value: Tensor) -> nn.Parameter:
    """A new leaf with its own memory."""
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format))


def check_gathered(name: str, parameter: Any) -> None:
    """Raises for a parameter of which ``fully_shard`` has left only a part in this process."""
    if hasattr(parameter, "full_tensor"):
        raise ValueError(
            f"{name} is sharded over processes; only a call of the sharded loss gathers it. Call loss.unshard() before "
            "you use the guide, and loss.reshard() afterwards."
        )


def holder_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module below ``root`` that holds what a dotted path names, made as needed, and the last part of the path."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    return root, leaf


def set_parameter(root: nn.Module, path: str, value: nn.Parameter | nn.Module) -> None:
    """Registers a parameter or module below ``root`` under a dotted path."""
    holder, leaf = holder_of(root, path)
    holder._modules.pop(leaf, None)
    holder._parameters.pop(leaf, None)
    if isinstance(value, nn.Parameter):
        holder.register_parameter(leaf, value)
    else:
        holder.add_module(leaf, value)


class OwnParameters(Messenger):
    """Makes sure that what is optimised is what the model uses.

    Pyro names a module's parameters by their path. A second model with the same paths would have *the first one's*
    parameters handed to the optimiser while computing with its own. Here a parameter of ``module`` whose name is
    taken is registered under a free variant of the name; for a parameter of some other module a warning says so.
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
                "name, so it is not trained. Rename the module, make the model a PyroModule, or call "
                "pyro.clear_param_store() first.",
                stacklevel=2,
            )
