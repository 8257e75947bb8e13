"""What a guide knows of a model's latent sites: records of plain types, so that a guide can be rebuilt without data."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributions import constraints

__all__ = ["Frame", "Site", "support_from_plain", "support_to_plain"]


@dataclass(frozen=True)
class Frame:
    """A plate around a site. Its size at set-up, a batch's, is not what makes two plates different."""

    name: str
    dim: int
    size: int = field(compare=False)
    full_size: int


@dataclass(frozen=True)
class Site:
    """One latent site.

    :ivar kind: ``"weight"`` (structured dropout), ``"scale"`` (z of a hierarchical weight) or ``"mean_field"``.
    :ivar batch_shape: of the parameters: plates at their full size.
    :ivar noise_dim: for weights, the axis of the noise units; -1 otherwise.
    :ivar partner: the weight's z site, or the z site's weight; empty where there is none.
    :ivar support: plain form of the support, see :func:`support_to_plain`; ``None`` where it has none.
    """

    name: str
    kind: str
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    frames: tuple[Frame, ...] = ()
    noise_dim: int = -1
    partner: str = ""
    support: Any = None

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "Site":
        frames = tuple(Frame(**frame) for frame in plain["frames"])
        shapes = {key: tuple(plain[key]) for key in ("batch_shape", "event_shape")}
        return Site(**{**plain, **shapes, "frames": frames})


# Constraints without arguments, by name.
_PLAIN = {
    name: getattr(constraints, name)
    for name in (
        "real",
        "positive",
        "nonnegative",
        "unit_interval",
        "simplex",
        "lower_cholesky",
        "corr_cholesky",
        "positive_definite",
    )
}


def support_to_plain(support: Any) -> Any:
    """A support as strings, numbers and lists, or ``None`` where it cannot be written so.

    >>> support_to_plain(constraints.independent(constraints.positive, 1))
    ['independent', 'positive', 1]
    """
    if isinstance(support, constraints.independent):
        base = support_to_plain(support.base_constraint)
        return None if base is None else ["independent", base, support.reinterpreted_batch_ndims]
    for name, value in _PLAIN.items():
        if type(support) is type(value) and _bounds(support) == _bounds(value):
            return name
    bounds = _bounds(support)
    for name in ("interval", "greater_than", "less_than", "greater_than_eq", "half_open_interval"):
        if type(support) is getattr(constraints, name):
            return None if None in bounds else [name, *bounds]
    return None


def _bounds(support: Any) -> list[float | None]:
    """The numbers that bound a support; ``None`` for a bound that differs from entry to entry."""
    names = [key for key in ("lower_bound", "upper_bound") if hasattr(support, key)]
    return [_number(getattr(support, key)) for key in names]


def support_from_plain(plain: Any) -> constraints.Constraint:
    """The inverse of :func:`support_to_plain`.

    >>> support_from_plain(["interval", 0.0, 2.0])
    Interval(lower_bound=0.0, upper_bound=2.0)
    """
    if isinstance(plain, str):
        return _PLAIN[plain]
    if plain[0] == "independent":
        return constraints.independent(support_from_plain(plain[1]), plain[2])
    found: constraints.Constraint = getattr(constraints, plain[0])(*plain[1:])
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return float(value)
