"""The autoguide: structured dropout for every weight of a Pyro model, mean-field posteriors for the rest."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd._utils import (
    check_choice,
    check_integer,
    check_nonnegative,
    check_positive,
    evaluation_mode,
    free_name,
    gauss_hermite,
)
from pyro_vsd.distributions import HouseholderNormal, StructuredDropout
from pyro_vsd.distributions.lazy_weight import LazyWeight, NoiseSource
from pyro_vsd.infer.mean_field import mean_field_posterior, mean_field_transform, support_from_plain
from pyro_vsd.infer.parameters import as_parameter, asked_by_optimizer, check_gathered, holder_of, set_parameter
from pyro_vsd.infer.sites import Entry, Site, listed_entries, make_sites, traced_entries, tracing_model
from pyro_vsd.infer.vectors import VECTORS, make_vectors
from pyro_vsd.ops.noise import NoiseTerms, joint_noise_terms, noise_terms
from pyro_vsd.prediction import Calibration

__all__ = ["VSDGuide"]

ROLES = ("theta", "log_alpha", "vectors", "z_loc", "z_log_scale", "loc", "log_scale")
# Halvings that reach float64 from a bracket of a few hundred standard deviations.
_HALVINGS = 80
# Quantiles of the noise variances that a guide prints.
_LEVELS = (0.05, 0.5, 0.95)
# Reflections leave out units whose inputs have less than this share of the root mean square of all.
_QUIET = 0.3
# Log-variance of no noise: in float64 adding it to 1 changes nothing.
_NONE = -80.0


class VSDGuide(AutoGuide):
    r"""Variational structured dropout for any Pyro model.

    Each weight (a real site of event dimension 2 or more) has the posterior
    :math:`W = \operatorname{diag}(\xi)\,\Theta,\ \xi \sim \mathcal N(1, U \operatorname{diag}(\alpha) U^\top)`
    (:class:`~pyro_vsd.distributions.StructuredDropout`); its draw applies one :math:`\xi` *per example* to activations.
    Under a :class:`~pyro_vsd.distributions.ScaleMixtureNormal` prior,
    :math:`W = \operatorname{diag}(z \odot \xi)\,\Theta` with a log-normal ``z``. Every other site has a mean-field
    posterior: Normal on its unconstrained space.

    Parameters, all on the guide: ``theta.<site>``, ``log_alpha.<site>``, ``vectors.<site>``; ``z_loc.<site>``,
    ``z_log_scale.<site>`` by the weight's name; ``loc.<site>``, ``log_scale.<site>`` for mean-field sites. Models that
    list their sites (those of ``vsd.nn``) have them from the start, others from the first call or :meth:`setup`. Save
    and load them with ``state_dict``: two guides never share parameters, so values that Pyro's parameter store loads
    from a file under the same names are left alone.

    A model can state the noise axis and the start of a weight in its sample statement:
    ``infer={"vsd": {"noise_dim": -1, "init": tensor}}``.

    :param model: a Pyro model.
    :param num_reflections: the number T of reflections. Each costs :math:`O(K)` per example. Or a dict of T by the
        weight's name or a pattern such as ``"net.0.*"``, the first that fits; 2 where none does.
    :param vectors: ``"free"`` parameters, or the paper's networks ``"fc"`` and ``"low_rank"``.
    :param rank: hidden units of the low-rank networks.
    :param init_alpha: the geometric mean of the noise variances at the start.
    :param init_alpha_spread: standard deviation of ``log α`` at the start. Where all α are equal the reflections have
        no effect and no gradient.
    :param scale_vectors: whether the first batch, or the data of :meth:`setup`, scales the entries of free vectors,
        each by the root mean square of what its unit's noise multiplies. Units with less than 0.3 of the average are
        left out: their entries are zero and stay zero. Such a unit can then take any noise, since no reflection ties
        it to others; an input that lights it is recognised by the noise it meets.
    :param init_vector_scale: standard deviation of the vectors' entries at the start. Only directions matter, so a
        scale ``c`` times smaller turns them ``c`` times faster under Adam.
    :param init_loc_fn: a function of a site for its start, as for Pyro's autoguides. By default weights start at the
        network's own (``vsd.nn``) or at a Xavier draw, other sites at the prior's median.
    :param init_scale: standard deviation of mean-field posteriors and of ``log z`` at the start.
    :param noise_dim: ``{site: axis}`` where the axis of the noise units is not to be found automatically.
    :param conv_noise: noise on ``"out"``\ put or ``"in"``\ put channels of convolutions.
    :param example_dim: the axis of a sequence that counts the examples: 1 for networks that put the sequence first.
    :param create_plates: as for Pyro's autoguides.
    :ivar calibration: what :func:`pyro_vsd.calibrate` found last, saved with the state; predictions use it where it is
        given: ``vsd.predict(…, calibration=guide.calibration)``.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> guide = vsd.VSDGuide(model, num_reflections=2)
    >>> guide.noise("net.0.weight").event_shape
    torch.Size([4])
    >>> guide  # doctest: +ELLIPSIS
    VSDGuide:
      site          kind    K  T  noise variance
      net.0.weight  weight  4  2  0...
      net.2.weight  weight  8  2  0...
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_reflections: int | Mapping[str, int] = 2,
        vectors: str = "free",
        rank: int | None = None,
        init_alpha: float = 0.2,
        init_alpha_spread: float = 0.5,
        scale_vectors: bool = True,
        init_vector_scale: float = 1.0,
        init_loc_fn: Callable[..., Any] | None = None,
        init_scale: float = 0.1,
        noise_dim: Mapping[str, int] | None = None,
        conv_noise: str = "out",
        example_dim: int = 0,
        create_plates: Callable[..., Any] | None = None,
    ):
        if not callable(model):
            raise TypeError(f"model must be a Pyro model, a function or a module, not {type(model).__name__}.")
        if hasattr(model, "draw_weights") or type(model).__module__.startswith("torch.nn."):
            raise TypeError(
                f"model must have an observed site, and a {type(model).__name__} has none. Wrap the network in "
                "vsd.nn.Classifier(net, num_data) or vsd.nn.Regressor(net, num_data), after vsd.nn.bayesianize."
            )
        for T in num_reflections.values() if isinstance(num_reflections, Mapping) else (num_reflections,):
            check_integer("num_reflections", T, 0)
        check_choice("vectors", vectors, VECTORS)
        if vectors == "low_rank":
            check_integer("rank", rank, 1)
        elif rank is not None:
            raise ValueError(f"rank={rank!r} goes with vectors='low_rank' only, not with vectors={vectors!r}.")
        check_positive("init_alpha", init_alpha)
        check_nonnegative("init_alpha_spread", init_alpha_spread)
        check_positive("init_vector_scale", init_vector_scale)
        check_positive("init_scale", init_scale)
        check_choice("conv_noise", conv_noise, ("out", "in"))
        if example_dim not in (0, 1):
            raise ValueError(f"example_dim must be 0 or 1, not {example_dim!r}.")
        if noise_dim is not None and not isinstance(noise_dim, Mapping):
            raise ValueError(f"noise_dim must be a dict {{site: axis}}, not {noise_dim!r}.")
        super().__init__(model, create_plates=create_plates)
        self.num_reflections = dict(num_reflections) if isinstance(num_reflections, Mapping) else num_reflections
        self.vector_kind = vectors
        self.rank = rank
        self.init_alpha, self.init_alpha_spread = init_alpha, init_alpha_spread
        self.init_vector_scale, self.init_scale = init_vector_scale, init_scale
        self.init_loc_fn = init_loc_fn
        self.noise_dims = dict(noise_dim or {})
        self.conv_noise, self.example_dim = conv_noise, example_dim
        self.sites: dict[str, Site] = {}
        self.supports: dict[str, constraints.Constraint] = {}
        self.calibration: Calibration | None = None
        self._leave_out = self._unscaled = scale_vectors and vectors == "free"
        if hasattr(model, "latent_sites"):
            self._build(listed_entries(model.latent_sites(), self.init_loc_fn))

    # ---- parameters

    def setup(self, *args: Any, **kwargs: Any) -> "VSDGuide":
        """Makes the parameters from one call of the model with these arguments, where there are none, and scales the
        vectors by these inputs, where no others have (``scale_vectors``)."""
        if not self.sites:
            self._setup_prototype(*args, **kwargs)
        if self._unscaled:
            self._scale_vectors(args, kwargs)
        return self

    @property
    def needs_setup(self) -> bool:
        """Whether :meth:`setup` has something to do. The first call with gradients does it otherwise."""
        return not self.sites or self._unscaled

    @torch.no_grad()
    def _scale_vectors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unscaled = False
        devices = {p.device for p in self.parameters() if p.is_cuda}
        with torch.random.fork_rng(devices), poutine.block(), evaluation_mode(self.model):
            torch.manual_seed(0)  # the same scales in all processes that see the same rows
            trace = poutine.trace(self).get_trace(*args, **kwargs)
            values = {name: site.get("value") for name, site in trace.nodes.items()}
            draws = {name: value.draw for name, value in values.items() if isinstance(value, LazyWeight)}
            for draw in draws.values():
                draw.source.squares = []
            poutine.replay(self.model, trace=trace)(*args, **kwargs)
        for name, draw in draws.items():
            if draw.source.squares:
                scale = torch.stack(draw.source.squares).mean(0).sqrt()
                scale = (scale / scale.square().mean().sqrt()).nan_to_num(1.0)
                self.get_parameter(f"vectors.{name}").mul_(scale * (scale >= _QUIET))

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with tracing_model(self, self.init_loc_fn) as notes:
            super()._setup_prototype(*args, **kwargs)
        self._build(traced_entries(self.prototype_trace, notes))

    def _build(self, entries: list[Entry]) -> None:
        sites = make_sites(entries, self.noise_dims, self.conv_noise)
        self.supports = {entry.name: entry.prior.support for entry in entries}
        for entry in entries:
            self._make_parameters(sites[entry.name], entry.value)
        self._set_sites(sites)

    def _set_sites(self, sites: dict[str, Site]) -> None:
        self.sites = sites
        self._prototype_frames = {frame.name: frame for site in sites.values() for frame in site.frames}
        # Where each parameter is kept, and which weights share one call of the noise kernel: looked up in each step.
        self._places = {
            (role, key): (f"{role}.{key}", *holder_of(self, f"{role}.{key}"), len(site.batch_shape), site.is_number)
            for site in sites.values()
            for role, key in site.parameter_roles
        }
        self._unplated = [role for site in sites.values() if not site.frames for role in site.parameter_roles]
        self._buckets: dict[tuple[int, int], list[str]] = {}
        for name, site in sites.items():
            if site.kind == "weight" and not site.batch_shape and not site.frames:
                key = (_bucket(site.event_shape[site.noise_dim]), self._reflections(name))
                self._buckets.setdefault(key, []).append(name)

    def _make_parameters(self, site: Site, value: Tensor) -> None:
        """Parameters of one site, starting at ``value`` (``batch_shape + event_shape``)."""
        name = site.name
        if site.kind == "weight":
            K, T = site.event_shape[site.noise_dim], self._reflections(name)
            shape = (*site.batch_shape, K)
            normal = torch.randn(shape, dtype=value.dtype, device=value.device)
            vectors = make_vectors(self.vector_kind, site.batch_shape, T, K, self.rank, self.init_vector_scale, value)
            set_parameter(self, f"theta.{name}", as_parameter(value))
            log_alpha = math.log(self.init_alpha) + self.init_alpha_spread * normal
            set_parameter(self, f"log_alpha.{name}", as_parameter(log_alpha))
            set_parameter(self, f"vectors.{name}", vectors)
            return
        if site.kind == "scale":
            # z starts at 1, so that the network starts where its weights are
            loc = torch.zeros_like(value) if self.init_loc_fn is None else value.log()
        else:
            loc = mean_field_transform(self.supports[name]).inv(value)
        scale = torch.full_like(loc, math.log(self.init_scale))
        for (role, key), start in zip(site.parameter_roles, (loc, scale), strict=True):
            # A number is kept as a row of one: torch's fully_shard cannot split a tensor without dimensions.
            set_parameter(self, f"{role}.{key}", as_parameter(start.reshape(1) if site.is_number else start))

    def _reflections(self, site: str) -> int:
        if isinstance(self.num_reflections, int):
            return self.num_reflections
        fitting = (T for pattern, T in self.num_reflections.items() if fnmatchcase(site, pattern))
        return next(fitting, 2)

    def _get(self, role: str, site: str) -> Tensor:
        """A parameter; reflection vectors from a network are computed."""
        path, holder, leaf, _, is_number = self._places[role, site]
        found: Any = holder._parameters.get(leaf)
        check_gathered(path, found)
        value: Tensor = holder._modules[leaf]() if found is None else found  # type: ignore[misc]
        return value.reshape(()) if is_number else self._without_quiet(role, value)

    def _without_quiet(self, role: str, value: Tensor) -> Tensor:
        """Vectors whose zeros have no gradient, and so stay zero; other parameters as they are."""
        return value * (value != 0) if role == "vectors" and self._leave_out else value

    def _param_statements(self, roles: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Tensor]:
        """Parameters by role and site, each by a ``pyro.param`` statement."""
        values = {}
        store = pyro.get_param_store()
        for key in roles:
            path, holder, leaf, batch_dims, is_number = self._places[key]
            path = f"{self._pyro_name}.{path}"
            found = holder._parameters.get(leaf)
            if found is not None:
                check_gathered(path, found)
                if path in store and store.param_name(found) != path:
                    path = free_name(path, found)
                value = pyro.param(path, found, event_dim=found.dim() - batch_dims)
                values[key] = value.reshape(()) if is_number else self._without_quiet(key[0], value)
                continue
            network: Any = holder._modules[leaf]
            for name, parameter in network.named_parameters():
                pyro.param(free_name(f"{path}.{name}", parameter), parameter, event_dim=parameter.dim())
            values[key] = network()
        return values

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters. An optimiser that asks before there are any gets an error that says what to do."""
        yield from super().parameters(recurse)
        if not self.sites and asked_by_optimizer():
            self._require_setup()

    def parameter_groups(self, lr: float = 1e-3, **rates: float) -> list[dict[str, Any]]:
        """Groups for a torch optimiser, one for each role and one for the model's own parameters (``model``).

        :param lr: the learning rate of all that is not named.
        :param rates: learning rates by role: ``theta, log_alpha, vectors, z_loc, z_log_scale, loc, log_scale, model``.

        >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
        >>> groups = vsd.VSDGuide(model).parameter_groups(lr=1e-3, vectors=1e-2)
        >>> [(group["name"], group["lr"]) for group in groups]
        [('theta', 0.001), ('log_alpha', 0.001), ('vectors', 0.01), ('model', 0.001)]
        """
        unknown = set(rates) - {*ROLES, "model"}
        if unknown:
            raise ValueError(f"rates: {sorted(unknown)} are no roles; the roles are {(*ROLES, 'model')}.")
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
        if not self.sites or (self._unscaled and torch.is_grad_enabled() and (args or kwargs)):
            self._unscaled &= not _shared()
            self.setup(*args, **kwargs)
        if hasattr(type(self), "reshard"):  # the draws would refer to memory that has been freed
            raise ValueError(
                "guide is sharded by itself, so its parameters are gone before the model uses its draws. Shard the "
                "loss instead: fully_shard(vsd.VSD_ELBO()(model, guide))."
            )
        plates = self._create_plates(*args, **kwargs) if self._prototype_frames else {}
        params = self._param_statements(self._unplated)
        terms = self._joint_terms(params)
        result: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            with ExitStack() as stack:
                for frame in site.frames:
                    stack.enter_context(plates[frame.name])
                if site.frames:  # inside its plates, which take the rows of a subsample
                    params.update(self._param_statements(site.parameter_roles))
                posterior = self._posterior(site, params, result.get(site.partner), terms.get(name))
                result[name] = pyro.sample(name, posterior)
        return result

    def _joint_terms(self, params: Mapping[tuple[str, str], Tensor]) -> dict[str, NoiseTerms]:
        terms: dict[str, NoiseTerms] = {}
        for names in self._buckets.values():
            log_alphas, vectors = [], []
            for name in names:
                log_alphas.append(params["log_alpha", name])
                vectors.append(params["vectors", name])
            terms.update(zip(names, joint_noise_terms(log_alphas, vectors), strict=True))
        return terms

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

    def _posterior(
        self,
        site: Site,
        params: Mapping[tuple[str, str], Tensor],
        z: Tensor | None = None,
        terms: NoiseTerms | None = None,
    ) -> Any:
        """The distribution of one site from the values of its parameters, by role and site."""
        name = site.name
        if site.kind == "weight":
            theta, log_alpha, vectors = params["theta", name], params["log_alpha", name], params["vectors", name]
            return StructuredDropout(
                theta,
                log_alpha.exp(),
                vectors,
                site.noise_dim,
                z,
                terms=terms or noise_terms(log_alpha, vectors),
                source=NoiseSource(name, self.example_dim),
                validate_args=False,
            )
        loc, log_scale = (params[role] for role in site.parameter_roles)
        event_dim = len(site.event_shape)
        if site.kind == "scale":
            return dist.LogNormal(loc, log_scale.exp(), validate_args=False).to_event(event_dim)
        return mean_field_posterior(loc, log_scale.exp(), self.supports[name], event_dim)

    def _posterior_of(self, site: Site, z: Tensor | None = None) -> Any:
        return self._posterior(site, {role: self._get(*role) for role in site.parameter_roles}, z)

    def draw_posteriors(self) -> dict[str, Any] | None:
        """The posterior of each site, a weight's without its z; ``None`` where a site needs more than its parameters:
        plates, weights in batches, a ``forward`` of a subclass."""
        plain = all(not s.frames and (s.kind != "weight" or not s.batch_shape) for s in self.sites.values())
        if not plain or type(self).forward is not VSDGuide.forward or self._forward_hooks or self._forward_pre_hooks:
            return None
        params = {role: self._get(*role) for role in self._unplated}
        terms = self._joint_terms(params)
        return {name: self._posterior(site, params, None, terms.get(name)) for name, site in self.sites.items()}

    def posterior(self, site: str) -> Any:
        """The posterior of a site; of a hierarchical weight, given z at its mean."""
        found = self._site(site)
        z = self._scale_mean(found.partner) if found.kind == "weight" and found.partner else None
        return self._posterior_of(found, z)

    def noise(self, site: str) -> HouseholderNormal:
        """The distribution of a weight's noise ξ; event ``(K,)``."""
        return HouseholderNormal(1.0, self.alpha(site), self._get("vectors", site))

    def alpha(self, site: str) -> Tensor:
        """Noise variances of a weight, ``(K,)``."""
        self._weight(site)
        return self._get("log_alpha", site).exp()

    @contextmanager
    def noise_times(self, factor: float) -> Iterator[None]:
        """Within this context all noise variances are ``factor`` times as large; 0 is no noise at all.

        >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
        >>> guide = vsd.VSDGuide(model, init_alpha=0.2, init_alpha_spread=0.0)
        >>> with guide.noise_times(0.5):
        ...     guide.alpha("net.0.weight")
        tensor([0.1000, 0.1000, 0.1000, 0.1000], grad_fn=<ExpBackward0>)
        """
        check_nonnegative("factor", factor)
        self._require_setup()
        own = {n: self._get("log_alpha", n) for n, site in self.sites.items() if site.kind == "weight"}
        kept = {name: value.detach().clone() for name, value in own.items()}
        with torch.no_grad():
            for value in own.values():
                value.add_(math.log(factor) if factor else -math.inf).clamp_(min=_NONE)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    value.copy_(kept[name])

    def noise_dim(self, site: str) -> int:
        """The axis of a weight along which its noise units run."""
        return self._weight(site).noise_dim

    def scale_posterior(self, site: str) -> Any:
        """q(z) of a hierarchical weight: an independent LogNormal with event ``(K,)``; ``None`` without a hierarchy."""
        weight = self._weight(site)
        return self._posterior_of(self.sites[weight.partner]) if weight.partner else None

    def _scale_mean(self, z_name: str) -> Tensor:
        mean: Tensor = self._posterior_of(self.sites[z_name]).base_dist.mean
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
            raise ValueError(f"quantiles must be numbers between 0 and 1, not {q.tolist()}.")
        result: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            if site.kind == "weight":
                result[name] = _weight_quantiles(self._posterior_of(site), self.scale_posterior(name), q)
                continue
            loc, log_scale = (self._get(*role) for role in site.parameter_roles)
            levels = q.to(loc).reshape((-1,) + (1,) * loc.dim())
            transform = mean_field_transform(self.supports[name])
            result[name] = transform(torch.distributions.Normal(loc, log_scale.exp()).icdf(levels))
        return result

    @torch.no_grad()
    def fold(self) -> "VSDGuide":
        """Replaces the networks behind fc and low-rank vectors by the ``T × K`` numbers they give. Predictions stay
        what they were; the guide can be trained on, with free vectors."""
        self._require_setup()
        for name, site in self.sites.items():
            if site.kind == "weight":
                set_parameter(self, f"vectors.{name}", as_parameter(self._get("vectors", name)))
        self.vector_kind, self.rank = "free", None
        return self

    # ---- look-ups

    def _require_setup(self, *args: Any, **kwargs: Any) -> None:
        if not self.sites and (args or kwargs):
            self._setup_prototype(*args, **kwargs)
        if not self.sites:
            raise ValueError(
                "the guide has no parameters yet, since it has not seen its model's sites. Call guide.setup(*args) "
                "with the model's arguments, or load a state first."
            )

    def _site(self, name: str) -> Site:
        self._require_setup()
        if name not in self.sites:
            raise ValueError(f"{name!r} is no site of the guide; its sites are {list(self.sites)}.")
        return self.sites[name]

    def _weight(self, name: str) -> Site:
        site = self._site(name)
        if site.kind != "weight":
            weights = [n for n, s in self.sites.items() if s.kind == "weight"]
            raise ValueError(f"{name!r} is no weight and has no structured noise; the weights are {weights}.")
        return site

    def __repr__(self) -> str:
        """A table: each site, its kind, K, T, and the median of its noise variances between 5 % and 95 % of them."""
        if not self.sites:
            return f"{type(self).__name__}(no parameters yet: call guide.setup(x, y))"
        table = [["site", "kind", "K", "T", "noise variance"]]
        for name, site in self.sites.items():
            cells = [name, "scale z" if site.kind == "scale" else site.kind.replace("_", "-"), "", "", ""]
            if site.kind == "weight":
                alpha = self.alpha(name).detach().double().flatten()
                low, middle, high = (0.0,) * 3 if alpha.is_meta else alpha.quantile(alpha.new_tensor(_LEVELS)).tolist()
                K, T = site.event_shape[site.noise_dim], self._get("vectors", name).shape[-2]
                cells[2:] = [str(K), str(T), f"{middle:.2g} ({low:.2g} to {high:.2g})"]
            table.append(cells)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        left = (True, True, False, False, True)
        lines = [
            "  ".join(c.ljust(w) if at_left else c.rjust(w) for c, w, at_left in zip(row, widths, left, strict=True))
            for row in table
        ]
        return "\n".join([f"{type(self).__name__}:", *(f"  {line}".rstrip() for line in lines)])

    # ---- saving: the state is all there is, of plain types, and needs no data to load

    def get_extra_state(self) -> dict[str, Any]:
        """Plain types that say how the parameters are laid out."""
        return {
            "sites": [site.to_plain() for site in self.sites.values()],
            "num_reflections": self.num_reflections,
            "vectors": self.vector_kind,
            "rank": self.rank,
            "example_dim": self.example_dim,
            "calibration": None if self.calibration is None else self.calibration.to_plain(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Done before the parameters are loaded, see ``_load_from_state_dict``."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        state = state_dict.get(prefix + "_extra_state")
        self._unscaled &= not any(name.startswith(f"{prefix}vectors.") for name in state_dict)
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
                f"the state belongs to a different model: its sites (shape, noise axis) are {there}, those of this "
                f"guide {here}."
            )
        unwritable = [n for n, s in sites.items() if s.kind == "mean_field" and s.support is None]
        if unwritable and not self.sites:
            raise ValueError(
                f"the supports of {unwritable} could not be saved as plain types. Call guide.setup(*args) with the "
                "model's arguments before loading."
            )
        self.example_dim = state["example_dim"]
        calibration = state.get("calibration")
        self.calibration = None if calibration is None else Calibration(**calibration)
        layout = (state["num_reflections"], state["vectors"], state["rank"])
        if self.sites and layout == (self.num_reflections, self.vector_kind, self.rank):
            return
        self.num_reflections, self.vector_kind, self.rank = layout
        self.supports |= {n: support_from_plain(s.support) for n, s in sites.items() if s.support is not None}
        for site in sites.values():
            role, key = site.parameter_roles[0]
            like = tensors[f"{prefix}{role}.{key}"]
            if site.kind == "mean_field":
                set_parameter(self, f"loc.{key}", as_parameter(like))
                set_parameter(self, f"log_scale.{key}", as_parameter(like))
            else:
                self._make_parameters(site, like.new_ones(site.batch_shape + site.event_shape))
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


def _shared() -> bool:
    """Whether other processes train the same parameters, or a tracer looks on: both need :meth:`VSDGuide.setup`."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _bucket(K: int) -> int:
    """Layers of one bucket are padded to its widest: all up to 1024 units together, above by factors of four."""
    return max(5, -(-(K - 1).bit_length() // 2))


def _weight_quantiles(posterior: StructuredDropout, scale_posterior: Any, q: Tensor) -> Tensor:
    r"""Quantiles of :math:`W_{ij} = \Theta_{ij} z_i \xi_i`: those of the unit's factor times the weight;
    ``(len(q),) + batch_shape + event_shape``.

    :param posterior: the posterior without z.
    :param scale_posterior: q(z), an independent LogNormal, or ``None``.
    """
    theta = posterior.theta
    q = q.to(theta)
    std = posterior.unit_variance.sqrt()  # (..., K)
    factors = []
    for levels in (q, 1 - q):  # a negative weight turns the order round
        levels = levels.reshape((-1,) + (1,) * std.dim())
        if scale_posterior is None:
            factors.append(1 + std * torch.distributions.Normal(0.0, 1.0).icdf(levels))
        else:
            base = scale_posterior.base_dist
            factors.append(_scaled_normal_quantile(std, base.loc, base.scale, levels))
    upward, downward = (posterior.along_units(factor) for factor in factors)
    theta = theta.expand(posterior.batch_shape + posterior.event_shape)
    return torch.where(theta >= 0, upward, downward) * theta


def _scaled_normal_quantile(std: Tensor, z_loc: Tensor, z_scale: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of ``z ξ`` with ``log z ~ N(z_loc, z_scale²)`` and ``ξ ~ N(1, std²)``, by bisection of the mixture's
    distribution function, log z on 64 Gauss–Hermite nodes."""
    nodes, w = (z_loc.new_tensor(values) for values in gauss_hermite(64))
    z = (z_loc + z_scale * nodes.reshape((-1,) + (1,) * z_loc.dim())).exp()
    bound = z.amax(0) * (1 + 40 * std)
    low, high = (-bound).expand(levels.shape[:1] + bound.shape), bound.expand(levels.shape[:1] + bound.shape)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        cdf = torch.special.ndtr((middle.unsqueeze(1) / z - 1) / std)  # (q, nodes, ..., K)
        below = torch.tensordot(cdf, w, dims=([1], [0])) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)
