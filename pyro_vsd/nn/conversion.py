"""From a plain module to Pyro's and back, with two repairs: weights that modules share, and parameters that Pyro's
store would thaw or copy."""

from functools import cache
from typing import Any

from pyro.nn import PyroModule
from pyro.nn.module import to_pyro_module_
from torch import nn

__all__ = ["plain_class", "read_from", "sources", "to_pyro"]

_TIES = "_shared_weights"


def to_pyro(module: nn.Module) -> None:
    """Turns a module and all below it into ``PyroModule`` s, in place; submodules that are ``None`` may occur."""
    # Children first: a PyroModule names its children when they are set.
    for child in module._modules.values():
        if child is not None:
            to_pyro(child)
    if isinstance(module, PyroModule):
        for name, child in list(module._modules.items()):
            setattr(module, name, child)
    else:
        to_pyro_module_(module, recurse=False)
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        if own:
            _set_class(module, own=own)


def plain_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that Pyro's on-the-fly class was made from; ``None`` for a ``PyroModule`` written by hand.

    >>> plain_class(PyroModule[nn.Linear])
    <class 'torch.nn.modules.linear.Linear'>
    """
    cls = _base(cls)
    if not issubclass(cls, PyroModule):
        return cls
    parent = cls.__mro__[1]
    return parent if PyroModule[parent] is cls else None


def read_from(reader: PyroModule, name: str, owner: PyroModule, attribute: str) -> None:
    """Makes ``reader.name`` mean ``owner.attribute``, so that both see one draw.

    The owner is not registered as a child of the reader: names and ``state_dict`` stay as they were.
    """
    reader._parameters.pop(name, None)
    reader.__dict__.setdefault(_TIES, {})[name] = (owner, attribute)
    _set_class(reader, shared=[name])


def sources(reader: nn.Module) -> dict[str, tuple[PyroModule, str]]:
    """Which attributes of a module are read from which others."""
    ties: dict[str, tuple[PyroModule, str]] = reader.__dict__.get(_TIES, {})
    return ties


class _Shared:
    """The descriptor of an attribute that lives in another module."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, reader: Any, cls: Any = None) -> Any:
        if reader is None:
            return self
        owner, attribute = reader.__dict__[_TIES][self.name]
        return getattr(owner, attribute)

    def __set__(self, reader: Any, value: Any) -> None:
        owner, attribute = reader.__dict__[_TIES][self.name]
        raise AttributeError(f"{self.name}: shared with {attribute!r} of a {type(owner).__name__}; set it there.")


class _Own:
    """The descriptor of a parameter, with which Pyro's store would do two things that nobody asked for.

    It gives every parameter a gradient: a frozen one is read past it. It keeps a contiguous copy of any other memory
    format (``channels_last``), and would train the copy: such a parameter is made contiguous.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, cls: Any = None) -> Any:
        if module is None:
            return self
        parameter = module._parameters.get(self.name)
        if parameter is not None:
            if not parameter.requires_grad:
                return parameter
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        return PyroModule.__getattr__(module, self.name)


class _Adapted(nn.Module):
    """Marks classes made by :func:`_adapted_class`."""

    _adapted: tuple[type[PyroModule], tuple[str, ...], tuple[str, ...]]


def _base(cls: type[nn.Module]) -> type[nn.Module]:
    return cls._adapted[0] if issubclass(cls, _Adapted) else cls


def _set_class(module: Any, shared: list[str] | None = None, own: list[str] | None = None) -> None:
    """Gives a module a class of its own kind with descriptors for these attributes, next to those it has."""
    cls: Any = type(module)
    base, old_shared, old_own = cls._adapted if issubclass(cls, _Adapted) else (cls, (), ())
    names = {*old_shared, *(shared or [])}
    others = {*old_own, *(own or [])} - names
    module.__class__ = _adapted_class(base, tuple(sorted(names)), tuple(sorted(others)))


@cache
def _adapted_class(base: type[PyroModule], shared: tuple[str, ...], own: tuple[str, ...]) -> type[PyroModule]:
    namespace: dict[str, Any] = {name: _Shared(name) for name in shared}
    namespace |= {name: _Own(name) for name in own}
    namespace |= {"_adapted": (base, shared, own), "__reduce__": _reduce}
    metaclass: Any = type(base)
    made: type[PyroModule] = metaclass(base.__name__, (base, _Adapted), namespace)
    return made


def _reduce(module: Any) -> Any:
    base, shared, own = type(module)._adapted
    return _revive, (plain_class(base) or base, shared, own), module.__getstate__()


def _revive(cls: type[nn.Module], shared: tuple[str, ...], own: tuple[str, ...]) -> Any:
    made = _adapted_class(PyroModule[cls], shared, own)
    return made.__new__(made)
