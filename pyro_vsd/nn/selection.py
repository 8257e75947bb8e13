"""Which layers of a network become Bayesian: the layers that can, and what ``include`` and ``exclude`` say of them."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

__all__ = ["LAYERS", "Candidate", "Selector", "candidates", "select"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)

Rule = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Selector = Rule | Iterable[Rule]


class Candidate(NamedTuple):
    """A layer that may become Bayesian, with every path that leads to it."""

    layer: nn.Module
    paths: tuple[str, ...]

    @property
    def site(self) -> str:
        """The path of the weight, for messages."""
        return _join(self.paths[0], "weight")


def candidates(net: nn.Module) -> list[Candidate]:
    """Layers of a kind that can be Bayesian and are not yet, each once, in the order of the network."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        if isinstance(module, LAYERS) and "weight" not in module.__dict__.get("_pyro_samples", ()):
            found.setdefault(id(module), (module, []))[1].append(path)
    return [Candidate(module, tuple(paths)) for module, paths in found.values()]


def select(layers: list[Candidate], include: Selector | None, exclude: Selector | None) -> list[Candidate]:
    """The layers that some rule of ``include`` takes (all, without one) and no rule of ``exclude`` does."""
    chosen = layers
    if include is not None:
        chosen = _matches("include", layers, include)
    if exclude is not None:
        left_out = {id(c.layer) for c in _matches("exclude", layers, exclude)}
        chosen = [c for c in chosen if id(c.layer) not in left_out]
    if not chosen:
        raise ValueError(
            f"net: expected at least one weight to become Bayesian, got none with include={include!r} and "
            f"exclude={exclude!r}. {_choices(layers)}"
        )
    return chosen


def _matches(argument: str, layers: list[Candidate], selector: Selector) -> list[Candidate]:
    if isinstance(selector, (str, type)) or callable(selector) or not isinstance(selector, Iterable):
        selector = [selector]
    rules = list(selector)
    taken: set[int] = set()
    for rule in rules:
        if not (isinstance(rule, (str, type)) or callable(rule)):
            raise TypeError(
                f"{argument}: expected a pattern, a layer type, a function (name, module) -> bool, or a list of "
                f"these, got {rule!r}."
            )
        hits = {id(c.layer) for c in layers if any(_takes(rule, path, c.layer) for path in c.paths)}
        # A function may well say no to all; a pattern or type that matches nothing is a slip.
        if not hits and isinstance(rule, (str, type)):
            shown = repr(rule) if isinstance(rule, str) else rule.__name__
            raise ValueError(f"{argument}: expected a pattern that matches some layer, got {shown}. {_choices(layers)}")
        taken |= hits
    return [c for c in layers if id(c.layer) in taken]


def _takes(rule: Any, path: str, layer: nn.Module) -> bool:
    if isinstance(rule, type):
        return isinstance(layer, rule)
    if not isinstance(rule, str):
        return bool(rule(path, layer))
    parts = path.split(".") if path else []
    above = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, rule) for name in [*above, _join(path, "weight")])


def _choices(layers: list[Candidate]) -> str:
    if not layers:
        return "The network has no Linear or convolution layer whose weight is still a parameter."
    return "Layers: " + ", ".join(repr(path) for c in layers for path in c.paths) + "."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
