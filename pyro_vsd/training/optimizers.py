"""States of optimisers, torch's and Pyro's, in a form that another process can take up."""

import copy
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pyro
from pyro.optim import PyroOptim
from pyro.optim.optim import _load_state_dict
from torch import Tensor, nn, optim
from torch.distributions import transform_to

from pyro_vsd.infer.parameters import free_name
from pyro_vsd.infer.mean_field import support_from_plain, support_to_plain

__all__ = ["loose_parameters", "optimizer_loader", "optimizer_state", "set_loose_parameters"]

_Modules = dict[str, nn.Module]
# Where the parameters live whose states wait in a Pyro optimiser for their first step.
_WAITING: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def optimizer_state(optimizer: Any, modules: _Modules) -> dict[str, Any]:
    """The state of an optimiser.

    Pyro keeps one optimiser for each parameter, by its name in the global store. That name depends on what else the
    store has seen, so it is kept together with the parameter's place in ``modules``.

    :param modules: those among ``{"model": …, "guide": …}`` that are modules.
    """
    if isinstance(optimizer, optim.Optimizer):
        return {"kind": type(optimizer).__name__, "state": optimizer.state_dict()}
    if not isinstance(optimizer, PyroOptim):
        raise TypeError(
            f"optimizer: expected an optimiser of torch.optim or pyro.optim, got a {type(optimizer).__name__}."
        )
    store = pyro.get_param_store()
    unknown = [tuple(p.shape) for p in optimizer.optim_objs if store.param_name(p) is None]
    if unknown:
        raise ValueError(
            f"optimizer: expected parameters that are in Pyro's parameter store, got some of shapes {unknown} that are "
            "not. Was the store cleared since the last step?"
        )
    places = _places(modules)
    known = {store.param_name(p): places.get(id(p)) for p in optimizer.optim_objs}
    waiting = _WAITING.get(optimizer, {})
    states = {**optimizer._state_waiting_to_be_consumed, **optimizer.get_state()}
    entries = [
        {"name": name, "place": known[name] if name in known else waiting.get(name), "state": state}
        for name, state in states.items()
    ]
    return {"kind": _pyro_kind(optimizer), "state": entries}


def optimizer_loader(optimizer: Any, saved: dict[str, Any], modules: _Modules) -> Callable[[], None]:
    """Verifies a saved state against an optimiser; what is returned loads it."""
    is_torch = isinstance(optimizer, optim.Optimizer)
    if not is_torch and not isinstance(optimizer, PyroOptim):
        raise TypeError(
            f"optimizer: expected an optimiser of torch.optim or pyro.optim, got a {type(optimizer).__name__}."
        )
    kind = type(optimizer).__name__ if is_torch else _pyro_kind(optimizer)
    if saved["kind"] != kind:
        raise ValueError(f"optimizer: expected the state of {kind}, got that of {saved['kind']}.")
    state = saved["state"]
    if is_torch:
        sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, _groups(state))]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"optimizer: expected a state for groups of {sizes[0]} parameters, got one for {sizes[1]}. Make the "
                "optimiser from the same parameters as before; hand-written models call guide.setup(x, y) first."
            )
        copy.copy(optimizer).load_state_dict(state)  # rehearsed on a copy, which has its own groups and states

        def load_torch() -> None:
            optimizer.load_state_dict(state)
            _has_stepped(optimizer)

        return load_torch
    entries = [(entry["name"], entry["place"], dict(entry["state"])) for entry in state]
    for name, place, _ in entries:
        if not isinstance(name, str) or not (place is None or len(place) == 2):
            raise ValueError("optimizer: expected states by the names of parameters, got something else.")

    def load() -> None:
        optimizer.optim_objs.clear()
        optimizer.grad_clip.clear()
        optimizer._state_waiting_to_be_consumed.clear()
        _WAITING[optimizer] = {}
        for name, place, state in entries:
            _take_up(optimizer, name, place, state, modules)

    return load


def _has_stepped(optimizer: Any) -> None:
    """Torch's schedulers warn where they step before their optimiser; this one has, before it was saved."""
    optimizer._opt_called = True


def _groups(state: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = state["param_groups"]
    return groups


def _pyro_kind(optimizer: Any) -> str:
    names = [
        getattr(constructor, "__name__", type(constructor).__name__)
        for constructor in (optimizer.pt_optim_constructor, getattr(optimizer, "pt_scheduler_constructor", None))
        if constructor is not None
    ]
    return " with ".join(["pyro.optim." + names[0], *names[1:]])


def _places(modules: _Modules) -> dict[int, list[str]]:
    return {id(p): [role, path] for role, module in modules.items() for path, p in module.named_parameters()}


def _take_up(optimizer: PyroOptim, name: str, place: Any, state: dict[str, Any], modules: _Modules) -> None:
    """Gives one parameter its optimiser, where it is known; else the state waits for its first step, as in Pyro."""
    store = pyro.get_param_store()
    parameter: Any = None
    if place is None:
        parameter = dict(store.named_parameters()).get(name)
    elif place[0] in modules:
        parameter = dict(modules[place[0]].named_parameters()).get(place[1])
        if parameter is not None:
            known = store.param_name(parameter)
            name = known or free_name(re.sub(r"__\d+$", "", name), parameter)
            if known is None and place[1].endswith("_unconstrained"):  # its first use tells Pyro the constraint
                parameter = None
            elif known is None:
                pyro.param(name, parameter)
    optimizer.set_state({name: state})
    _WAITING[optimizer][name] = place
    if parameter is not None:
        # what PyroOptim does at a parameter's first step, so that a scheduler can step before it
        optimizer.optim_objs[parameter] = optimizer._get_optim(parameter)
        optimizer.grad_clip[parameter] = optimizer._get_grad_clip(parameter)
        _load_state_dict(optimizer.optim_objs[parameter], optimizer._state_waiting_to_be_consumed.pop(name))
        _has_stepped(getattr(optimizer.optim_objs[parameter], "optimizer", optimizer.optim_objs[parameter]))


def loose_parameters(optimizer: Any, modules: _Modules, everything: bool) -> dict[str, Any]:
    """Parameters that live in Pyro's store alone: ``pyro.param`` statements of models that are functions.

    :param everything: whether all of the store counts where no optimiser tells what is trained.
    """
    owned = _places(modules)
    store = pyro.get_param_store()
    constraints = store.get_state()["constraints"]
    if isinstance(optimizer, PyroOptim):
        waiting = optimizer._state_waiting_to_be_consumed
        chosen = {id(p) for p in optimizer.optim_objs} | {id(p) for n, p in store.named_parameters() if n in waiting}
    elif optimizer is not None:
        chosen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    else:
        chosen = {id(p) for _, p in store.named_parameters()} if everything else set()
    result = {}
    for name, parameter in store.named_parameters():
        if id(parameter) in chosen and id(parameter) not in owned:
            support = support_to_plain(constraints[name])
            if support is None:
                raise ValueError(
                    f"the constraint {constraints[name]} of the parameter {name!r} cannot be saved as plain types. "
                    "Make the model a PyroModule, whose parameters are its own."
                )
            result[name] = {"unconstrained": parameter.detach(), "support": support}
    return result


def set_loose_parameters(saved: dict[str, Any]) -> Callable[[], None]:
    """Verifies what :func:`loose_parameters` gave; what is returned puts it into the store."""
    store = pyro.get_param_store()
    values: list[tuple[str, Tensor, Any]] = []
    there = dict(store.named_parameters())
    for name, entry in saved.items():
        value, support = entry["unconstrained"], support_from_plain(entry["support"])
        if name in there and there[name].shape != value.shape:
            raise ValueError(
                f"parameter {name!r}: expected shape {tuple(there[name].shape)}, got {tuple(value.shape)}. The "
                "checkpoint was saved for another model."
            )
        values.append((name, value, support))

    def load() -> None:
        for name, value, support in values:
            if name not in store:
                store.setdefault(name, transform_to(support)(value), support)
            # the unconstrained numbers themselves: going there and back would round them
            dict(store.named_parameters())[name].data.copy_(value)

    return load
