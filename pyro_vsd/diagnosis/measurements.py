"""What a diagnosis measures: the weights, the two sides of the objective, and the predictions."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_vsd import metrics
from pyro_vsd._utils import (
    base_distribution,
    call_arguments,
    map_tensors,
    num_rows,
    take_rows,
    tensors_in,
    to_device,
)
from pyro_vsd.diagnosis.covariance import best_covariance, best_droprates, best_scales, noise_objective
from pyro_vsd.diagnosis.gauss_newton import curvature_or_reason
from pyro_vsd.infer import VSD_ELBO, predict
from pyro_vsd.prediction import ClassificationPrediction, RegressionPrediction
from pyro_vsd.training.data import Batches, arguments, inputs_and_target

__all__ = ["Objective", "Rows"]

# Below, the noise is one per cent of what it multiplies and has no effect; above, it is three times that and drowns it.
COLLAPSED, EXPLODED = 1e-4, 10.0
# A log-likelihood is stable if its bias and its spread over draws are below this, in nats per row.
_TOLERANCE = 0.01


# ---- rows


class Rows(Batches):
    """The rows that a diagnosis looks at: at most ``at_most``, in batches, the same at each pass.

    ``seen`` counts the rows of the longest pass so far; ``not_finite`` holds where NaN or infinity were, as "data[0]".
    """

    def __init__(
        self,
        *args: Any,
        at_most: int,
        seed: int = 0,
        device: torch.device | None = None,
        model: Any = None,
        target: str | None = None,
    ) -> None:
        super().__init__(*args)
        self.at_most, self.seed, self.device, self.model, self.target = at_most, seed, device, model, target
        self.seen, self.not_finite = 0, set[str]()

    def batches(self, largest: int | None = None) -> Iterator[Any]:
        """One pass; no batch has more than ``largest`` rows."""
        seen = 0
        for batch in self.sample(self.seed, self.at_most, largest):
            seen += num_rows(batch)
            self.seen = max(self.seen, seen)
            args, kwargs = arguments(batch)
            for key, part in (*enumerate(args), *kwargs.items()):
                if not all(bool(tensor.isfinite().all()) for tensor in tensors_in(part)):
                    self.not_finite.add(f"{self.name}[{key!r}]")
            yield to_device(batch, self.device)

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(batch, None, self.model, self.target)


# ---- weights


def measure_sites(model: Any, guide: Any) -> dict[str, dict[str, Any]]:
    """Properties of each weight, from its parameters alone, in O(K T²)."""
    starts, result = {}, {}
    if hasattr(model, "latent_sites") and guide.init_loc_fn is None:  # else the initial Θ is not known
        inits = {name: site["infer"].get("vsd", {}).get("init") for name, site in model.latent_sites().items()}
        # a zero start has no scale to compare with
        starts = {name: init.detach().double() for name, init in inits.items() if init is not None and init.any()}
    for name, site in guide.sites.items():
        if site.kind != "weight":
            continue
        noise, theta = guide.noise(name), guide.get_parameter(f"theta.{name}").detach().double()
        alpha, variance = noise.alpha.detach().double().flatten(), noise.variance.detach().double().flatten()
        levels = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=alpha.dtype, device=alpha.device)
        start = starts.get(name)
        result[name] = {
            "K": site.event_shape[site.noise_dim],
            "Q": theta.numel() // alpha.numel(),
            "T": noise.vectors.shape[-2],
            "alpha": dict(zip(("min", "5%", "median", "95%", "max"), alpha.quantile(levels).tolist(), strict=True)),
            "collapsed": float((alpha < COLLAPSED).double().mean()),
            "exploded": float((alpha > EXPLODED).double().mean()),
            "alpha_spread": float(alpha.log().std(correction=0)),
            # a rotation keeps ‖Σ‖² = ‖α‖²; what is not on the diagonal is off it
            "correlated": max(0.0, 1 - float(variance.square().sum() / alpha.square().sum())),
            "theta_moved": None if start is None else float((theta - start).norm() / start.norm()),
            "theta_growth": None if start is None else float(theta.norm() / start.norm()),
            "trainable": guide.get_parameter(f"theta.{name}").requires_grad,
        }
    return result


def measure_better_noise(
    model: Any, guide: Any, rows: Rows, strengths: dict[str, float], largest: int | None, max_units: int
) -> tuple[dict[str, dict[str, float | None]], dict[str, str]]:
    """``better_noise`` of each weight as in ``Diagnosis.sites``, and for each weight that is left out the reason.

    ``share_reached`` is negative if the trained correlations are worse than none, and ``None`` if none can help.
    ``size`` is a median over units.
    """
    totals: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    seen = 0
    for batch in rows.batches(largest):
        matrices, reasons = curvature_or_reason(model, guide, *rows.arguments(batch), max_units)
        seen += num_rows(batch)
        for name, matrix in matrices.items():
            totals[name] = totals.get(name, torch.zeros_like(matrix)) + num_rows(batch) * matrix
    result = {}
    for name, total in totals.items():
        A, strength = total / seen, strengths[name]
        covariance = guide.noise(name).covariance_matrix.detach().double()
        own = best_scales(covariance, A, strength)
        best = best_covariance(A, strength)
        candidates = {"now": covariance, "rescaled": own, "best_diagonal": best_droprates(A, strength), "best": best}
        values: dict[str, Any] = {key: noise_objective(S, A, strength) for key, S in candidates.items()}
        possible = values["best_diagonal"] - values["best"]
        # less than a hundredth of a nat for each unit is not worth finding
        worth = possible > 0.01 * strength * len(A)
        values["share_reached"] = (values["best_diagonal"] - values["rescaled"]) / possible if worth else None
        result[name] = values | {"size": float((covariance.diagonal() / own.diagonal()).median())}
    return result, reasons


# ---- the objective


@dataclass
class Objective:
    """The objective of some rows, in nats per row.

    :ivar num_data: rows that it counts: scale of the likelihood times rows of the batch.
    :ivar scale: of the likelihood, at the largest batch.
    :ivar kl: by site, not weighted.
    :ivar constant: log-likelihood of the best constant prediction; ``None`` for likelihoods where it is not known.
    :ivar information: by how much a perfect classifier is better than the constant; 1 nat for other likelihoods.
    :ivar slopes: by site: by how much a step of 1 % of Θ down the gradient would lower the loss.
    :ivar price: weighted KL of noise with α = 1 on every unit, which lets about half of the signal through.
    :ivar sampled: the number of rows looked at; ``None`` if all.
    """

    num_data: float
    scale: float
    log_likelihood: float
    kl: dict[str, float]
    kl_weight: float
    constant: float | None
    information: float
    slopes: dict[str, float] = field(default_factory=dict)
    price: float = 0.0
    sampled: int | None = None

    @property
    def total_kl(self) -> float:
        return sum(self.kl.values())

    @property
    def weighted_kl(self) -> float:
        return self.kl_weight * self.total_kl

    @property
    def balance(self) -> float | None:
        """The kl_weight at which KL and negative log-likelihood are equal; ``None`` where the latter is negative."""
        return -self.log_likelihood / self.total_kl if self.log_likelihood < 0 < self.total_kl else None

    @property
    def improvement(self) -> float | None:
        """Log-likelihood above that of a constant."""
        return None if self.constant is None else self.log_likelihood - self.constant


def measure_objective(model: Any, guide: Any, rows: Rows, elbo: VSD_ELBO, largest: int | None = None) -> Objective:
    """One pass with gradients: about one epoch of training, if all rows are looked at."""
    batches = list(rows.batches(largest))
    lone = len(batches) == 1
    if lone:  # it gives the terms; two parts with independent errors give the gradients
        size = num_rows(batches[0])
        whole = size in (1, rows.num_rows)  # then two draws of the noise for all rows, else the halves of a sample
        parts = [slice(None)] * 2 if whole else [slice(size // 2), slice(size // 2, size)]
        batches += [take_rows(batches[0], part) for part in parts]
    weights = {name: guide.get_parameter(f"theta.{name}") for name, s in guide.sites.items() if s.kind == "weight"}
    weights = {name: theta for name, theta in weights.items() if theta.requires_grad}
    seen, log_likelihood, num_data, scale = 0, 0.0, 0.0, 0.0
    kl: dict[str, float] = {}
    # two halves with independent errors: the product of their gradients has no bias from noise
    halves: list[dict[str, Any]] = [dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)]
    counts, recorder = [0, 0], _Observed()
    for number, batch in enumerate(batches):
        (args, kwargs), size = rows.arguments(batch), num_rows(batch)
        with torch.enable_grad(), recorder:
            loss = elbo.differentiable_loss(model, guide, *args, **kwargs)
            grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True) if weights else ()
        data, scale = recorder.num_data, scale or recorder.scale
        if not lone or number == 0:
            seen += size
            log_likelihood += size * float(elbo.terms["log_likelihood"]) / data
            num_data += size * data
            for name, value in elbo.terms["kl"].items():
                kl[name] = kl.get(name, 0.0) + size * float(value) / data
        if not lone or number > 0:
            half = number % 2
            counts[half] += size
            for name, grad in zip(weights, grads, strict=True):
                halves[half][name] = halves[half][name] + size * grad.detach().double() / data
    slopes = {}
    for name, theta in weights.items():
        first, second = (half[name] / count for half, count in zip(halves, counts, strict=True))
        norm = math.sqrt(max(float((first * second).sum()), 0.0))
        slopes[name] = 0.01 * norm * float(theta.detach().double().norm())
    constant, information = recorder.constant()
    return Objective(
        num_data=num_data / seen,
        scale=scale,
        log_likelihood=log_likelihood / seen,
        kl={name: value / seen for name, value in kl.items()},
        kl_weight=float(elbo.kl_weight(elbo.step) if callable(elbo.kl_weight) else elbo.kl_weight),
        constant=constant,
        information=information,
        slopes=slopes,
        sampled=None if seen == rows.num_rows else seen,
    )


class _Observed(Messenger):
    """Records the observed sites of every pass: their kind, their values, and how many rows they count."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[Tensor]] = {}
        self.bases: dict[str, Any] = {}

    def __enter__(self) -> Any:
        self.num_data, self.scale = 0.0, 0.0
        return super().__enter__()

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"] or msg["infer"].get("is_deterministic"):
            return
        value = msg["value"].detach()
        scale = float(torch.as_tensor(1.0 if msg["scale"] is None else msg["scale"]).double().mean())
        count = len(value) if value.dim() else 1
        if count * scale > self.num_data:
            self.num_data, self.scale = count * scale, scale
        self.bases[msg["name"]] = base_distribution(msg["fn"])
        self.values.setdefault(msg["name"], []).append(value)

    def constant(self) -> tuple[float | None, float]:
        """Log-likelihood per row of the best constant prediction of all sites, and that of a perfect one above it."""
        total, information = 0.0, 0.0
        for name, values in self.values.items():
            y = torch.cat([value.reshape(len(value) if value.dim() else 1, -1) for value in values]).double()
            variance = y.var(0, correction=0)
            if isinstance(self.bases[name], (Categorical, Bernoulli)):
                shares = y.unique(return_counts=True)[1].double() / y.numel()
                entropy = float(torch.special.entr(shares).sum()) * y.shape[1]
                total, information = total - entropy, information + entropy
            elif isinstance(self.bases[name], Normal) and float(variance.min()) > 0:
                total -= float(0.5 * (2 * math.pi * math.e * variance).log().sum())
                information += 1.0
            else:
                return None, 1.0
        return total, information


# ---- predictions


def measure_prediction(model: Any, guide: Any, rows: Rows, num_samples: int) -> dict[str, Any] | str:
    """Metrics by name; or in words why there are none."""
    batches = list(rows.batches())
    parts = zip(*map(tensors_in, batches), strict=True)
    whole = iter([torch.cat(part) if part[0].dim() else part[0] for part in parts])
    inputs, y = inputs_and_target(map_tensors(lambda _: next(whole), batches[0]), None, rows.target)
    if y is None:
        return "batches are not tuples (x, y) with the targets last, nor dicts with a target"
    args, kwargs = call_arguments(model, inputs)
    try:
        inspect.signature(model.forward if isinstance(model, nn.Module) else model).bind(*args, **kwargs)
    except TypeError as error:
        return f"the model cannot be called without its targets ({error})"
    prediction = predict(model, guide, *inputs, num_samples=num_samples, seed=rows.seed, progress=False)
    if isinstance(prediction, ClassificationPrediction) and prediction.probs.dim() > 2:
        prediction, y = prediction.by_entry(y)  # tokens, or several labels: each counts
    assert prediction.samples is not None
    values: dict[str, Any] = {"rows": len(y), "num_samples": num_samples}
    if isinstance(prediction, ClassificationPrediction):
        y = y.reshape(-1).long()
        gap = prediction.confidence.double() - (prediction.labels == y).double()
        uncertainty = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        values |= {"overconfidence": float(gap.mean()), "overconfidence_error": uncertainty}
        for metric in (metrics.nll, metrics.error_rate, metrics.ece):
            values[metric.__name__] = metric(prediction, y)
        values["ece_by_chance"] = ece_by_chance(prediction.probs)
        entropy = float(prediction.entropy.mean())
        values["epistemic_share"] = float(prediction.mutual_information.mean()) / entropy if entropy > 0 else 0.0
        index = y.reshape(1, -1, 1).expand(num_samples, -1, 1)
        densities = prediction.samples.gather(-1, index).squeeze(-1).double().log()  # (S, N), as below
    elif isinstance(prediction, RegressionPrediction):
        values |= {"nll": -metrics.log_likelihood(prediction, y), "rmse": metrics.rmse(prediction, y)}
        values |= {"coverage": metrics.coverage(prediction, y)}
        values["epistemic_share"] = float(prediction.epistemic.mean() / prediction.variance.mean())
        samples, scales = prediction.require_samples("samples_needed")
        density = Normal(samples.double(), scales.double(), validate_args=False).log_prob(
            y.double().reshape_as(samples[0])
        )
        densities = density.reshape(*density.shape[:2], -1).sum(-1)
    else:
        assert prediction.components is not None
        spread = prediction.samples.var(0, correction=0)
        values["nll"] = -metrics.log_likelihood(prediction, y)
        values["epistemic_share"] = float(spread.mean() / prediction.variance.mean())
        densities = prediction.components.log_prob(y).double()
    needed, curve = samples_needed(densities)
    by_row = densities.logsumexp(0)
    standard_error = float(by_row.std()) / math.sqrt(len(by_row)) if len(by_row) > 1 else math.inf
    return values | {"nll_error": standard_error, "samples_needed": needed, "nll_by_samples": curve}


def ece_by_chance(probs: Tensor, draws: int = 100) -> float:
    """The ECE that a calibrated classifier exceeds in one of twenty samples: of labels drawn from its own ``probs``.

    >>> ece_by_chance(torch.eye(2)), 0.01 < ece_by_chance(torch.tensor([[0.9, 0.1]]).expand(1000, 2)) < 0.03
    (0.0, True)
    """
    labels = torch.multinomial(probs, draws, replacement=True)  # (N, draws)
    return float(torch.tensor([metrics.ece(probs, column) for column in labels.unbind(-1)]).quantile(0.95))


def samples_needed(log_densities: Tensor, tolerance: float = _TOLERANCE) -> tuple[int, dict[int, float]]:
    r"""How many posterior samples make the predictive log-likelihood stable, and its value by number of samples.

    The bias of :math:`\log \frac1S \sum_s p_s` falls like 1/S and its spread over draws like :math:`1/\sqrt S`. Both
    are estimated from groups of the given samples, and extrapolated to where both are below ``tolerance``.

    :param log_densities: log-likelihood of each row under each sample, ``(S, N)``, S of at least 4.

    >>> samples_needed(torch.zeros(20, 5))[0]
    1
    """
    S = len(log_densities)

    def nll(size: int) -> Tensor:
        """Negative log-likelihood per row of each group of this many samples."""
        groups = log_densities[: S // size * size].reshape(S // size, size, -1)
        return -(groups.logsumexp(1) - math.log(size)).mean(-1)

    sizes = sorted({n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n <= S // 2} | {S})
    curve = {size: float(nll(size).mean()) for size in sizes}
    part, few = max(1, S // 4), max(1, S // 10)
    bias = max(0.0, float(nll(part).mean()) - curve[S]) / (1 / part - 1 / S)
    spread = float(nll(few).std()) * math.sqrt(few)
    needed = max(1.0, bias / tolerance, (spread / tolerance) ** 2)
    return (math.ceil(needed) if math.isfinite(needed) else 10**9), curve
