"""The objective: expected log-likelihood under structured dropout, minus a KL with the prior's scale optimised out."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import ELBO
from pyro.infer.elbo import ELBOModule
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor, nn
from torch.distributions import LogNormal, Normal, kl_divergence
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_vsd._utils import (
    BatchWatch,
    base_distribution,
    check_choice,
    check_integer,
    check_nonnegative,
    evaluation_mode,
    is_capturing,
)
from pyro_vsd.distributions import LazyWeight, ScaleMixtureNormal, StructuredDropout
from pyro_vsd.distributions.kl import hierarchical_terms
from pyro_vsd.distributions.lazy_weight import ParticleTensor
from pyro_vsd.infer.guide import VSDGuide
from pyro_vsd.infer.parameters import OwnParameters, asked_by_optimizer

__all__ = ["VSD_ELBO"]

# In training their statistics would mix particles; evaluation mode would not show it.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Layers round differently in a larger batch, in float32 by far less than this share of the largest density.
_TOLERANCE = 1e-3
# So many evaluations with gradients are looked at for wrong scales and shared noise.
_LOOKS = 8


class VSD_ELBO(ELBO):
    r"""The VSD objective as a Pyro ELBO: for ``SVI``, or as a module, ``loss = VSD_ELBO()(model, guide)``.

    .. math:: \mathbb E_{\xi} \sum_n \log p(y_n \mid x_n, \operatorname{diag}(\xi_n) \Theta) - \lambda\,\mathrm{KL},
              \qquad \mathrm{KL}_{EB} = \frac{Q}{2} \sum_i \log\frac{1 + s_i}{\alpha_i}

    for each weight, plus the KL of every other site. The loss is the negative objective *for the full data set*
    (Pyro's convention), not per example. It does not bound the evidence of the stated model: the scale of each weight's
    Gaussian prior has been replaced by its optimum, and the KL is that of the column product.

    :param num_particles: draws per step.
    :param vectorize_particles: all draws in one pass, where the network's other layers accept a leading dimension. The
        first call tries it; where they do not, it warns and makes the draws in a loop.
    :param max_plate_nesting: as for Pyro's ELBOs; an ELBO remembers it, so make one for each model.
    :param kl_weight: λ, a number or a schedule ``step -> weight`` (:mod:`pyro_vsd.infer.schedules`).
    :param kl_scale: ``"unit"`` divides each replaced KL by its own Q: the KL of the noise itself; ``"weight"`` is the
        paper's formula above.
    :param prior: ``"empirical_bayes"`` replaces zero-mean Gaussian priors of weights by their optimum; ``"model"``
        takes the stated priors, in closed form where there is one.
    :param unit_kl: a different KL in place of the empirical-Bayes one: a function of a weight's posterior
        (:class:`~pyro_vsd.distributions.StructuredDropout`) that gives the KL of its noise, without the factor Q, in
        the posterior's batch shape.

    After each evaluation ``terms`` holds ``{"loss", "log_likelihood", "kl_weight", "kl": {site: …}}``: detached
    tensors, for the full data, with ``loss = -log_likelihood + kl_weight * sum(kl)``.

    ``step`` counts the training steps, for schedules: each evaluation with gradients is one. Whoever steps the
    optimiser at a different pace (``fit`` does) sets ``auto_step = False`` and counts: ``elbo.step += 1``.

    The first evaluations warn of two mistakes: batches with different targets whose likelihood has scale 1, as from
    ``pyro.plate("data", len(x))``, and a network that puts the sequence first, so that examples share their noise.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> loss = vsd.VSD_ELBO(kl_weight=0.5)(model, vsd.VSDGuide(model))
    >>> loss(torch.randn(10, 4), torch.zeros(10, dtype=torch.long)).backward()
    >>> sorted(loss.elbo.terms["kl"])
    ['net.0.weight', 'net.2.weight']
    """

    def __init__(
        self,
        num_particles: int = 1,
        vectorize_particles: bool = False,
        max_plate_nesting: float = float("inf"),
        *,
        kl_weight: float | Callable[[int], float] = 1.0,
        kl_scale: str = "unit",
        prior: str = "empirical_bayes",
        unit_kl: Callable[[StructuredDropout], Tensor] | None = None,
    ):
        check_integer("num_particles", num_particles, 1)
        check_choice("kl_scale", kl_scale, ("unit", "weight"))
        check_choice("prior", prior, ("empirical_bayes", "model"))
        if not callable(kl_weight):
            check_nonnegative("kl_weight", kl_weight)
        if max_plate_nesting != math.inf:
            check_integer("max_plate_nesting", max_plate_nesting, 0)
        if unit_kl is not None and prior == "model":
            raise ValueError("unit_kl replaces the empirical-Bayes KL, so it does not go with prior='model'.")
        super().__init__(
            num_particles=num_particles,
            vectorize_particles=vectorize_particles,
            max_plate_nesting=max_plate_nesting,
        )
        self.kl_weight, self.kl_scale, self.prior, self.unit_kl = kl_weight, kl_scale, prior, unit_kl
        #: training steps taken; a schedule's argument
        self.step = 0
        #: whether an evaluation with gradients counts as a step
        self.auto_step = True
        #: λ as a tensor in place of ``kl_weight``, while a step is captured
        self.given_weight: Tensor | None = None
        self.terms: dict[str, Any] = {}
        self._likelihoods: dict[str, Tensor] = {}
        self._checked: set[tuple[str, torch.Size]] = set()
        #: scale of the observed sites beside that of the weights in an early evaluation; ``None`` if it varies by row
        self.likelihood_scale: float | None = None
        self._looks = 0
        self._watch: BatchWatch | None = BatchWatch()
        self._vectorized = False  # whether vectorised particles have been tried on the network

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def __call__(self, model: Any, guide: Any) -> ELBOModule:
        """The loss as a module of the arguments of model and guide."""
        return _Loss(model, guide, self)

    # ---- the three ways in

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss as a number, without gradients; the step is not counted."""
        with torch.no_grad():
            return self._number(sum(self._particles(model, guide, args, kwargs)))

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss as a tensor, without host synchronisation; counts a step where gradients are recorded."""
        total: Tensor = sum(self._particles(model, guide, args, kwargs))  # type: ignore[assignment]
        if self.auto_step and torch.is_grad_enabled():
            self.step += 1
        return total

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss as a number, its gradients added to the parameters; counts a step."""
        total = 0.0
        for particle in self._particles(model, guide, args, kwargs):
            total += self._number(particle)
            if particle.requires_grad:
                particle.backward(retain_graph=self.retain_graph)
        self.step += self.auto_step
        return total

    def _number(self, loss: Any) -> float:
        value: float = torch_item(loss)
        if not math.isfinite(value):
            raise ValueError(self._blame(value))
        return value

    def check_finite(self) -> None:
        """Raises if the last loss was not finite, naming the site it came from.

        ``SVI.step`` does this by itself. In your own loop call it as often as you can afford to wait for the device.
        """
        if self.terms and not math.isfinite(float(self.terms["loss"])):
            raise ValueError(self._blame(float(self.terms["loss"])))

    def _blame(self, value: float) -> str:
        parts = {f"the log-likelihood of site {k!r}": v for k, v in self._likelihoods.items()}
        parts |= {f"the KL of site {k!r}": v for k, v in self._kls.items()}
        bad = [f"{name} is {float(part)}" for name, part in parts.items() if not math.isfinite(float(part))]
        weights = [
            f"parameter {name!r} has entries that are not finite"
            for name, tensor in self._params.items()
            if not bool(torch.isfinite(tensor).all())
        ]
        hint = "Lower the learning rate or look at the data for NaN and infinities."
        if not weights and any(math.isinf(float(v)) for v in self._kls.values()) and self.prior == "model":
            hint = "A weight that is exactly zero has an infinite KL to a stated prior: start it elsewhere."
        return f"the loss is {value}: {'; '.join(bad + weights) or 'the sum overflowed'}. {hint}"

    # ---- one particle

    def _particles(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """The loss of each particle, divided by their number."""
        weight: Any = self.current_weight() if self.given_weight is None else self.given_weight
        used = isinstance(weight, Tensor) or weight != 0
        share = 1.0 / self.num_particles
        sums: dict[str, Tensor] = {}
        kls: dict[str, Tensor] = {}
        looks = self._looks < _LOOKS and torch.is_grad_enabled() and not is_capturing()
        for model_trace, guide_trace in self._get_traces(model, guide, args, kwargs):
            if looks:
                self._look(poutine.unwrap(model), model_trace, guide_trace)
                looks = False
            ll = self._log_likelihood(model_trace)
            kl = self._kl(model_trace, guide_trace)
            self._remember(model_trace, guide_trace, kl)
            total = -ll
            if used:
                first, *others = kl.values()
                total = total + weight * sum(others, start=first)
            # a copy of the loss, which its user may change in place
            _add_shares(sums, {"loss": total.detach().clone(), "log_likelihood": ll.detach()}, share)
            _add_shares(kls, self._kls, share)
            given = weight.clone() if isinstance(weight, Tensor) else torch.tensor(float(weight))
            self.terms = {**sums, "kl_weight": given, "kl": kls}
            yield total * share if share != 1 else total

    def stop_watching(self) -> None:
        """No more looks for wrong scales: whoever calls this has compared them."""
        self._watch = None

    def _look(self, model: Any, model_trace: Any, guide_trace: Any) -> None:
        """Warns of mistakes that leave a loss finite and wrong."""
        self._looks += 1
        observed = [s for s in model_trace.nodes.values() if s["type"] == "sample" and s["is_observed"]]
        observed = [s for s in observed if not s["infer"].get("is_deterministic")]
        weights = [s for s in guide_trace.nodes.values() if isinstance(s.get("value"), LazyWeight)]
        if not observed or not weights:
            return
        site = max(observed, key=lambda s: s["value"].numel())
        scale, own = _constant(site["scale"]), _constant(weights[0]["scale"])
        self.likelihood_scale = scale / own if scale and own else None
        rows = len(site["value"]) if site["value"].dim() else 1
        if self._watch is not None and self.likelihood_scale == 1 and not hasattr(model, "num_data"):
            self._watch.look(
                site["value"],
                f"the likelihood of a batch of {rows} rows has scale 1, but batches came with different targets: the "
                "KL weighs as if a batch were all data. Use pyro.plate(name, num_data, subsample_size=len(x)).",
            )
        first = sorted(w["name"] for w in weights if _sequence_first(w["value"].draw.source.sequences, rows))
        if first:
            self._looks = _LOOKS
            warnings.warn(
                f"the {rows} examples of a batch share the noise of {', '.join(first)}: its input has the sequence "
                "first, (length, batch, …). Use VSDGuide(model, example_dim=1), or batch_first=True in the network.",
                stacklevel=2,
            )

    def current_weight(self) -> float:
        """λ at the present step."""
        return self._scheduled(self.kl_weight) if callable(self.kl_weight) else self.kl_weight

    def _scheduled(self, schedule: Callable[[int], float]) -> float:
        weight = schedule(self.step)
        try:
            number = float(weight)
        except (TypeError, ValueError):  # a function that forgot to return
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(f"kl_weight: the schedule gives {weight!r} at step {self.step}, not a finite number >= 0.")
        return number

    def remembered(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the last evaluation, for a captured step to give back with :meth:`remember`."""
        sums = {k: v for k, v in self.terms.items() if k != "kl"}
        return {"terms": sums, "kl": self.terms["kl"], "likelihoods": self._likelihoods, "kls": self._kls}

    def remember(self, pieces: dict[str, dict[str, Tensor]]) -> None:
        """Sets ``terms`` and what :meth:`check_finite` looks at."""
        self.terms = {**pieces["terms"], "kl": pieces["kl"]}
        self._likelihoods, self._kls = pieces["likelihoods"], pieces["kls"]

    def _remember(self, model_trace: Any, guide_trace: Any, kl: dict[str, Tensor]) -> None:
        """Detached pieces of the last particle, to find afterwards where a non-finite loss came from."""
        self._kls = {name: value.detach() for name, value in kl.items()}
        self._params = {
            name: value if (value := site["value"]).is_leaf else value.detach()
            for trace in (guide_trace, model_trace)
            for name, site in trace.nodes.items()
            if site["type"] == "param"
        }

    def _get_traces(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        if self.vectorize_particles and self.num_particles > 1 and not self._vectorized:
            self._try_vectorized(model, guide, args, kwargs)
        traces: Iterator[tuple[Any, Any]] = super()._get_traces(model, guide, args, kwargs)
        return traces

    def _try_vectorized(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        """Warns once and returns to a loop where the network cannot take vectorised particles."""
        nesting = self.max_plate_nesting
        if nesting == math.inf:
            with torch.random.fork_rng(devices=[]):
                self._guess_max_plate_nesting(model, guide, args, kwargs)
        reason = _why_not_vectorized(
            model,
            lambda: self._get_trace(model, guide, args, kwargs),
            lambda: self._get_vectorized_trace(model, guide, args, kwargs),
            self.num_particles,
        )
        self._vectorized = True
        if reason is not None:
            self.vectorize_particles, self.max_plate_nesting = False, nesting
            warnings.warn(
                f"vectorize_particles: the network's layers do not take a leading dimension of particles ({reason}). "
                f"The {self.num_particles} particles are drawn in a loop instead.",
                stacklevel=2,
            )

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Handlers without their function, which they would copy the attributes of.
        guide_trace = poutine.trace()(guide).get_trace(*args, **kwargs)
        with OwnParameters(poutine.unwrap(model)):
            replayed = poutine.replay(trace=guide_trace)(model)
            model_trace = poutine.trace()(replayed).get_trace(*args, **kwargs)
        for trace in (guide_trace, model_trace):
            for name in [name for name, site in trace.nodes.items() if site_is_subsample(site)]:
                trace.remove_node(name)
        _check_match(model_trace, guide_trace)
        return model_trace, guide_trace

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        """As Pyro's own, which would score every site, replaced priors among them, on the way."""
        with poutine.block(), torch.no_grad():
            traces = self._get_trace(model, guide, args, kwargs)
        frames = [f for trace in traces for site in trace.nodes.values() for f in site.get("cond_indep_stack", ())]
        particles = int(self.vectorize_particles and self.num_particles > 1)
        self.max_plate_nesting = max([-f.dim for f in frames if f.vectorized], default=0) + particles

    def _log_likelihood(self, model_trace: Any) -> Tensor:
        self._likelihoods = {}
        total: Any = 0.0
        for name, site in model_trace.nodes.items():
            if site["type"] == "sample" and site["is_observed"]:
                # Not Trace.compute_log_prob: it looks for NaN, which waits for the device and warns of what we raise.
                try:
                    density = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
                except ValueError as error:
                    shapes = model_trace.format_shapes(last_site=name)
                    raise ValueError(f"while computing the log-likelihood of {name!r}: {error}\n{shapes}") from error
                site["log_prob"] = scale_and_mask(density, site["scale"], site["mask"])
                if is_validation_enabled():
                    check_site_shape(site, self.max_plate_nesting)
                # particles mark their tensors; the loss is an ordinary one
                value = _plain(site["log_prob"].sum())
                self._likelihoods[name] = value.detach()
                total = total + value
        summed: Tensor = total
        return summed

    def _kl(self, model_trace: Any, guide_trace: Any) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample":
                continue
            if not site["fn"].has_rsample:
                raise ValueError(_not_reparametrized(name, site["fn"]))
            prior_site = model_trace.nodes.get(name)
            if prior_site is None:  # an auxiliary site of Pyro's autoguides: its density belongs to the posterior
                result[name] = _log_prob_sum(guide_trace, name)
                continue
            posterior = site["fn"]
            if isinstance(posterior, StructuredDropout) and self.prior == "empirical_bayes":
                kl: Tensor | None = self._replaced_kl(name, posterior, prior_site, guide_trace)
            else:
                kl = _closed_form(posterior, prior_site["fn"])
            if kl is None:
                result[name] = _log_prob_sum(guide_trace, name) - _log_prob_sum(model_trace, name)
                continue
            if site["scale"] is not None or site["mask"] is not None:
                kl = scale_and_mask(kl, site["scale"], site["mask"])
            result[name] = kl.sum() if kl.dim() else kl
        return result

    def _replaced_kl(self, name: str, posterior: StructuredDropout, prior_site: Any, guide_trace: Any) -> Tensor:
        """The KL with β at its optimum, for one weight; the posterior's batch shape."""
        prior = prior_site["fn"]
        kl = 0.5 * posterior.terms.log_ratio if self.unit_kl is None else self.unit_kl(posterior)
        if isinstance(prior, ScaleMixtureNormal) and posterior.scale is not None:
            z_posterior = _log_normal(guide_trace, prior_site)
            if z_posterior is not None:
                kl = kl + hierarchical_terms(z_posterior.loc, z_posterior.scale, prior.beta)
            else:  # z from some other posterior: at its draw
                kl = kl + 0.5 * (posterior.scale - posterior.scale.log() - 1).sum(-1)
        elif (name, prior.event_shape) not in self._checked:
            _check_zero_mean(name, prior)
            self._checked.add((name, prior.event_shape))
        if self.kl_scale == "weight":
            kl = posterior.num_columns * kl
        return kl if kl.shape == posterior.batch_shape else kl.expand(posterior.batch_shape)


class _Loss(ELBOModule):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        if isinstance(self.guide, VSDGuide) and not self.guide.sites and asked_by_optimizer():
            self.guide.parameter_groups()  # raises: such a guide would not be trained


def _constant(scale: Any) -> float | None:
    """A scale that is the same for all rows, as a number."""
    if not isinstance(scale, Tensor):
        return 1.0 if scale is None else float(scale)
    low, high = scale.detach().aminmax()
    return float(low) if low == high else None


def _sequence_first(inputs: set[tuple[int, int]], rows: int) -> bool:
    """Whether a weight was applied to inputs of shape ``(length, rows, …)``."""
    return rows > 1 and any(second == rows != first for first, second in inputs)


def _add_shares(sums: dict[str, Tensor], values: dict[str, Tensor], share: float) -> None:
    for name, value in values.items():
        value = value if share == 1 else share * value
        sums[name] = sums[name] + value if name in sums else value


def _not_reparametrized(name: str, posterior: Any) -> str:
    return (
        f"site {name!r}: the posterior {posterior} has no reparametrised draw, so no gradient flows through it. Sum "
        "discrete sites out of the model (pyro.infer.config_enumerate does not work here)."
    )


def _log_prob_sum(trace: Any, name: str) -> Tensor:
    trace.compute_log_prob(lambda n, site: n == name)
    return _plain(trace.nodes[name]["log_prob_sum"])


def _plain(value: Tensor) -> Tensor:
    """Without a subclass; as it is where it has none, since torch 2.4 makes no second one under a dispatch mode."""
    return value if type(value) is Tensor else value.as_subclass(Tensor)


def _closed_form(posterior: Any, prior: Any) -> Tensor | None:
    """The KL where it is known, of the posterior's batch shape; ``None`` where it must be sampled.

    Not for a ``Delta`` (Pyro's autoguides sample through one): Pyro's KL for it leaves the change of variables out.
    """
    if type(base_distribution(posterior)).__name__ == "Delta":
        return None
    try:
        kl = kl_divergence(posterior, prior)
    except NotImplementedError:
        return None
    return kl.expand(posterior.batch_shape)


def _log_normal(guide_trace: Any, prior_site: Any) -> LogNormal | None:
    """The posterior of a hierarchical weight's z, by the name that the model states or by its draw."""
    z, name = prior_site["fn"].z, prior_site["infer"].get("vsd", {}).get("z")
    site = guide_trace.nodes.get(name)
    if site is None:
        found = [s for s in guide_trace.nodes.values() if s["type"] == "sample" and s["value"] is z]
        site = found[0] if found else None
    posterior = base_distribution(site["fn"]) if site is not None else None
    return posterior if isinstance(posterior, LogNormal) else None


def _check_zero_mean(name: str, prior: Any) -> None:
    base = base_distribution(prior)
    if isinstance(base, ScaleMixtureNormal):
        return
    if isinstance(base, Normal) and (base.loc.is_meta or bool((base.loc == 0).all())):
        return
    raise ValueError(
        f"site {name!r}: empirical Bayes replaces the scale of a zero-mean Normal prior, and this prior is {base}. Use "
        "VSD_ELBO(prior='model') to take the stated prior."
    )


def _check_match(model_trace: Any, guide_trace: Any) -> None:
    """Guide and model have the same sites; one is observed and one is a weight."""
    latent: set[str] = set()
    observed: set[str] = set()
    for name, site in model_trace.nodes.items():
        if site["type"] == "sample":
            (observed if site["is_observed"] else latent).add(name)
    drawn = {n for n, s in guide_trace.nodes.items() if s["type"] == "sample" and not s["infer"].get("is_auxiliary")}
    if latent - drawn:
        raise ValueError(
            f"the guide does not have the model's sites {sorted(latent - drawn)}. Was a target left out of the call, "
            "or has the model's structure changed since the guide was set up?"
        )
    if drawn - latent:
        raise ValueError(
            f"the model does not have the guide's sites {sorted(drawn - latent)}. Has the model's structure changed "
            "since the guide was set up?"
        )
    if not observed:
        raise ValueError(
            "the model has no observed site. Pass the targets, svi.step(x, y), and wrap a bare network in "
            "vsd.nn.Classifier or vsd.nn.Regressor."
        )
    if not any(isinstance(s["fn"], StructuredDropout) for s in guide_trace.nodes.values() if s["type"] == "sample"):
        raise ValueError(
            f"none of the sites {sorted(drawn)} is a weight with structured dropout, so there is no KL to replace. "
            "Declare weights with .to_event(2), or use pyro.infer.TraceMeanField_ELBO."
        )


# ---- vectorised particles


def _why_not_vectorized(
    model: Any, single: Callable[[], tuple[Any, Any]], together: Callable[[], tuple[Any, Any]], num_particles: int
) -> str | None:
    """Why ``vectorize_particles`` would be wrong for this model, or ``None``.

    A layer that counts dimensions from the left (batch norm, pooling, attention, ``softmax(dim=1)``) takes particles
    for examples or examples for channels: most raise, some go on with wrong numbers. So the first and the last
    particle are run again, each alone, and the densities of the observations compared. Once for each objective: four
    passes without gradients, in evaluation mode; the generator is put back. Models with latent sites in plates are
    run, not compared.

    :param single: model trace and guide trace of one particle.
    :param together: the same of all particles in one pass.
    """
    with poutine.block(), torch.no_grad(), evaluation_mode(poutine.unwrap(model)), torch.random.fork_rng(devices=[]):
        single()  # an error here is unrelated to particles
        try:
            with _no_batch_norms():
                model_trace, guide_trace = together()
        except Exception as error:  # whatever a layer raises
            return str(error).split("\n", 1)[0] or type(error).__name__
        found = _densities(model_trace)
        if any(_plated(site) for site in _latent(guide_trace)):
            return None
        for particle in {0, num_particles - 1}:
            replayed = poutine.replay(poutine.unwrap(model), trace=_one(guide_trace, particle))
            arguments = guide_trace.nodes["_INPUT"]
            alone = _densities(poutine.trace(replayed).get_trace(*arguments["args"], **arguments["kwargs"]))
            for name, expected in alone.items():
                value = found[name][particle].reshape(-1)
                expected = expected.reshape(-1)
                if value.shape != expected.shape or not _close(value, expected):
                    return f"the log-likelihood of {name!r} differs from that of each particle alone"
    return None


@contextmanager
def _no_batch_norms() -> Iterator[None]:
    def refuse(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, _BATCH_NORMS) and isinstance(inputs[0], ParticleTensor):
            raise ValueError(f"{type(module).__name__} has no statistics of particles")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _latent(trace: Any) -> list[dict[str, Any]]:
    sites = [site for site in trace.nodes.values() if site["type"] == "sample" and not site["is_observed"]]
    return [site for site in sites if not site_is_subsample(site)]


def _plated(site: dict[str, Any]) -> bool:
    return any(frame.name != "num_particles_vectorized" for frame in site["cond_indep_stack"])


def _densities(trace: Any) -> dict[str, Tensor]:
    """Log-densities of the observed sites, particles first where there are some."""
    return {
        name: site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]).as_subclass(Tensor)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _one(trace: Any, particle: int) -> Any:
    """A guide's trace with the values of one particle."""
    chosen = trace.copy()
    for site in _latent(trace):
        value, fn = site["value"], site["fn"]
        if isinstance(value, LazyWeight):
            picked: Any = LazyWeight(value.draw.particle(particle))
        else:
            picked = value[particle].reshape(fn.event_shape)
        chosen.nodes[site["name"]] = {**site, "value": picked}
    return chosen


def _close(value: Tensor, expected: Tensor) -> bool:
    if not bool(expected.isfinite().all()):
        return True  # the loss will say so
    return bool((value - expected).abs().max() <= _TOLERANCE * (1 + expected.abs().max()))
