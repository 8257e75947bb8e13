"""Evaluation mode and back, for models that are modules and for functions that call modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["evaluation_mode"]


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """All modules of ``model`` in evaluation mode, each back in its own mode afterwards.

    A model that is not a module may call some: those are switched when they are first called.
    """
    switched: list[nn.Module] = []

    def switch(module: nn.Module, inputs: Any = None) -> None:
        if module.training:
            switched.append(module)
            module.training = False

    handle = None
    if isinstance(model, nn.Module):
        for module in model.modules():
            switch(module)
    else:
        handle = register_module_forward_pre_hook(switch)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for module in switched:
            module.training = True
