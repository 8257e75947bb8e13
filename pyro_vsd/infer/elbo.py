"""The objective: expected log-likelihood under structured dropout, minus a KL with the prior's scale optimised out."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import ELBO
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import Independent, LogNormal, Normal, kl_divergence

from pyro_vsd.distributions import ScaleMixtureNormal, StructuredDropout, WeightPrior
from pyro_vsd.distributions.empirical_bayes import hierarchical_terms
from pyro_vsd.infer.options import check_choice
from pyro_vsd.infer.parameters import OwnParameters
from pyro_vsd.infer.particles import why_not_vectorized

__all__ = ["VSD_ELBO"]


class VSD_ELBO(ELBO):
    r"""The VSD objective as a Pyro ELBO: for ``SVI``, or as a module, ``loss = VSD_ELBO()(model, guide)``.

    .. math:: \mathbb E_{\xi} \sum_n \log p(y_n \mid x_n, \operatorname{diag}(\xi_n) \Theta) - \lambda\,\mathrm{KL},
              \qquad \mathrm{KL}_{EB} = \frac{Q}{2} \sum_i \log\frac{1 + s_i}{\alpha_i}

    for each weight, plus the KL of every other site. The loss is the negative objective *for the full data set*
    (Pyro's convention), not per example. It is no bound on the evidence of the stated model: the scale of each
    weight's Gaussian prior has been replaced by its optimum, and the KL is that of the column product.

    :param num_particles: draws per step.
    :param vectorize_particles: all draws in one pass, where the network's other layers accept a leading dimension. That
        is tried at the first call; where they do not, a warning says so and the draws are made in a loop.
    :param max_plate_nesting: as for Pyro's ELBOs; an ELBO remembers it, so make one for each model.
    :param kl_weight: λ, a number or a schedule ``step -> weight`` (:mod:`pyro_vsd.infer.schedules`).
    :param kl_scale: ``"unit"`` divides each replaced KL by its own Q: the KL of the noise itself; ``"weight"`` is the
        paper's formula above.
    :param prior: ``"empirical_bayes"`` replaces zero-mean Gaussian priors of weights by their optimum; ``"model"``
        takes the stated priors, in closed form where there is one.

    After each evaluation ``terms`` holds ``{"loss", "log_likelihood", "kl_weight", "kl": {site: …}}``: detached
    tensors, for the full data, with ``loss = -log_likelihood + kl_weight * sum(kl)``.

    >>> import pyro, pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> loss = VSD_ELBO(kl_weight=0.5)(model, vsd.VSDGuide(model))
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
    ):
        if not isinstance(num_particles, int) or num_particles < 1:
            raise ValueError(f"num_particles: expected an integer >= 1, got {num_particles!r}.")
        check_choice("kl_scale", kl_scale, ("unit", "weight"))
        check_choice("prior", prior, ("empirical_bayes", "model"))
        if not callable(kl_weight) and not (isinstance(kl_weight, (int, float)) and 0 <= kl_weight < math.inf):
            raise ValueError(f"kl_weight: expected a number >= 0 or a function of the step, got {kl_weight!r}.")
        if not isinstance(vectorize_particles, int):
            raise TypeError(f"vectorize_particles: expected True or False, got {vectorize_particles!r}.")
        nesting = max_plate_nesting
        if not (isinstance(nesting, int) and nesting >= 0) and not (isinstance(nesting, float) and nesting == math.inf):
            raise ValueError(f"max_plate_nesting: expected an integer >= 0 or infinity, got {nesting!r}.")
        super().__init__(
            num_particles=num_particles,
            vectorize_particles=vectorize_particles,
            max_plate_nesting=nesting,
        )
        self.kl_weight, self.kl_scale, self.prior = kl_weight, kl_scale, prior
        #: training steps taken; a schedule's argument
        self.step = 0
        # Whoever steps an optimiser himself sets this to False and counts.
        self.auto_step = True
        self.terms: dict[str, Any] = {}
        self._likelihoods: dict[str, Tensor] = {}
        self._checked: set[tuple[str, torch.Size]] = set()
        self._vectorized = False  # whether vectorised particles have been tried on the network

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    # ---- the three ways in

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss as a number, without gradients; the step is not counted."""
        with torch.no_grad():
            return self._number(sum(self._particles(model, guide, args, kwargs)))

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss as a tensor. Counts a step where gradients are recorded; no host synchronisation."""
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
        self.step += 1
        return total

    def _number(self, loss: Any) -> float:
        value: float = torch_item(loss)
        if not math.isfinite(value):
            raise ValueError(self._blame(value))
        return value

    def check_finite(self) -> None:
        """Raises where the last loss was not finite, naming the site it came from.

        ``SVI.step`` does this by itself. In a loop of your own call it as often as you can afford to wait for the
        device.
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
        return f"expected a finite loss, got {value}: {'; '.join(bad + weights) or 'the sum overflowed'}. {hint}"

    # ---- one particle

    def _particles(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """The loss of each particle, divided by their number."""
        weight = self._scheduled(self.kl_weight) if callable(self.kl_weight) else self.kl_weight
        share = 1.0 / self.num_particles
        log_likelihood: Any = 0.0
        kls: dict[str, Any] = {}
        for model_trace, guide_trace in self._get_traces(model, guide, args, kwargs):
            ll = self._log_likelihood(model_trace)
            kl = self._kl(model_trace, guide_trace)
            self._remember(model_trace, guide_trace, kl)
            total = -ll
            if weight != 0:
                total = total + weight * sum(kl.values())
            log_likelihood = log_likelihood + share * ll.detach()
            for name, value in kl.items():
                kls[name] = kls.get(name, 0.0) + share * value.detach()
            self.terms = {
                "loss": (weight * sum(kls.values()) if weight != 0 else 0.0) - log_likelihood,
                "log_likelihood": log_likelihood,
                "kl_weight": torch.tensor(float(weight)),
                "kl": kls,
            }
            yield total * share if share != 1 else total

    def _scheduled(self, schedule: Callable[[int], float]) -> float:
        weight = schedule(self.step)
        try:
            number = float(weight)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(
                f"kl_weight: expected the schedule to give a number >= 0, got {weight!r} at step {self.step}."
            )
        return number

    def _remember(self, model_trace: Any, guide_trace: Any, kl: dict[str, Tensor]) -> None:
        """Detached pieces of the last particle, to find afterwards where a non-finite loss came from."""
        self._kls = {name: value.detach() for name, value in kl.items()}
        self._params = {
            name: site["value"].detach()
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
        """Goes back to the loop where the network does not take vectorised particles; said once."""
        nesting = self.max_plate_nesting
        if nesting == math.inf:
            with torch.random.fork_rng(devices=[]):
                self._guess_max_plate_nesting(model, guide, args, kwargs)
        reason = why_not_vectorized(
            model,
            lambda: self._get_trace(model, guide, args, kwargs),
            lambda: self._get_vectorized_trace(model, guide, args, kwargs),
            self.num_particles,
        )
        self._vectorized = True
        if reason is not None:
            self.vectorize_particles, self.max_plate_nesting = False, nesting
            warnings.warn(
                f"vectorize_particles: expected a network whose layers take a leading dimension of particles, got one "
                f"that does not ({reason}). The {self.num_particles} particles are drawn in a loop instead.",
                stacklevel=2,
            )

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        with OwnParameters(poutine.unwrap(model)):
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        guide_trace, model_trace = prune_subsample_sites(guide_trace), prune_subsample_sites(model_trace)
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
            _check_reparametrized(name, site["fn"])
            prior_site = model_trace.nodes.get(name)
            if prior_site is None:  # an auxiliary site of another autoguide: its density belongs to the posterior
                result[name] = _log_prob_sum(guide_trace, name)
                continue
            law, prior = site["fn"], prior_site["fn"]
            if isinstance(law, StructuredDropout) and self.prior == "empirical_bayes":
                kl: Tensor | None = self._replaced_kl(name, law, prior, guide_trace)
            else:
                kl = _closed_form(law, prior)
            if kl is None:
                result[name] = _log_prob_sum(guide_trace, name) - _log_prob_sum(model_trace, name)
                continue
            if site["scale"] is not None or site["mask"] is not None:
                kl = scale_and_mask(kl, site["scale"], site["mask"])
            result[name] = kl.sum()
        return result

    def _replaced_kl(self, name: str, law: StructuredDropout, prior: Any, guide_trace: Any) -> Tensor:
        """The KL with β at its optimum, for one weight; ``law.batch_shape``."""
        kl = 0.5 * law.terms.log_ratio
        if isinstance(prior, ScaleMixtureNormal) and law.scale is not None:
            z_law = _log_normal(guide_trace, prior)
            if z_law is not None:
                kl = kl + hierarchical_terms(z_law.loc, z_law.scale, prior.empirical_bayes)
            else:  # z from some other posterior: at its draw
                kl = kl + 0.5 * (law.scale - law.scale.log() - 1).sum(-1)
        elif (name, prior.event_shape) not in self._checked:
            _check_zero_mean(name, prior)
            self._checked.add((name, prior.event_shape))
        if self.kl_scale == "weight":
            kl = law.num_columns * kl
        return kl.expand(law.batch_shape)


def _check_reparametrized(name: str, law: Any) -> None:
    if not law.has_rsample:
        raise ValueError(
            f"site {name!r}: expected a posterior with a reparametrised draw, got {law}, through which no gradient "
            "flows. Sum discrete sites out of the model (pyro.infer.config_enumerate does not work here)."
        )


def _log_prob_sum(trace: Any, name: str) -> Tensor:
    trace.compute_log_prob(lambda n, site: n == name)
    return _plain(trace.nodes[name]["log_prob_sum"])


def _plain(value: Tensor) -> Tensor:
    """Without a subclass; as it is where it has none, since torch 2.4 makes no second one under a dispatch mode."""
    return value if type(value) is Tensor else value.as_subclass(Tensor)


def _closed_form(law: Any, prior: Any) -> Tensor | None:
    """The KL where it is known, of the law's batch shape; ``None`` where it must be sampled.

    Not for a ``Delta`` (other autoguides sample through one): Pyro's KL for it leaves the change of variables out.
    """
    base = law
    while isinstance(base, Independent):
        base = base.base_dist
    if type(base).__name__ == "Delta":
        return None
    try:
        kl = kl_divergence(law, prior)
    except NotImplementedError:
        return None
    return kl.expand(law.batch_shape)


def _log_normal(guide_trace: Any, prior: ScaleMixtureNormal) -> LogNormal | None:
    site = guide_trace.nodes.get(prior.z_name)
    if site is None:
        found = [s for s in guide_trace.nodes.values() if s["type"] == "sample" and s["value"] is prior.z]
        site = found[0] if found else None
    law = site["fn"] if site is not None else None
    while isinstance(law, Independent):
        law = law.base_dist
    return law if isinstance(law, LogNormal) else None


def _check_zero_mean(name: str, prior: Any) -> None:
    base = prior
    while isinstance(base, Independent):
        base = base.base_dist
    if isinstance(base, WeightPrior) or (isinstance(base, Normal) and bool((base.loc == 0).all())):
        return
    raise ValueError(
        f"site {name!r}: expected a zero-mean Normal prior, whose scale empirical Bayes can replace, got {base}. Use "
        "VSD_ELBO(prior='model') to take the stated prior."
    )


def _check_match(model_trace: Any, guide_trace: Any) -> None:
    """Guide and model speak of the same sites; something is observed; something is a weight."""
    latent: set[str] = set()
    observed: set[str] = set()
    for name, site in model_trace.nodes.items():
        if site["type"] == "sample":
            (observed if site["is_observed"] else latent).add(name)
    drawn = {n for n, s in guide_trace.nodes.items() if s["type"] == "sample" and not s["infer"].get("is_auxiliary")}
    if latent - drawn:
        raise ValueError(
            f"expected the guide to know every latent site, got {sorted(latent - drawn)} in the model alone. Was "
            "a target left out of the call, or has the model's structure changed since the guide was set up?"
        )
    if drawn - latent:
        raise ValueError(
            f"expected every site of the guide in the model, got {sorted(drawn - latent)} in the guide alone. Has the "
            "model's structure changed since the guide was set up?"
        )
    if not observed:
        raise ValueError("expected a model with an observed site, got none. Pass the targets: svi.step(x, y).")
    if not any(isinstance(s["fn"], StructuredDropout) for s in guide_trace.nodes.values() if s["type"] == "sample"):
        raise ValueError(
            f"expected a weight with structured dropout among {sorted(drawn)}, got none, so there is no KL to replace. "
            "Declare weights with .to_event(2), or use pyro.infer.TraceMeanField_ELBO."
        )
