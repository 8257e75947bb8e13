"""Checkpoints: all that a training run continues from, in one file that is written atomically and runs no code."""

import contextlib
import copy
import hashlib
import io
import numbers
import os
import random
import re
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.optim import _load_state_dict
from torch import Tensor, nn, optim
from torch.distributions import transform_to

from pyro_vsd._utils import check_integer, free_name
from pyro_vsd.infer import VSDGuide
from pyro_vsd.infer.mean_field import support_from_plain, support_to_plain

__all__ = [
    "check_rng_state",
    "get_rng_state",
    "load_checkpoint",
    "loose_parameters",
    "read_archive",
    "save_checkpoint",
    "set_loose_parameters",
    "set_rng_state",
    "to_plain",
    "write_archive",
]

_FIELDS = {"epoch", "step", "extra", "model", "guide", "optimizer", "scheduler", "elbo", "params", "rng", "versions"}
_Modules = dict[str, nn.Module]
_Action = Callable[[], None]


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
    """Saves a training run: parameters, buffers, optimiser, scheduler, the step of the ELBO's KL schedule, and the
    random generators of torch, NumPy and Python.

    The file is written to a temporary name, synchronised and renamed: at any moment ``path`` holds the old checkpoint
    or the new one. It holds tensors, numbers, strings and plain containers only.

    :param model: a module, or a function; parameters that a function keeps in Pyro's store are saved too.
    :param optimizer: of ``torch.optim`` or ``pyro.optim``.
    :param scheduler: one of torch's learning-rate schedulers. Pyro's are optimisers.
    :param epoch: epochs finished; ``step``: steps taken.
    :param extra: anything else of plain types; :func:`load_checkpoint` returns it.

    >>> import os, tempfile
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
        **{name: modules[name].state_dict() if name in modules else None for name in ("model", "guide")},
        "optimizer": None if optimizer is None else _optimizer_state(optimizer, modules),
        "scheduler": None if scheduler is None else {"kind": _kind(scheduler), "state": scheduler.state_dict()},
        "elbo": elbo.state_dict() if hasattr(elbo, "state_dict") else None,
        "params": loose_parameters(optimizer, modules),
        "rng": get_rng_state(),
        "versions": {"torch": str(torch.__version__), "pyro": str(pyro.__version__)},
    }
    write_archive(path, {name: to_plain(value, name) for name, value in states.items()})


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
    """Loads a checkpoint into the objects given, and returns its content.

    On the CPU the training run then continues bit for bit. A file that is damaged, foreign, or of a different model
    raises and leaves all objects as they were. Reading a file runs none of its code (``weights_only=True``).

    :param guide: a ``VSDGuide`` need not have parameters yet. An optimiser over them needs ``guide.setup(x, y)`` first.
    :param rng: whether to set the global random generators of torch, NumPy and Python.
    :param map_location: where the returned tensors are; loaded objects stay on their devices.
    :returns: ``epoch``, ``step``, ``extra``, ``versions``, and the states by name.
    """
    content = read_archive(path, map_location)
    if set(content) != _FIELDS:
        wrong = sorted(map(str, set(content) ^ _FIELDS))
        raise ValueError(f"path: in {os.fspath(path)!r} the fields {wrong} are missing or unknown. Wrong version?")
    given = {"model": model, "guide": guide, "optimizer": optimizer, "scheduler": scheduler, "elbo": elbo}
    try:
        actions = _verify(content, {name: thing for name, thing in given.items() if thing is not None}, rng)
    except Exception as error:  # what a crafted state can raise is not a short list
        reason = str(error) if isinstance(error, (ValueError, TypeError, RuntimeError)) else repr(error)
        raise ValueError(f"{os.fspath(path)!r} does not fit. {reason}") from error
    for action in actions:
        action()
    return content


def _verify(content: dict[str, Any], given: dict[str, Any], rng: bool) -> list[_Action]:
    """Checks each state against its object; the actions returned then load them."""
    modules = _modules(given.get("model"), given.get("guide"))
    for name, thing in given.items():
        function = name in ("model", "guide") and name not in modules
        if content[name] is None and not function and (name != "elbo" or hasattr(thing, "state_dict")):
            raise ValueError(f"{name}: the checkpoint was saved without its state.")
        if content[name] is not None and function:
            raise ValueError(f"{name} is a function, and the checkpoint has the state of a module. Pass the module.")
        if name in ("optimizer", "scheduler") and content[name]["kind"] != _kind(thing):
            raise ValueError(f"{name} is a {_kind(thing)}, and the checkpoint has that of a {content[name]['kind']}.")
    for name in ("epoch", "step"):
        check_integer(name, content[name])
    # First what could fail in spite of the checks. Pyro's optimisers last, as they look for the names of parameters.
    actions: list[_Action] = []
    if "scheduler" in given:
        actions.append(_scheduler_loader(given["scheduler"], content["scheduler"]["state"]))
    actions += [_module_loader(name, m, content[name], given.get("optimizer")) for name, m in modules.items()]
    if given:
        actions.append(set_loose_parameters(content["params"]))
    if "optimizer" in given:
        actions.append(_optimizer_loader(given["optimizer"], content["optimizer"]["state"], modules))
    if "elbo" in given and content["elbo"] is not None:
        int(content["elbo"]["step"])
        actions.append(lambda: given["elbo"].load_state_dict(content["elbo"]))
    if rng:
        check_rng_state(content["rng"])
        actions.append(lambda: set_rng_state(content["rng"]))
    return actions


# ---- modules and schedulers


def _modules(model: Any, guide: Any) -> _Modules:
    return {name: m for name, m in (("model", model), ("guide", guide)) if isinstance(m, nn.Module)}


def _kind(thing: Any) -> str:
    if not isinstance(thing, PyroOptim):
        return type(thing).__name__
    made_by = [thing.pt_optim_constructor, getattr(thing, "pt_scheduler_constructor", None)]
    return "pyro.optim." + " with ".join(getattr(c, "__name__", _kind(c)) for c in made_by if c is not None)


def _module_loader(name: str, module: nn.Module, state: dict[str, Any], optimizer: Any) -> _Action:
    if isinstance(module, VSDGuide):  # rehearsed on a copy, since a state can make or replace its parameters
        with torch.random.fork_rng(devices=[]):
            trial = copy.deepcopy(module, {id(module.model): module.model})
            before = {id(p) for p in trial.parameters()}
            trial.load_state_dict(state)
        if isinstance(optimizer, optim.Optimizer) and before != {id(p) for p in trial.parameters()}:
            raise ValueError("optimizer: the guide would replace its parameters. Make and set up the guide as before.")
    else:
        own = {key: getattr(value, "shape", None) for key, value in module.state_dict().items()}
        saved = {key: getattr(value, "shape", None) for key, value in state.items()}
        wrong = sorted(key for key in own.keys() | saved.keys() if own.get(key, 0) != saved.get(key, 0))
        if wrong:
            raise ValueError(f"{name}: the state is of a different one: {wrong} are missing, new, or differ in shape.")

    def load() -> None:
        with torch.random.fork_rng(devices=[]):  # a guide that makes its parameters initialises them at random
            module.load_state_dict(state)

    return load


def _scheduler_loader(scheduler: Any, state: dict[str, Any]) -> _Action:
    unknown = set(scheduler.state_dict()) ^ set(state)
    if unknown:
        raise ValueError(f"scheduler: the state differs in the entries {sorted(unknown)}.")
    state = _with_counters(scheduler, state)
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


# ---- optimisers
# Pyro keeps one optimiser for each parameter, by its name in the global store. That name depends on what else the store
# has seen, so it is saved together with the parameter's place: ["guide", "theta.net.0.weight"].

# Places of parameters whose states wait in a Pyro optimiser for their first step.
_WAITING: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def _places(modules: _Modules) -> dict[int, list[str]]:
    return {id(p): [role, path] for role, module in modules.items() for path, p in module.named_parameters()}


def _optimizer_state(optimizer: Any, modules: _Modules) -> dict[str, Any]:
    if isinstance(optimizer, optim.Optimizer):
        return {"kind": _kind(optimizer), "state": optimizer.state_dict()}
    if not isinstance(optimizer, PyroOptim):
        raise TypeError(f"optimizer must be one of torch.optim or pyro.optim, not a {_kind(optimizer)}.")
    store = pyro.get_param_store()
    unknown = [tuple(p.shape) for p in optimizer.optim_objs if store.param_name(p) is None]
    if unknown:
        raise ValueError(f"optimizer has parameters, of shapes {unknown}, that were cleared from Pyro's store.")
    places = _places(modules)
    known: dict[Any, Any] = {store.param_name(p): places.get(id(p)) for p in optimizer.optim_objs}
    known = _WAITING.get(optimizer, {}) | known
    states = {**optimizer._state_waiting_to_be_consumed, **optimizer.get_state()}
    entries = [{"name": name, "place": known.get(name), "state": state} for name, state in states.items()]
    return {"kind": _kind(optimizer), "state": entries}


def _optimizer_loader(optimizer: Any, state: Any, modules: _Modules) -> _Action:
    if isinstance(optimizer, optim.Optimizer):
        sizes = [[len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state["param_groups"])]
        if sizes[0] != sizes[1]:
            raise ValueError(f"optimizer has groups of {sizes[0]} parameters, and the checkpoint of {sizes[1]}.")
        copy.copy(optimizer).load_state_dict(state)  # rehearsed on a copy, which has its own groups and states

        def load_torch() -> None:
            optimizer.load_state_dict(state)
            vars(optimizer)["_opt_called"] = True  # or its scheduler warns that it steps before its optimiser

        return load_torch
    entries = [(entry["name"], entry["place"], dict(entry["state"])) for entry in state]
    if not all(isinstance(name, str) and (place is None or len(place) == 2) for name, place, _ in entries):
        raise ValueError("optimizer: the states are not stored by the names of parameters.")

    def load_pyro() -> None:
        for dictionary in (optimizer.optim_objs, optimizer.grad_clip, optimizer._state_waiting_to_be_consumed):
            dictionary.clear()
        _WAITING[optimizer] = {}
        for entry in entries:
            _give_state(optimizer, modules, *entry)

    return load_pyro


def _give_state(optimizer: Any, modules: _Modules, name: str, place: Any, state: dict[str, Any]) -> None:
    """Makes the optimiser of one parameter, if the parameter is known. If not, its state waits, as in Pyro."""
    store = pyro.get_param_store()
    parameter: Any = None
    if place is None:
        parameter = dict(store.named_parameters()).get(name)
    elif place[0] in modules:
        parameter = dict(modules[place[0]].named_parameters()).get(place[1])
        if parameter is not None:
            known = store.param_name(parameter)
            name = known or free_name(re.sub(r"__\d+$", "", name), parameter)
            if known is None and place[1].endswith("_unconstrained"):  # Pyro learns the constraint at its first use
                parameter = None
            elif known is None:
                pyro.param(name, parameter)
    optimizer.set_state({name: state})
    _WAITING[optimizer][name] = place
    if parameter is not None:
        # what PyroOptim does at a parameter's first step, so that a scheduler can step before it
        own = optimizer.optim_objs[parameter] = optimizer._get_optim(parameter)
        optimizer.grad_clip[parameter] = optimizer._get_grad_clip(parameter)
        _load_state_dict(own, optimizer._state_waiting_to_be_consumed.pop(name))
        getattr(own, "optimizer", own)._opt_called = True


def loose_parameters(optimizer: Any, modules: _Modules) -> dict[str, Any]:
    """Parameters that live in Pyro's store alone: ``pyro.param`` statements of models that are functions.

    :param modules: those among ``{"model": …, "guide": …}`` that are modules.
    """
    owned, store = _places(modules), pyro.get_param_store()
    constraints = store.get_state()["constraints"]
    if isinstance(optimizer, PyroOptim):
        waiting = optimizer._state_waiting_to_be_consumed
        chosen = {id(p) for p in optimizer.optim_objs} | {id(p) for n, p in store.named_parameters() if n in waiting}
    elif optimizer is not None:
        chosen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    else:  # nothing says what is trained
        chosen = {id(p) for _, p in store.named_parameters() if len(modules) < 2}
    result = {}
    for name, parameter in store.named_parameters():
        if id(parameter) in chosen and id(parameter) not in owned:
            support = support_to_plain(constraints[name])
            if support is None:
                raise ValueError(f"parameter {name!r} has a constraint that cannot be saved: {constraints[name]}.")
            result[name] = {"unconstrained": parameter.detach(), "support": support}
    return result


def set_loose_parameters(saved: dict[str, Any]) -> _Action:
    """Checks what :func:`loose_parameters` gave; the action returned puts it into the store."""
    store = pyro.get_param_store()
    there = dict(store.named_parameters())
    values = [(name, entry["unconstrained"], support_from_plain(entry["support"])) for name, entry in saved.items()]
    for name, value, _ in values:
        if name in there and there[name].shape != value.shape:
            raise ValueError(f"parameter {name!r} has shape {there[name].shape}, and {value.shape} in the checkpoint.")

    def load() -> None:
        for name, value, support in values:
            if name not in store:
                store.setdefault(name, transform_to(support)(value), support)
            # the unconstrained numbers themselves: transforming there and back would round them
            dict(store.named_parameters())[name].data.copy_(value)

    return load


# ---- random generators


def get_rng_state() -> dict[str, Any]:
    """States of the global generators of torch (CPU and every CUDA device), NumPy and Python, as plain values.

    >>> state = get_rng_state()
    >>> first = torch.rand(3)
    >>> set_rng_state(state)
    >>> torch.equal(torch.rand(3), first)
    True
    """
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def check_rng_state(state: Any) -> None:
    """Raises if :func:`set_rng_state` would fail, possibly with half of the generators set."""
    try:
        torch.Generator().set_state(state["torch"].cpu())
        np.random.RandomState().set_state(state["numpy"])
        random.Random().setstate(state["python"])
        if any(s.cpu().dtype != torch.uint8 for s in state["cuda"]):
            raise TypeError("those of CUDA are no bytes.")
    except Exception as error:
        raise ValueError(f"rng does not hold the states of random generators: {error}") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets what :func:`get_rng_state` gave; CUDA's if there are as many devices as there were."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


# ---- files

# A line that says what the file is, then format version, length and SHA-256 of what follows.
_MAGIC = b"pyro_vsd checkpoint\n"
_HEADER = struct.Struct(">IQ32s")
_VERSION = 2
# A process that was killed while writing leaves its file behind. No checkpoint takes this many seconds to write.
_ABANDONED = 3600.0


def to_plain(value: Any, name: str) -> Any:
    """``value`` as tensors, numbers, strings, ``None``, and lists, tuples and dicts of these; errors call it ``name``.

    >>> to_plain({"shape": torch.Size([2]), "last": nn.Parameter(torch.zeros(1))}, "extra")
    {'shape': (2,), 'last': tensor([0.])}
    """
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            raise TypeError(f"{name} is sharded over processes. Save it with torch.distributed.checkpoint instead.")
        tensor = value.detach().as_subclass(Tensor)
        # A view would be saved with its whole storage.
        viewed = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.clone() if viewed else tensor
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    kinds: Any = ((np.bool_, bool), (numbers.Integral, int), (numbers.Real, float), (str, str))
    for kind, plain in kinds:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(to_plain(key, name), (Tensor, list, dict)):
                raise TypeError(f"{name} has the key {key!r}, which is no string or number.")
        return {to_plain(k, name): to_plain(v, f"{name}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{name} is a {_kind(value)}. A checkpoint holds tensors, numbers, strings, lists and dicts.")


def write_archive(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes plain ``content``. Whatever happens meanwhile, ``path`` holds the old file or the new one, whole."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir() or target.is_dir():
        raise ValueError(f"path must be a file in a folder that exists, not {os.fspath(path)!r}.")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(_MAGIC + _HEADER.pack(_VERSION, len(payload), hashlib.sha256(payload).digest()))
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # makes the renaming durable, where the system lets a folder be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()


def read_archive(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """The content of a file of :func:`write_archive`, after a check of its length and checksum."""
    name, data = os.fspath(path), Path(path).read_bytes()
    start = len(_MAGIC) + _HEADER.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise ValueError(f"path: {name!r} is no checkpoint of pyro_vsd, or one that is truncated.")
    version, length, digest = _HEADER.unpack(data[len(_MAGIC) : start])
    if version != _VERSION:
        raise ValueError(f"path: {name!r} is of a different version or damaged: its format is {version}.")
    payload = memoryview(data)[start:]
    if len(payload) != length or hashlib.sha256(payload).digest() != digest:
        raise ValueError(f"path: {name!r} is damaged: its length or checksum is wrong.")
    try:
        content: dict[str, Any] = torch.load(io.BytesIO(payload), map_location=map_location or "cpu", weights_only=True)
        content.keys()
    except Exception as error:  # what a crafted file can make torch raise is not a short list
        reason = (str(error).splitlines() or [_kind(error)])[0]
        raise ValueError(f"path: {name!r} does not hold tensors and plain containers: {reason}") from error
    return content
