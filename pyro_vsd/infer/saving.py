"""Saving a guide: its state is all there is, of plain types, and needs no data to load."""

import copy
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd.infer.parameters import as_parameter
from pyro_vsd.infer.sites import Site, support_from_plain

__all__ = ["Saving"]


class Saving(AutoGuide):
    """What :class:`~pyro_vsd.infer.VSDGuide` does for ``state_dict``, pickle and ``deepcopy``."""

    sites: dict[str, Site]
    supports: dict[str, constraints.Constraint]
    num_reflections: int
    vector_kind: str
    rank: int | None
    example_dim: int
    init_loc_fn: Any

    def _set(self, role: str, name: str, value: nn.Parameter | nn.Module) -> None:
        raise NotImplementedError

    def _make_parameters(self, site: Site, value: Tensor) -> None:
        raise NotImplementedError

    def _set_sites(self, sites: dict[str, Site]) -> None:
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any]:
        """Plain types that say how the parameters are laid out."""
        return {
            "sites": [site.to_plain() for site in self.sites.values()],
            "num_reflections": self.num_reflections,
            "vectors": self.vector_kind,
            "rank": self.rank,
            "example_dim": self.example_dim,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Done before the parameters are loaded, see ``_load_from_state_dict``."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        state = state_dict.get(prefix + "_extra_state")
        if state is not None:
            self._lay_out(state, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _lay_out(self, state: dict[str, Any], tensors: Any, prefix: str) -> None:
        """Makes the parameters that a saved state has, where they are not there yet."""
        sites = {plain["name"]: Site.from_plain(plain) for plain in state["sites"]}
        if self.sites and self.sites != sites:
            here = {n: (s.event_shape, s.noise_dim) for n, s in self.sites.items()}
            there = {n: (s.event_shape, s.noise_dim) for n, s in sites.items()}
            raise ValueError(
                f"expected the state of a guide with the sites (shape, noise axis) {here}, got one with {there}. It "
                "was saved for another model."
            )
        unwritable = [n for n, s in sites.items() if s.kind == "mean_field" and s.support is None]
        if unwritable and not self.sites:
            raise ValueError(
                f"the supports of {unwritable} could not be saved as plain types. Call guide.setup(*args) with the "
                "model's arguments before loading."
            )
        self.example_dim = state["example_dim"]
        layout = (state["num_reflections"], state["vectors"], state["rank"])
        if self.sites and layout == (self.num_reflections, self.vector_kind, self.rank):
            return
        self.num_reflections, self.vector_kind, self.rank = layout
        self.supports |= {n: support_from_plain(s.support) for n, s in sites.items() if s.support is not None}
        for site in sites.values():
            like = tensors[prefix + _leading_parameter(site)]
            shape = site.batch_shape + site.event_shape
            if site.kind == "mean_field":
                self._set("loc", site.name, as_parameter(like))
                self._set("log_scale", site.name, as_parameter(like))
            else:
                self._make_parameters(site, torch.ones(shape, dtype=like.dtype, device=like.device))
        self._set_sites(sites)

    def __getstate__(self) -> dict[str, Any]:
        # Pyro's own __getstate__ takes the model away from the live guide.
        model, master, trace = self._model, self.master, self.prototype_trace
        state = dict(super().__getstate__())
        self._model, self.master = model, master
        state.update(_model=(None,), master=None, prototype_trace=trace if not self.sites else None, plates={})
        if self.sites:
            state["init_loc_fn"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        # The copy serves the same model, or the model's copy where both are copied together.
        new._model = (memo.get(id(self.model), self.model),)
        new.init_loc_fn = self.init_loc_fn
        return new


def _leading_parameter(site: Site) -> str:
    role, key = {"weight": ("theta", site.name), "scale": ("z_loc", site.partner), "mean_field": ("loc", site.name)}[
        site.kind
    ]
    return f"{role}.{key}"
