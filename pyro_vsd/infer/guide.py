"""The autoguide: structured dropout for every weight of a Pyro model, mean-field posteriors for the rest."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd.distributions import HouseholderNormal, LazyWeight, StructuredDropout
from pyro_vsd.infer.mean_field import mean_field_posterior, mean_field_transform
from pyro_vsd.infer.modes import evaluation_mode
from pyro_vsd.infer.options import check_options, check_positive
from pyro_vsd.infer.parameters import as_parameter, get_parameter, register_param, set_parameter
from pyro_vsd.infer.quantiles import weight_quantiles
from pyro_vsd.infer.saving import Saving
from pyro_vsd.infer.setup import Entry, entries_from_priors, entries_from_trace, make_sites, trace_model
from pyro_vsd.infer.sites import Site
from pyro_vsd.infer.vectors import VectorNetwork, make_vectors
from pyro_vsd.ops.noise import NoiseTerms, joint_noise_terms, noise_terms

__all__ = ["VSDGuide"]

_Noise = tuple[Tensor, Tensor, NoiseTerms]
ROLES = ("theta", "log_alpha", "vectors", "z_loc", "z_log_scale", "loc", "log_scale")


class VSDGuide(Saving):
    r"""Variational structured dropout for any Pyro model.

    Each weight (a real site of event dimension 2 or more) has the posterior
    :math:`W = \operatorname{diag}(\xi)\,\Theta,\ \xi \sim \mathcal N(1, U \operatorname{diag}(\alpha) U^\top)`
    (:class:`~pyro_vsd.distributions.StructuredDropout`); its draw puts one :math:`\xi` *per example* on activations.
    Under a :class:`~pyro_vsd.distributions.ScaleMixtureNormal` prior,
    :math:`W = \operatorname{diag}(z \odot \xi)\,\Theta` with a log-normal ``z``. Every other site has a mean-field
    posterior: Normal on its unconstrained space.

    Parameters, all on the guide: ``theta.<site>``, ``log_alpha.<site>``, ``vectors.<site>``; ``z_loc.<site>``,
    ``z_log_scale.<site>`` by the weight's name; ``loc.<site>``, ``log_scale.<site>`` for mean-field sites. Models that
    list their sites (those of ``vsd.nn``) have them from the start, others from the first call or :meth:`setup`. Save
    and load them with ``state_dict``: two guides never share parameters, so values that Pyro's parameter store loads
    from a file under the same names are left alone.

    :param model: a Pyro model.
    :param num_reflections: the number T of reflections. Each costs :math:`O(K)` per example.
    :param vectors: ``"free"`` parameters, or the paper's networks ``"fc"`` and ``"low_rank"``.
    :param rank: hidden units of the low-rank networks.
    :param init_alpha: the geometric mean of the droprates at the start.
    :param init_alpha_spread: standard deviation of ``log α`` at the start. Where all α are equal the reflections have
        no effect and no gradient.
    :param init_vector_scale: standard deviation of the vectors' entries at the start. Only directions matter, so a
        scale ``c`` times smaller turns them ``c`` times faster under Adam.
    :param init_loc_fn: a function of a site for its start, as for Pyro's autoguides. By default weights start at the
        network's own (``vsd.nn``) or at a Xavier draw, other sites at the prior's median.
    :param init_scale: standard deviation of mean-field posteriors and of ``log z`` at the start.
    :param noise_dim: ``{site: axis}`` where the axis of the noise units is not to be found automatically.
    :param conv_noise: noise on ``"out"``\ put or ``"in"``\ put channels of convolutions.
    :param example_dim: the axis of a sequence that counts the examples: 1 for networks that put the sequence first.
    :param create_plates: as for Pyro's autoguides.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> guide = VSDGuide(model, num_reflections=2)
    >>> guide.noise("net.0.weight").event_shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_reflections: int = 2,
        vectors: str = "free",
        rank: int | None = None,
        init_alpha: float = 0.2,
        init_alpha_spread: float = 0.5,
        init_vector_scale: float = 1.0,
        init_loc_fn: Callable[..., Any] | None = None,
        init_scale: float = 0.1,
        noise_dim: Mapping[str, int] | None = None,
        conv_noise: str = "out",
        example_dim: int = 0,
        create_plates: Callable[..., Any] | None = None,
    ):
        if not callable(model):
            raise TypeError(f"model: expected a Pyro model, a function or a module, got {type(model).__name__}.")
        check_options(num_reflections, vectors, rank, conv_noise, example_dim, noise_dim)
        for name, value in (("init_alpha", init_alpha), ("init_vector_scale", init_vector_scale)):
            check_positive(name, value)
        check_positive("init_scale", init_scale)
        if not isinstance(init_alpha_spread, (int, float)) or not 0 <= init_alpha_spread < math.inf:
            raise ValueError(f"init_alpha_spread: expected a number >= 0, got {init_alpha_spread!r}.")
        super().__init__(model, create_plates=create_plates)
        self.num_reflections = num_reflections
        self.vector_kind = vectors
        self.rank = rank
        self.init_alpha, self.init_alpha_spread = init_alpha, init_alpha_spread
        self.init_vector_scale, self.init_scale = init_vector_scale, init_scale
        self.init_loc_fn = init_loc_fn
        self.noise_dims = dict(noise_dim or {})
        self.conv_noise, self.example_dim = conv_noise, example_dim
        self.sites: dict[str, Site] = {}
        self.supports: dict[str, constraints.Constraint] = {}
        if hasattr(model, "latent_sites"):
            self._build(entries_from_priors(model.latent_sites(), self.init_loc_fn))

    # ---- parameters

    def setup(self, *args: Any, **kwargs: Any) -> "VSDGuide":
        """Makes the parameters from one call of the model with these arguments; nothing where they exist already."""
        if not self.sites:
            self._setup_prototype(*args, **kwargs)
        return self

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with trace_model(self, self.init_loc_fn) as notes:
            super()._setup_prototype(*args, **kwargs)
        self._build(entries_from_trace(self.prototype_trace, notes))

    def _build(self, entries: list[Entry]) -> None:
        sites = make_sites(entries, self.noise_dims, self.conv_noise)
        self.supports = {entry.name: entry.prior.support for entry in entries}
        for entry in entries:
            self._make_parameters(sites[entry.name], entry.value)
        self._set_sites(sites)

    def _set_sites(self, sites: dict[str, Site]) -> None:
        self.sites = sites
        self._prototype_frames = {frame.name: frame for site in sites.values() for frame in site.frames}

    def _make_parameters(self, site: Site, value: Tensor) -> None:
        """Parameters of one site, starting at ``value`` (``batch_shape + event_shape``)."""
        name = site.name
        if site.kind == "weight":
            K, T = site.event_shape[site.noise_dim], self.num_reflections
            shape = (*site.batch_shape, K)
            normal = torch.randn(shape, dtype=value.dtype, device=value.device)
            vectors = make_vectors(self.vector_kind, site.batch_shape, T, K, self.rank, self.init_vector_scale, value)
            self._set("theta", name, as_parameter(value))
            self._set("log_alpha", name, as_parameter(math.log(self.init_alpha) + self.init_alpha_spread * normal))
            self._set("vectors", name, vectors)
        elif site.kind == "scale":
            # z starts at 1, so that the network starts where its weights are
            loc = torch.zeros_like(value) if self.init_loc_fn is None else value.log()
            self._set("z_loc", site.partner, as_parameter(loc))
            self._set("z_log_scale", site.partner, as_parameter(torch.full_like(value, math.log(self.init_scale))))
        else:
            loc = mean_field_transform(self.supports[name]).inv(value)
            self._set("loc", name, as_parameter(loc))
            self._set("log_scale", name, as_parameter(torch.full_like(loc, math.log(self.init_scale))))

    def _set(self, role: str, name: str, value: nn.Parameter | nn.Module) -> None:
        set_parameter(self, f"{role}.{name}", value)

    def _get(self, role: str, name: str, event_dim: int) -> Tensor:
        """A parameter; inside a call of the guide also a ``pyro.param`` statement."""
        found = get_parameter(self, f"{role}.{name}")
        prefix = f"{self._pyro_name}.{role}.{name}"
        active = self._pyro_context.active
        if isinstance(found, VectorNetwork):
            if active:
                for key, value in found.named_parameters():
                    register_param(f"{prefix}.{key}", value, value.dim())
            made: Tensor = found()
            return made
        return register_param(prefix, found, event_dim) if active else found

    def parameter_groups(self, lr: float = 1e-3, **rates: float) -> list[dict[str, Any]]:
        """Groups for a torch optimiser, one for each role and one for the model's own parameters (``model``).

        >>> import pyro_vsd as vsd
        >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
        >>> groups = VSDGuide(model).parameter_groups(lr=1e-3, vectors=1e-2)
        >>> [(group["name"], group["lr"]) for group in groups]
        [('theta', 0.001), ('log_alpha', 0.001), ('vectors', 0.01), ('model', 0.001)]

        :param lr: the learning rate of all that is not named.
        :param rates: learning rates by role: ``theta, log_alpha, vectors, z_loc, z_log_scale, loc, log_scale, model``.
        """
        unknown = set(rates) - {*ROLES, "model"}
        if unknown:
            raise ValueError(f"expected roles among {(*ROLES, 'model')}, got {sorted(unknown)}.")
        self._require_setup()
        modules: dict[str, Any] = {role: self._modules.get(role) for role in ROLES}
        modules["model"] = self.model if isinstance(self.model, nn.Module) else None
        groups = []
        for name, module in modules.items():
            params = [] if module is None else list(module.parameters())
            if params:
                groups.append({"name": name, "params": params, "lr": rates.get(name, lr)})
        return groups

    # ---- the posterior

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws every site; ``{site: draw}``."""
        if not self.sites:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        noise = self._joint_noise()
        result: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            with ExitStack() as stack:
                for frame in site.frames:
                    stack.enter_context(plates[frame.name])
                law = self._posterior(site, result.get(site.partner), noise.get(name))
                value = result[name] = pyro.sample(name, law)
            if isinstance(value, LazyWeight):
                value.draw.name, value.draw.example_dim = name, self.example_dim
        return result

    def _create_plates(self, *args: Any, **kwargs: Any) -> Any:
        frames = self._prototype_frames
        subsampled = {n: f for n, f in frames.items() if f.full_size not in (None, -1, f.size)}
        if self.master is not None or self.create_plates is not None or not subsampled:
            return super()._create_plates(*args, **kwargs)
        # The model says which rows: a guide that drew its own would replace the model's explicit indices.
        with torch.no_grad(), evaluation_mode(self.model):
            trace = poutine.block(poutine.trace(self.model).get_trace)(*args, **kwargs)
        self._prototype_frames = {n: f for n, f in frames.items() if n not in subsampled}
        try:
            plates = super()._create_plates(*args, **kwargs)
        finally:
            self._prototype_frames = frames
        for name, frame in subsampled.items():
            rows = trace.nodes[name]["value"]
            plates[name] = pyro.plate(name, frame.full_size, subsample=rows, dim=frame.dim)
        return plates

    def _noise_parameters(self, name: str) -> tuple[Tensor, Tensor]:
        return self._get("log_alpha", name, 1), self._get("vectors", name, 2)

    def _joint_noise(self) -> dict[str, "_Noise"]:
        """Noise parameters and their terms for all weights outside of plates, layers of like width together."""
        buckets: dict[int, list[str]] = {}
        for name, site in self.sites.items():
            if site.kind == "weight" and not site.batch_shape:
                buckets.setdefault(_bucket(site.event_shape[site.noise_dim]), []).append(name)
        result = {}
        for names in buckets.values():
            pairs = [self._noise_parameters(name) for name in names]
            terms = joint_noise_terms(*zip(*pairs, strict=True))
            result.update({n: (*pair, term) for n, pair, term in zip(names, pairs, terms, strict=True)})
        return result

    def _posterior(self, site: Site, partner: Tensor | None, noise: "_Noise | None" = None) -> Any:
        """The law of one site, from ``pyro.param`` statements inside a call and from bare parameters outside."""
        name = site.name
        if site.kind == "weight":
            theta = self._get("theta", name, len(site.event_shape))
            if noise is None:
                pair = self._noise_parameters(name)
                noise = (*pair, noise_terms(*pair))
            return StructuredDropout.from_terms(theta, *noise, site.noise_dim, partner)
        event_dim = len(site.event_shape)
        if site.kind == "scale":
            loc = self._get("z_loc", site.partner, event_dim)
            scale = self._get("z_log_scale", site.partner, event_dim).exp()
            return dist.LogNormal(loc, scale, validate_args=False).to_event(event_dim)
        # the unconstrained space may have another number of event dimensions
        loc_event = get_parameter(self, f"loc.{name}").dim() - len(site.batch_shape)
        loc, scale = self._get("loc", name, loc_event), self._get("log_scale", name, loc_event).exp()
        return mean_field_posterior(loc, scale, self.supports[name], event_dim)

    def posterior(self, site: str) -> Any:
        """The law of a weight, given z at its mean where there is a hierarchy; or of any other site."""
        found = self._site(site)
        z = self._scale_mean(found.partner) if found.kind == "weight" and found.partner else None
        return self._posterior(found, z)

    def noise(self, site: str) -> HouseholderNormal:
        """The law of a weight's noise ξ; event ``(K,)``."""
        self._weight(site)
        return HouseholderNormal(1.0, self.alpha(site), self._get("vectors", site, 2))

    def alpha(self, site: str) -> Tensor:
        """Droprates of a weight, ``(K,)``."""
        self._weight(site)
        return self._get("log_alpha", site, 1).exp()

    def noise_dim(self, site: str) -> int:
        """The axis of a weight along which its noise units run."""
        return self._weight(site).noise_dim

    def scale_posterior(self, site: str) -> Any:
        """q(z) of a hierarchical weight: an independent LogNormal with event ``(K,)``; ``None`` without a hierarchy."""
        weight = self._weight(site)
        return self._posterior(self.sites[weight.partner], None) if weight.partner else None

    def _scale_mean(self, z_name: str) -> Tensor:
        mean: Tensor = self._posterior(self.sites[z_name], None).base_dist.mean
        return mean

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """The mean of every weight (Θ times E[z]) and of z; for mean-field sites the median."""
        self._require_setup()
        result = self.median()
        for name, site in self.sites.items():
            if site.kind == "weight":
                result[name] = self.posterior(name).loc.clone()
            elif site.kind == "scale":
                result[name] = self._scale_mean(name)
        return result

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of every site; ``{site: tensor}``."""
        self._require_setup(*args, **kwargs)
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Iterable[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of the marginals of every site; ``{site: tensor of shape (len(quantiles), ...)}``.

        Exact for weights without a hierarchy (their marginals are Gaussian) and for elementwise mean-field sites; with
        a hierarchy by quadrature over log z.
        """
        self._require_setup(*args, **kwargs)
        q = torch.as_tensor(quantiles, dtype=torch.get_default_dtype())
        if not bool(((q > 0) & (q < 1)).all()):
            raise ValueError(f"quantiles: expected numbers between 0 and 1, got {q.tolist()}.")
        result: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            if site.kind == "weight":
                law = self._posterior(site, None)
                result[name] = weight_quantiles(law, self.scale_posterior(name), q)
                continue
            role, key = ("z_", site.partner) if site.kind == "scale" else ("", name)
            loc, scale = get_parameter(self, f"{role}loc.{key}"), get_parameter(self, f"{role}log_scale.{key}").exp()
            levels = q.to(loc).reshape((-1,) + (1,) * loc.dim())
            transform = mean_field_transform(self.supports[name])
            result[name] = transform(torch.distributions.Normal(loc, scale).icdf(levels))
        return result

    @torch.no_grad()
    def fold(self) -> "VSDGuide":
        """Replaces the networks behind fc and low-rank vectors by the ``T × K`` numbers they give. Predictions stay
        what they were; the guide can be trained on, with free vectors."""
        self._require_setup()
        for name, site in self.sites.items():
            if site.kind == "weight":
                self._set("vectors", name, as_parameter(self._get("vectors", name, 2)))
        self.vector_kind, self.rank = "free", None
        return self

    # ---- look-ups

    def _require_setup(self, *args: Any, **kwargs: Any) -> None:
        if not self.sites and (args or kwargs):
            self._setup_prototype(*args, **kwargs)
        if not self.sites:
            raise ValueError(
                "expected a guide with parameters, got one that has not seen its model's sites. Call "
                "guide.setup(*args) with the model's arguments, or load a state first."
            )

    def _site(self, name: str) -> Site:
        self._require_setup()
        if name not in self.sites:
            raise ValueError(f"expected one of the sites {list(self.sites)}, got {name!r}.")
        return self.sites[name]

    def _weight(self, name: str) -> Site:
        site = self._site(name)
        if site.kind != "weight":
            weights = [n for n, s in self.sites.items() if s.kind == "weight"]
            raise ValueError(f"expected a weight, one of {weights}, got {name!r}, which has no structured noise.")
        return site


def _bucket(K: int) -> int:
    """Layers of one bucket are padded to its widest: all up to 1024 units together, above by factors of four."""
    return max(5, -(-(K - 1).bit_length() // 2))
