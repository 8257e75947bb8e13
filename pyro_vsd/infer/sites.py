"""What a guide knows of a model's latent sites: which are weights, where their noise acts, and where they start.

A model can say so itself, in the ``infer`` argument of a sample statement:
``pyro.sample("w", prior, infer={"vsd": {"noise_dim": -1, "init": tensor, "z": "w_z"}})``, each key optional. Otherwise
the noise axis is found from the first operation that uses the weight.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.infer.autoguide.utils import helpful_support_errors
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd._utils import base_constraint, evaluation_mode
from pyro_vsd.distributions import ScaleMixtureNormal
from pyro_vsd.distributions.checks import event_axis
from pyro_vsd.distributions.layers import find_layer
from pyro_vsd.infer.mean_field import mean_field_transform, support_to_plain

__all__ = ["Entry", "Frame", "Site", "listed_entries", "make_sites", "traced_entries", "tracing_model"]


@dataclass(frozen=True)
class Frame:
    """A plate around a site. Its size at set-up, a batch's, does not make two plates different."""

    name: str
    dim: int
    size: int = field(compare=False)
    full_size: int


@dataclass(frozen=True)
class Site:
    """One latent site, of plain types, so that a guide can be rebuilt without data.

    :ivar kind: ``"weight"`` (structured dropout), ``"scale"`` (z of a hierarchical weight) or ``"mean_field"``.
    :ivar batch_shape: of the parameters: plates at their full size.
    :ivar noise_dim: for weights, the axis of the noise units; -1 otherwise.
    :ivar partner: the weight's z site, or the z site's weight; empty where there is none.
    :ivar support: plain form of the support, see ``support_to_plain``; ``None`` where it has none.
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

    @property
    def is_number(self) -> bool:
        return not self.batch_shape + self.event_shape

    @property
    def parameter_roles(self) -> tuple[tuple[str, str], ...]:
        """Roles of the site's parameters, each with the name of the site that it is kept under."""
        if self.kind == "weight":
            return ("theta", self.name), ("log_alpha", self.name), ("vectors", self.name)
        if self.kind == "scale":
            return ("z_loc", self.partner), ("z_log_scale", self.partner)
        return ("loc", self.name), ("log_scale", self.name)


@dataclass
class Entry:
    """A latent site before its record is made.

    :ivar value: its start, at the full size of its plates.
    :ivar stated: what the model says of it under ``infer["vsd"]``.
    :ivar notes: how the model used it first, see :class:`WeightProbe`.
    """

    name: str
    prior: Any
    value: Tensor
    frames: tuple[Frame, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_weight(self) -> bool:
        return is_weight(self.prior)


def is_weight(prior: Any) -> bool:
    """A real site of event dimension 2 or more."""
    support = base_constraint(prior.support)
    return bool((support is constraints.real or support is constraints.real_vector) and prior.event_dim >= 2)


def initial_value(site: Mapping[str, Any], init_loc_fn: Callable[..., Any] | None) -> Tensor:
    """Where a site starts, in its constrained space."""
    prior = site["fn"]
    if init_loc_fn is not None:
        value: Tensor = init_loc_fn(site)
        return value
    if is_weight(prior):
        shape = prior.batch_shape + prior.event_shape
        init = site["infer"].get("vsd", {}).get("init")
        if init is not None:
            return init.detach().expand(shape)
        like = prior.sample()
        weights = [
            torch.nn.init.xavier_uniform_(torch.empty(prior.event_shape, dtype=like.dtype, device=like.device))
            for _ in range(max(1, prior.batch_shape.numel()))
        ]
        return torch.stack(weights).reshape(shape)
    median: Tensor = init_to_median(site)
    return median


def listed_entries(sites: Mapping[str, Any], init_loc_fn: Callable[..., Any] | None) -> list[Entry]:
    """Entries from a model's own list of its sites, ``{name: {"fn": prior, "infer": …}}``, without running it."""
    entries = []
    for name, listed in sites.items():
        site = {"name": name, "type": "sample", "value": None, "is_observed": False, "args": (), "kwargs": {}, **listed}
        with torch.no_grad():
            value = initial_value(site, init_loc_fn)
        entries.append(Entry(name, site["fn"], value, stated=site["infer"].get("vsd", {})))
    return entries


@contextmanager
def tracing_model(guide: Any, init_loc_fn: Callable[..., Any] | None) -> Iterator[dict[str, dict[str, Any]]]:
    """While open, the guide's model starts its sites as the guide wants and notes which operations use its weights.

    Modules are in evaluation mode meanwhile: running statistics do not move.
    """
    notes: dict[str, dict[str, Any]] = {}

    def start(site: dict[str, Any]) -> Tensor:
        value = initial_value(site, init_loc_fn)
        if not is_weight(site["fn"]):
            return value
        notes[site["name"]] = {}
        return WeightProbe.wrap(value.detach(), notes[site["name"]])

    original = guide._model
    guide._model = (InitMessenger(start)(original[0]),)
    try:
        with evaluation_mode(original[0]), torch.no_grad():
            yield notes
    finally:
        guide._model = original


def traced_entries(trace: Any, notes: dict[str, dict[str, Any]]) -> list[Entry]:
    """Entries from a prototype trace, values repeated to the full size of subsampled plates."""
    entries = []
    for name, site in trace.iter_stochastic_nodes():
        prior = site["fn"]
        value = site["value"].detach().as_subclass(Tensor)
        site["value"] = value
        frames = []
        for frame in site["cond_indep_stack"]:
            full_size = frame.full_size or frame.size
            frames.append(Frame(frame.name, frame.dim, frame.size, full_size))
            if full_size != frame.size:
                value = periodic_repeat(value, full_size, frame.dim - prior.event_dim).contiguous()
        _warn_without_to_event(name, prior, frames)
        with helpful_support_errors(site):
            mean_field_transform(prior.support)
        stated = site["infer"].get("vsd", {})
        entries.append(Entry(name, prior, value, tuple(frames), stated, notes.get(name, {})))
    return entries


def _warn_without_to_event(name: str, prior: Any, frames: list[Frame]) -> None:
    plated = {frame.dim for frame in frames}
    loose = [d for d in range(-len(prior.batch_shape), 0) if d not in plated and prior.batch_shape[d] > 1]
    if loose and not frames:  # without plates, which make dimensions of size 1, a shape (K, 1) is a matrix, too
        loose = list(range(-len(prior.batch_shape), 0))
    if loose and base_constraint(prior.support) is constraints.real and prior.event_dim + len(loose) >= 2:
        warnings.warn(
            f"site {name!r} has shape {tuple(prior.batch_shape + prior.event_shape)} but only {prior.event_dim} event "
            f"dimension(s), so the guide does not treat it as a weight and gives it a mean-field posterior. If it is a "
            f"weight, declare it with .to_event({prior.event_dim + len(loose)}).",
            stacklevel=2,
        )


def make_sites(entries: list[Entry], noise_dims: Mapping[str, int], conv_noise: str) -> dict[str, Site]:
    """The records, in the order of the model, each z before its weight."""
    weights = [entry.name for entry in entries if entry.is_weight]
    unknown = sorted(set(noise_dims) - set(weights), key=str)
    if unknown:
        raise ValueError(f"noise_dim: {unknown} are no weights of the model; its weights are {weights}.")
    names = {entry.name for entry in entries}
    partners: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry.prior, ScaleMixtureNormal):
            z_name = entry.stated.get("z") or _find_z(entry.prior.z, entries)
            if z_name in names:
                partners[entry.name], partners[z_name] = z_name, entry.name
    sites = {}
    for entry in entries:
        event_dim = entry.prior.event_dim
        sites[entry.name] = Site(
            name=entry.name,
            kind="weight" if entry.is_weight else "scale" if entry.name in partners else "mean_field",
            batch_shape=tuple(entry.value.shape[: entry.value.dim() - event_dim]),
            event_shape=tuple(entry.prior.event_shape),
            frames=entry.frames,
            noise_dim=_noise_dim(entry, noise_dims, conv_noise) if entry.is_weight else -1,
            partner=partners.get(entry.name, ""),
            support=support_to_plain(entry.prior.support),
        )
    if entries and not weights:
        warnings.warn(
            f"the model has no weight (no real site of event dimension 2 or more) among {list(sites)}: the guide is a "
            "mean-field guide. A weight needs .to_event(2).",
            stacklevel=2,
        )
    return sites


def _find_z(z: Tensor, entries: list[Entry]) -> str:
    for entry in entries:
        if entry.value is z or (entry.value.shape == z.shape and entry.value.data_ptr() == z.data_ptr()):
            return entry.name
    return ""


def _noise_dim(entry: Entry, noise_dims: Mapping[str, int], conv_noise: str) -> int:
    prior, rank = entry.prior, entry.prior.event_dim
    given = noise_dims.get(entry.name, entry.stated.get("noise_dim"))
    if isinstance(given, Mapping):  # a convolution states the axes of both kinds of channels
        given = None if isinstance(prior, ScaleMixtureNormal) and conv_noise == "out" else given[conv_noise]
    if given is None and isinstance(prior, ScaleMixtureNormal):  # noise runs along z
        return prior.noise_dim
    if given is None:
        return noise_axis(entry.notes, rank, conv_noise)
    axis = event_axis(given, rank, prior.event_shape, f"noise_dim of {entry.name!r}")
    if isinstance(prior, ScaleMixtureNormal) and axis != prior.noise_dim:
        raise ValueError(
            f"conv_noise, noise_dim: the noise of {entry.name!r} must run along its z, axis {prior.noise_dim}, not "
            f"{axis}. For input channels make the prior with HierarchicalPrior(channels='in')."
        )
    return axis


# ---- the first operation that uses a weight

_TENSOR: Any = Tensor  # its properties are descriptors, which the stubs hide
_TRANSPOSES = {_TENSOR.mT.__get__, _TENSOR.T.__get__, Tensor.t, torch.t}
_SWAPS = {Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes}
_PASS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.detach, Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.expand,
    Tensor.reshape, Tensor.view, Tensor.squeeze, Tensor.unsqueeze, torch.squeeze, torch.unsqueeze,
    torch.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point,
}  # fmt: skip


class WeightProbe(Tensor):
    """A weight's initial value that notes the first operation that uses it, in ``notes`` shared with its views."""

    notes: dict[str, Any]
    transposed: bool

    @staticmethod
    def wrap(value: Tensor, notes: dict[str, Any], transposed: bool = False) -> "WeightProbe":
        probe = value.as_subclass(WeightProbe)
        probe.notes, probe.transposed = notes, transposed
        return probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        getter = getattr(func, "__name__", "") == "__get__"
        swapped = func in _TRANSPOSES or (func in _SWAPS and isinstance(args[0], WeightProbe) and args[0].dim() == 2)
        probe = args[0] if args else None
        if isinstance(out, Tensor) and out.dim() > 0 and (swapped or func in _PASS) and isinstance(probe, WeightProbe):
            return WeightProbe.wrap(out.as_subclass(Tensor), probe.notes, probe.transposed != swapped)
        if not getter and func not in _PASS:
            for position, arg in enumerate([*args, *kwargs.values()]):
                if isinstance(arg, WeightProbe):
                    arg.notes.setdefault("first_use", (func, position, arg.transposed))
        return out.as_subclass(Tensor) if isinstance(out, WeightProbe) else out


def noise_axis(notes: dict[str, Any], rank: int, conv_noise: str) -> int:
    """The negative noise axis of a weight, from its first use: inputs of a product, channels of a convolution.

    Where the first use is no row of the table of layers (a recurrent layer, for instance) the noise is part of the
    dense draw, and the last axis serves: the inputs in torch's layout.
    """
    func, position, transposed = notes.get("first_use", (None, 0, False))
    layer = find_layer(func, position)
    axis = -1 if layer is None else layer.noise_dim(rank, conv_noise)
    return -3 - axis if transposed and rank == 2 else axis
