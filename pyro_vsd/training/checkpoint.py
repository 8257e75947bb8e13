"""Checkpoints: everything that training goes on from, in one file that cannot be half there and cannot run code."""

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor, nn, optim

from pyro_vsd.infer import VSDGuide
from pyro_vsd.training.archive import read_archive, write_archive
from pyro_vsd.training.generators import check_rng_state, get_rng_state, set_rng_state
from pyro_vsd.training.optimizers import (
    loose_parameters,
    optimizer_loader,
    optimizer_state,
    set_loose_parameters,
)
from pyro_vsd.training.plain import to_plain

__all__ = ["load_checkpoint", "save_checkpoint"]

_KEYS = {"epoch", "step", "extra", "model", "guide", "optimizer", "scheduler", "elbo", "params", "rng", "versions"}


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any,
    guide: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    elbo: Any = None,
    epoch: int = 0,
    step: int = 0,
    extra: Any = None,
) -> None:
    """Writes all that training goes on from: parameters and buffers, the states of the optimiser, the scheduler and
    the ELBO (its step, which a KL schedule counts by), and of the random generators of torch, NumPy and Python.

    The file is written beside ``path``, synchronised and renamed: at any moment ``path`` holds the old checkpoint or
    the new one. It holds tensors, numbers, strings and plain containers only.

    :param model: a module, or a function; what a function keeps in Pyro's parameter store is saved too.
    :param guide: its guide.
    :param optimizer: of ``torch.optim`` or ``pyro.optim``.
    :param scheduler: one of torch's learning-rate schedulers. Pyro's are optimisers.
    :param epoch: epochs finished.
    :param step: steps taken.
    :param extra: anything else of plain types, given back by :func:`load_checkpoint`.

    >>> import os, tempfile, pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> guide = vsd.VSDGuide(model)
    >>> path = os.path.join(tempfile.mkdtemp(), "last.ckpt")
    >>> save_checkpoint(path, model=model, guide=guide, epoch=3, extra={"note": "before the long run"})
    >>> load_checkpoint(path, model=model, guide=guide)["epoch"]
    3
    """
    modules = _modules(model, guide)
    states = {
        "epoch": epoch,
        "step": step,
        "extra": extra,
        "model": _module_state(model),
        "guide": _module_state(guide),
        "optimizer": None if optimizer is None else optimizer_state(optimizer, modules),
        "scheduler": None if scheduler is None else {"kind": _kind(scheduler), "state": scheduler.state_dict()},
        "elbo": elbo.state_dict() if hasattr(elbo, "state_dict") else None,
        "params": loose_parameters(optimizer, modules, everything=len(modules) < 2),
        "rng": get_rng_state(),
        "versions": {"torch": str(torch.__version__), "pyro": str(pyro.__version__)},
    }
    write_archive(path, {key: to_plain(value, key) for key, value in states.items()})


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    guide: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    elbo: Any = None,
    rng: bool = True,
    map_location: Any = None,
) -> dict[str, Any]:
    """Reads a checkpoint into the objects given, and returns it.

    On the CPU, training goes on from there bit for bit as if it had never stopped. Everything is verified before
    anything is changed: a file that is cut short, damaged, from elsewhere or of another model leaves the objects as
    they were. Reading a stranger's file runs none of its code (``weights_only=True``).

    :param guide: a ``VSDGuide`` need not have parameters yet; an optimiser over its parameters needs them to be there
        before: ``guide.setup(x, y)``.
    :param rng: whether to set the global random generators of torch, NumPy and Python.
    :param map_location: where the returned tensors live; what is loaded stays where its object is.
    :returns: ``epoch``, ``step``, ``extra``, ``versions``, and the states by name.
    """
    content = read_archive(path, map_location)
    if set(content) != _KEYS:
        missing, unknown = sorted(_KEYS - set(content)), sorted(map(str, set(content) - _KEYS))
        raise ValueError(
            f"path: expected a checkpoint with the fields {sorted(_KEYS)}, got {os.fspath(path)!r}, without {missing} "
            f"and with {unknown}. Another version of pyro_vsd wrote it: read it with that one, and save the states of "
            "model and guide by themselves."
        )
    given = {"model": model, "guide": guide, "optimizer": optimizer, "scheduler": scheduler, "elbo": elbo}
    try:
        actions = _verify(content, {name: thing for name, thing in given.items() if thing is not None}, rng)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)!r} does not fit. {error}") from error
    except (KeyError, AttributeError, RuntimeError, IndexError) as error:
        # states of the right kind have all the parts that the checks read
        raise ValueError(f"{os.fspath(path)!r} does not fit. A state is not what it is called: {error!r}") from error
    for action in actions:
        action()
    return content


def _verify(content: dict[str, Any], given: dict[str, Any], rng: bool) -> list[Callable[[], None]]:
    """Checks each state against its object; the actions returned then load them."""
    for name, thing in given.items():
        function = name in ("model", "guide") and not isinstance(thing, nn.Module)
        if content[name] is None and not function and not (name == "elbo" and not hasattr(thing, "state_dict")):
            raise ValueError(f"{name}: expected a checkpoint with its state, got one that was saved without.")
        if content[name] is not None and function:
            raise ValueError(f"{name}: expected a function's checkpoint, got a module's. Pass the module.")
    for name, kind in (("epoch", int), ("step", int), ("params", dict)):
        if not isinstance(content[name], kind):
            raise ValueError(f"{name}: expected {kind.__name__}, got {type(content[name]).__name__}.")
    modules = _modules(given.get("model"), given.get("guide"))
    # First what could fail in spite of the checks; Pyro's optimisers last, as they look for the names of parameters.
    actions: list[Callable[[], None]] = []
    if "scheduler" in given:
        actions.append(_scheduler_loader(given["scheduler"], content["scheduler"]))
    for name, module in modules.items():
        actions.append(_module_loader(name, module, content[name], given.get("optimizer")))
    if given:
        actions.append(set_loose_parameters(content["params"]))
    if "optimizer" in given:
        actions.append(optimizer_loader(given["optimizer"], content["optimizer"], modules))
    if "elbo" in given and content["elbo"] is not None:
        int(content["elbo"]["step"])
        actions.append(lambda: given["elbo"].load_state_dict(content["elbo"]))
    if rng:
        check_rng_state(content["rng"])
        actions.append(lambda: set_rng_state(content["rng"]))
    return actions


def _modules(model: Any, guide: Any) -> dict[str, nn.Module]:
    return {name: m for name, m in (("model", model), ("guide", guide)) if isinstance(m, nn.Module)}


def _module_state(thing: Any) -> dict[str, Any] | None:
    return thing.state_dict() if isinstance(thing, nn.Module) else None


def _kind(scheduler: Any) -> str:
    return type(scheduler).__name__


def _scheduler_loader(scheduler: Any, saved: dict[str, Any]) -> Callable[[], None]:
    if saved["kind"] != _kind(scheduler):
        raise ValueError(f"scheduler: expected the state of {_kind(scheduler)}, got that of {saved['kind']}.")
    unknown = set(scheduler.state_dict()) ^ set(saved["state"])
    if unknown:
        raise ValueError(f"scheduler: expected a state with the same entries, got a difference in {sorted(unknown)}.")
    state = _with_counters(scheduler, saved["state"])
    if "_schedulers" not in state:  # one that holds others would load into those
        copy.copy(scheduler).load_state_dict(state)
    return lambda: scheduler.load_state_dict(state)


def _with_counters(scheduler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The milestones of a MultiStepLR are a Counter, which is saved as a dict."""
    state = {k: Counter(v) if isinstance(getattr(scheduler, k, None), Counter) else v for k, v in state.items()}
    if "_schedulers" in state:
        inner = zip(scheduler._schedulers, state["_schedulers"], strict=True)
        state["_schedulers"] = [_with_counters(*pair) for pair in inner]
    return state


def _module_loader(name: str, module: nn.Module, state: dict[str, Any], optimizer: Any) -> Callable[[], None]:
    if isinstance(module, VSDGuide):
        _rehearse(module, state, optimizer)
    else:
        _compare(name, module, state)

    def load() -> None:
        # a guide that lays out its parameters starts them at random
        with torch.random.fork_rng(devices=[]):
            module.load_state_dict(state)

    return load


def _rehearse(guide: VSDGuide, state: dict[str, Any], optimizer: Any) -> None:
    """Loads into a copy: a guide makes or replaces its parameters as a state demands."""
    with torch.random.fork_rng(devices=[]):
        trial = copy.deepcopy(guide, {id(guide.model): guide.model})
        before = {id(p) for p in trial.parameters()}
        try:
            trial.load_state_dict(state)
        except Exception as error:
            raise ValueError(f"guide: {error}") from error
    if isinstance(optimizer, optim.Optimizer) and before != {id(p) for p in trial.parameters()}:
        raise ValueError(
            "optimizer: expected a guide with the parameters of the checkpoint, over which the optimiser was made, got "
            "a guide with others. Make the guide with the same options and call guide.setup(x, y) before the optimiser."
        )


def _compare(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    own = module.state_dict()
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unexpected:
        raise ValueError(
            f"{name}: expected a state with the entries of this {type(module).__name__}, got one without {missing} and "
            f"with {unexpected}. It was saved for another {name}."
        )
    for key, value in own.items():
        if isinstance(value, Tensor):
            found = state[key]
            if not isinstance(found, Tensor) or found.shape != value.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(f"{name}: expected {key!r} of shape {tuple(value.shape)}, got {shape}.")
