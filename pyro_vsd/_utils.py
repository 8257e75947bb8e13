"""What every part of the package needs: checks of options, rows of nested tensors, parameters, modes, seeds."""

import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.distributions import Independent, constraints
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "BatchWatch",
    "Watch",
    "base_constraint",
    "base_distribution",
    "capturing",
    "check_choice",
    "check_integer",
    "check_nonnegative",
    "check_positive",
    "evaluation_mode",
    "call_arguments",
    "flatten_dict",
    "free_name",
    "gauss_hermite",
    "is_capturing",
    "map_tensors",
    "mix_seed",
    "num_rows",
    "packs_inputs",
    "reset_parameters_",
    "split_rows",
    "split_target",
    "take_rows",
    "tensors_in",
    "to_device",
]


# ---- checks of options


def check_integer(name: str, value: Any, least: int | None = None) -> None:
    """Raises unless ``value`` is an integer of at least ``least``; ``True`` and ``False`` are none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{bound}, not {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raises unless ``value`` is a positive finite number."""
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive finite number, not {value!r}.")


def check_nonnegative(name: str, value: Any) -> None:
    """Raises unless ``value`` is a finite number of at least zero."""
    if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises unless ``value`` is one of these words."""
    if not isinstance(value, str) or value not in choices:  # comparing an array with a word gives an array
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


# ---- distributions


def base_distribution(distribution: Any) -> Any:
    """The distribution under ``.to_event(…)``.

    >>> base_distribution(Independent(torch.distributions.Normal(torch.zeros(2), 1.0), 1))
    Normal(loc: torch.Size([2]), scale: torch.Size([2]))
    """
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def base_constraint(constraint: Any) -> Any:
    """The constraint under ``constraints.independent``.

    >>> base_constraint(constraints.real_vector)
    Real()
    """
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return constraint


@cache
def gauss_hermite(num_nodes: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights that integrate against a standard normal density.

    >>> nodes, weights = gauss_hermite(8)
    >>> round(sum(w * x**2 for x, w in zip(nodes, weights)), 6)
    1.0
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return tuple(nodes.tolist()), tuple((weights / weights.sum()).tolist())


# ---- rows of nested tensors


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure with ``function`` applied to each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def num_rows(tree: Any, name: str = "data") -> int:
    """The first dimension that all tensors of ``tree`` share; scalars do not count.

    >>> num_rows((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(tree) if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    if not sizes:
        advice = "Turn arrays into tensors: torch.as_tensor(x, dtype=torch.float32)."
        raise ValueError(f"{name} holds no tensor with rows. {advice}")
    if len(sizes) > 1:
        raise ValueError(f"{name} must have the same number of rows in each tensor; the shapes are {shapes}.")
    return sizes.pop()


def take_rows(tree: Any, index: Tensor | slice) -> Any:
    """These rows of each tensor; scalars stay as they are."""

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        return tensor[index.to(tensor.device) if isinstance(index, Tensor) else index]

    return map_tensors(take, tree)


def split_rows(rows: int, size: int) -> list[slice]:
    """Near-equal batches of at most ``size`` rows: a short last one would weigh each of its rows far too much.

    >>> [part.stop - part.start for part in split_rows(7, 3)]
    [3, 2, 2]
    """
    count = -(-rows // size)
    least, longer = divmod(rows, max(count, 1))  # the first batches have one row more
    return [slice(i * least + min(i, longer), (i + 1) * least + min(i + 1, longer)) for i in range(count)]


def to_device(tree: Any, device: torch.device | None) -> Any:
    """Every tensor on ``device``; ``None`` leaves them where they are."""
    if device is None:
        return tree
    return map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), tree)


# ---- batches

# Entries of a dict that are no input: the target, if its key is not given, and the weights of the rows.
_TARGETS, _WEIGHT = ("labels", "y"), "sample_weight"
# How many batches are compared: two different ones by chance have the same labels, four hardly.
_LOOKS = 4


def split_target(batch: Any, target: str | None = None) -> tuple[tuple[Any, ...], Any]:
    """The inputs of a batch, a dict of them as one, and its target: the last part, or a dict's entry ``target``;
    ``None`` if there is none.

    >>> (inputs,), y = split_target({"ids": torch.zeros(3), "labels": torch.ones(3)})
    >>> list(inputs), len(y)
    (['ids'], 3)
    """
    if isinstance(batch, Mapping):
        key = next((name for name in ((target,) if target else _TARGETS) if name in batch), None)
        return ({k: v for k, v in batch.items() if k not in (key, _WEIGHT)},), batch[key] if key else None
    if isinstance(batch, (tuple, list)):
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    return (batch,), None


def call_arguments(model: Any, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as arguments of the model. Models of ``vsd.nn`` take several, or a dict, as one argument; of others a dict
    is the keyword arguments, unless they have an argument that is a dict."""
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return ((inputs,) if len(inputs) > 1 and packs_inputs(model) else inputs), {}
    named = dict(inputs[0])
    if packs_inputs(model):
        return (named["x"] if set(named) == {"x"} else named,), {}
    try:
        inspect.signature(model.forward if isinstance(model, nn.Module) else model).bind(**named)
    except TypeError:
        return (named,), {}
    return (), named


def packs_inputs(model: Any) -> bool:
    return bool(getattr(pyro.poutine.unwrap(model), "packs_inputs", False))


class BatchWatch:
    """Warns once if the first few batches of a training run hold different targets, where the likelihood counts them
    as the whole data.

    Targets are compared in sorted order, since a full batch may come shuffled, and inputs not at all, since they may
    be augmented. On a GPU each of the few looks waits for the device.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.of: Any = None
        self.first: Tensor | None = None

    def look(self, y: Tensor, message: str) -> None:
        if self.of != (y.shape, y.dtype):  # the data has grown, as in active learning, or been cast
            self.looks, self.of, self.first = 0, (y.shape, y.dtype), None
        if self.looks >= _LOOKS or is_capturing():
            return
        self.looks += 1
        # NaN, which may stand for missing targets, is equal to nothing.
        targets = y.detach().cpu().flatten().nan_to_num().sort().values
        if self.first is None:
            self.first = targets
        elif not torch.equal(self.first, targets):
            self.looks = _LOOKS
            warnings.warn(message, stacklevel=3)
        if self.looks >= _LOOKS:
            self.first = None


# ---- modules and their parameters


def free_name(name: str, value: Tensor) -> str:
    """``name``, unless Pyro's store holds a different tensor under it: then the first free ``name__1``, ``name__2``."""
    store = pyro.get_param_store()
    if name not in store or store[name] is value:
        return name
    last = getattr(value, "_store_name", "")  # a short cut past the names of guides that came before
    if last.startswith(name) and last in store and store[last] is value:
        return last
    count = 1
    while (candidate := f"{name}__{count}") in store and store[candidate] is not value:
        count += 1
    value._store_name = candidate  # type: ignore[attr-defined]
    return candidate


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """All modules of ``model`` in evaluation mode, each back in its own mode afterwards.

    If ``model`` is a function, the modules it calls are switched on their first call.
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
            network = vars(module).get("network")  # what a Bayesian network holds without registering it
            if isinstance(network, nn.Module):
                switch(network)
    else:
        handle = register_module_forward_pre_hook(switch)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for module in switched:
            module.training = True


def reset_parameters_(net: nn.Module) -> nn.Module:
    """Draws every layer's parameters anew, in place, each as its class does when it is made.

    What is frozen stays. Of a LoRA adapter the first factor is drawn where the second is zero, as ``peft`` starts it:
    the network then still computes what it did. Other adapters stay.
    """
    kept = {id(factor) for factor in _started_factors(net)}
    for module in net.modules():
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset) or id(module) in kept or _is_frozen(module):
            continue
        frozen = [(p, p.detach().clone()) for p in module.parameters() if not p.requires_grad]
        reset()
        with torch.no_grad():
            for parameter, value in frozen:
                parameter.copy_(value)
    return net


def _started_factors(net: nn.Module) -> Iterator[nn.Module]:
    """Factors of LoRA adapters that are not to be drawn anew."""
    layer: Any
    for layer in net.modules():
        if isinstance(getattr(layer, "lora_B", None), nn.ModuleDict):
            for name, factor in layer.lora_B.items():
                yield factor
                if bool(factor.weight.any()):
                    yield layer.lora_A[name]


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, none of which is trained, and no random weight (a buffer outside of states)."""
    parameters = list(module.parameters())
    random = any(part._non_persistent_buffers_set for part in module.modules())
    return bool(parameters) and not random and not any(p.requires_grad for p in parameters)


class Watch:
    """Modules as they are now: which there are, their attributes and hooks, and the tensors they hold.

    :param roots: with all modules below them, and those that an attribute holds without registering them.
    """

    def __init__(self, *roots: nn.Module):
        found: dict[int, nn.Module] = {}
        queue = list(roots)
        while queue:
            for module in queue.pop().modules():
                if id(module) not in found:
                    found[id(module)] = module
                    queue += [value for value in vars(module).values() if isinstance(value, nn.Module)]
        own = [vars(module) for module in found.values()]
        containers = (dict, list, set)
        private = [{k for k, v in m.items() if k[0] == "_" and isinstance(v, containers)} for m in own]
        self._modules = own
        self._attributes = [
            partial(itemgetter("training", *(k for k in m if k not in hidden)), m)
            for m, hidden in zip(own, private, strict=True)
        ]
        self._contents: list[Any] = []
        for m in own:
            self._contents += [m[part] for part in ("_parameters", "_buffers", "_modules") if m[part]]
            self._contents += [v for k, v in m.items() if k[0] != "_" and isinstance(v, containers)]
        self._hooks = [m[part] for m in own for part in ("_forward_hooks", "_forward_pre_hooks")]
        self.refresh()

    def fits(self) -> bool:
        """Whether nothing has changed since; some microseconds."""
        try:
            return all(map(is_, self._now(), self._known))
        except (KeyError, RuntimeError):  # an attribute was deleted
            return False

    def refresh(self) -> None:
        """Takes what is there now for what is to be."""
        self._known = list(self._now())

    def _now(self) -> Iterator[Any]:
        # Compared by `is`, nearly all of it in C.
        return chain(
            map(len, self._modules),
            chain.from_iterable(attributes() for attributes in self._attributes),
            chain.from_iterable(c.values() if isinstance(c, dict) else c for c in self._contents),
            map(len, self._hooks),
            (_END,),
        )


_END = object()


# ---- small things

_CAPTURING: ContextVar[bool] = ContextVar("pyro_vsd_capturing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Within this context a step is captured for a compiler: code that looks at values of tensors keeps still."""
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


def is_capturing() -> bool:
    """Whether a step is being captured, by :func:`capturing` or by ``torch.compile``."""
    return _CAPTURING.get() or torch.compiler.is_compiling()


def mix_seed(seed: int, number: int) -> int:
    """A seed for stream ``number``: far apart for neighbours (the golden ratio, as in splitmix)."""
    return (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63


def flatten_dict(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots.

    >>> flatten_dict({"loss": 1.0, "kl": {"w": 2.0}})
    {'loss': 1.0, 'kl.w': 2.0}
    """
    result: dict[str, Any] = {}
    for key, value in record.items():
        result |= flatten_dict(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result
