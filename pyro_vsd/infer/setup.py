"""From a model to the records of its sites: what is a weight, along which axis its noise runs, where it starts."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.infer.autoguide.utils import helpful_support_errors
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions import ScaleMixtureNormal, WeightPrior
from pyro_vsd.infer.mean_field import mean_field_transform
from pyro_vsd.infer.modes import evaluation_mode
from pyro_vsd.infer.probe import WeightProbe, noise_axis
from pyro_vsd.infer.sites import Frame, Site, support_to_plain

__all__ = ["Entry", "entries_from_priors", "entries_from_trace", "make_sites", "trace_model"]


@dataclass
class Entry:
    """A latent site before its record is made: its prior, its start at the full size of its plates, its plates."""

    name: str
    prior: Any
    value: Tensor
    frames: tuple[Frame, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


def is_weight(prior: Any) -> bool:
    """A real site of event dimension 2 or more."""
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    real = support is constraints.real or support is constraints.real_vector
    return bool(real and prior.event_dim >= 2)


def initial_value(site: Mapping[str, Any], init_loc_fn: Callable[..., Any] | None) -> Tensor:
    """Where a site starts, in its constrained space."""
    prior = site["fn"]
    if init_loc_fn is not None:
        value: Tensor = init_loc_fn(site)
        return value
    if is_weight(prior):
        shape = prior.batch_shape + prior.event_shape
        if isinstance(prior, WeightPrior) and prior.init is not None:
            return prior.init.detach().expand(shape)
        like = prior.sample()
        weights = [_xavier(like, prior.event_shape) for _ in range(max(1, prior.batch_shape.numel()))]
        return torch.stack(weights).reshape(shape)
    median: Tensor = init_to_median(site)
    return median


def _xavier(like: Tensor, shape: torch.Size) -> Tensor:
    return torch.nn.init.xavier_uniform_(torch.empty(shape, dtype=like.dtype, device=like.device))


def entries_from_priors(priors: Mapping[str, Any], init_loc_fn: Callable[..., Any] | None) -> list[Entry]:
    """Entries from a model's own list of its sites, without running it."""
    entries = []
    for name, prior in priors.items():
        site = {"name": name, "fn": prior, "type": "sample", "value": None, "is_observed": False, "infer": {}}
        site.update(args=(), kwargs={})
        with torch.no_grad():
            entries.append(Entry(name, prior, initial_value(site, init_loc_fn)))
    return entries


@contextmanager
def trace_model(guide: Any, init_loc_fn: Callable[..., Any] | None) -> Iterator[dict[str, dict[str, Any]]]:
    """While open, the guide's model starts its sites as the guide wants and notes which operations meet its weights.

    Modules are in evaluation mode meanwhile: running statistics are not moved.
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


def entries_from_trace(trace: Any, notes: dict[str, dict[str, Any]]) -> list[Entry]:
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
        entries.append(Entry(name, prior, value, tuple(frames), notes.get(name, {})))
    return entries


def _warn_without_to_event(name: str, prior: Any, frames: list[Frame]) -> None:
    plated = {frame.dim for frame in frames}
    loose = [d for d in range(-len(prior.batch_shape), 0) if d not in plated and prior.batch_shape[d] > 1]
    if loose and not frames:  # without plates, which make dimensions of size 1, a shape (K, 1) is a matrix, too
        loose = list(range(-len(prior.batch_shape), 0))
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if loose and support is constraints.real and prior.event_dim + len(loose) >= 2:
        warnings.warn(
            f"site {name!r} has shape {tuple(prior.batch_shape + prior.event_shape)} but only {prior.event_dim} event "
            f"dimension(s), so it is no weight to the guide and gets a mean-field posterior. If it is a weight, "
            f"declare it with .to_event({prior.event_dim + len(loose)}).",
            stacklevel=2,
        )


def make_sites(entries: list[Entry], noise_dims: Mapping[str, int], conv_noise: str) -> dict[str, Site]:
    """The records, in the order of the model, each z before its weight."""
    by_name = {entry.name: entry for entry in entries}
    unknown = set(noise_dims) - {e.name for e in entries if is_weight(e.prior)}
    if unknown:
        weights = [e.name for e in entries if is_weight(e.prior)]
        raise ValueError(f"noise_dim: expected weights among {weights}, got {sorted(unknown, key=str)}.")
    partners: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry.prior, ScaleMixtureNormal):
            z_name = entry.prior.z_name or _find_z(entry.prior.z, entries)
            if z_name in by_name:
                partners[entry.name], partners[z_name] = z_name, entry.name
    sites = {}
    for entry in entries:
        prior, event_dim = entry.prior, entry.prior.event_dim
        weight = is_weight(prior)
        sites[entry.name] = Site(
            name=entry.name,
            kind="weight" if weight else "scale" if entry.name in partners else "mean_field",
            batch_shape=tuple(entry.value.shape[: entry.value.dim() - event_dim]),
            event_shape=tuple(prior.event_shape),
            frames=entry.frames,
            noise_dim=_noise_dim(entry, noise_dims, conv_noise) if weight else -1,
            partner=partners.get(entry.name, ""),
            support=support_to_plain(prior.support),
        )
    if entries and not any(site.kind == "weight" for site in sites.values()):
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
    prior, event_dim = entry.prior, entry.prior.event_dim
    if entry.name in noise_dims:
        given = noise_dims[entry.name]
        if not -event_dim <= given < event_dim:
            raise ValueError(
                f"noise_dim: expected an axis of {entry.name!r}, whose shape is {tuple(prior.event_shape)}, got "
                f"{given}."
            )
        return given - event_dim if given >= 0 else given
    stated = getattr(prior, "noise_dim", None)
    if stated is None:
        return noise_axis(entry.notes, event_dim, conv_noise)
    if conv_noise == "in" and getattr(prior, "input_dim", None) not in (None, stated):
        if isinstance(prior, ScaleMixtureNormal):
            raise ValueError(
                f"conv_noise='in': expected z of {entry.name!r} to run along the input channels, got a prior whose z "
                "runs along the output channels. State it where the prior is made: bayesianize(net, …, "
                "conv_noise='in')."
            )
        return int(prior.input_dim)
    return int(stated)
