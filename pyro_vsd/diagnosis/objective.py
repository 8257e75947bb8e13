"""The two sides of the objective, per datum, and where its gradient still points."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from pyro_vsd.diagnosis.rows import Rows, count_rows, sliced
from pyro_vsd.infer import VSD_ELBO
from pyro_vsd.infer.parameters import get_parameter
from pyro_vsd.training.data import arguments

__all__ = ["Objective", "measure_objective"]


@dataclass
class Objective:
    """What the objective says of some rows, in nats per datum.

    :ivar num_data: how many data it counts: scale of the likelihood times rows of the batch.
    :ivar sampled: how many rows stood for all of them; ``None`` where all were looked at.
    :ivar scale: of the likelihood, at the largest batch.
    :ivar kl: by site, not weighted.
    :ivar constant: log-likelihood of the best constant prediction; ``None`` for likelihoods where it is not known.
    :ivar information: what a perfect classifier would gain over the constant; 1 nat for other likelihoods.
    :ivar price: what noise of α = 1 on every unit costs, weighted: the KL of a network that lets half through.
    :ivar slopes: by site: what a step of 1 % of Θ down the gradient would gain.
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
    def weighted_kl(self) -> float:
        return self.kl_weight * sum(self.kl.values())

    @property
    def balance(self) -> float | None:
        """The kl_weight at which KL and negative log-likelihood are equal; ``None`` where the latter is negative."""
        total = sum(self.kl.values())
        return -self.log_likelihood / total if self.log_likelihood < 0 < total else None

    @property
    def gain(self) -> float | None:
        """Log-likelihood above that of a constant."""
        return None if self.constant is None else self.log_likelihood - self.constant


def settled(elbo: VSD_ELBO | None) -> VSD_ELBO:
    """A fresh objective with the settings of the given one at the step it has reached."""
    if elbo is None:
        return VSD_ELBO()
    if not isinstance(elbo, VSD_ELBO):
        raise TypeError(f"elbo: expected the VSD_ELBO of training or None, got a {type(elbo).__name__}.")
    fresh = copy.copy(elbo)
    fresh.kl_weight = float(elbo.kl_weight(elbo.step) if callable(elbo.kl_weight) else elbo.kl_weight)
    fresh.num_particles, fresh.vectorize_particles, fresh.max_plate_nesting = 1, False, math.inf
    fresh.terms, fresh._likelihoods, fresh._checked = {}, {}, set()
    return fresh


def measure_objective(
    model: Any, guide: Any, rows: Rows, elbo: VSD_ELBO, seed: int, at_most: int, largest: int | None,
    device: torch.device,
) -> Objective:  # fmt: skip
    """One pass with gradients: about one epoch of training, where ``at_most`` covers the data."""
    batches = list(rows.batches(seed, at_most, largest))
    lone = len(batches) == 1
    if lone:  # it gives the terms; two more, the gradients
        batches += _two_parts(batches[0], all_rows=rows.num_rows == count_rows(batches[0]))
    weights = {name: get_parameter(guide, f"theta.{name}") for name, s in guide.sites.items() if s.kind == "weight"}
    weights = {name: theta for name, theta in weights.items() if theta.requires_grad}
    seen = 0
    log_likelihood = num_data = scale = 0.0
    kl: dict[str, float] = {}
    # two halves with independent errors: the product of their gradients has no bias from noise
    halves: list[dict[str, Any]] = [dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)]
    counts = [0, 0]
    recorder = _Observed()
    for number, batch in enumerate(batches):
        args, kwargs = arguments(batch, device)
        size = count_rows(batch)
        with torch.enable_grad(), recorder:
            loss = elbo.differentiable_loss(model, guide, *args, **kwargs)
            grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True) if weights else ()
        data = recorder.num_data
        if number == 0:
            scale = recorder.scale
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
    assert isinstance(elbo.kl_weight, float | int)
    return Objective(
        num_data=num_data / seen,
        scale=scale,
        log_likelihood=log_likelihood / seen,
        kl={name: value / seen for name, value in kl.items()},
        kl_weight=float(elbo.kl_weight),
        constant=constant,
        information=information,
        slopes=slopes,
        sampled=None if seen == rows.num_rows else seen,
    )


def _two_parts(batch: Any, all_rows: bool) -> list[Any]:
    """Parts whose gradients err independently: of all rows two draws of the noise, of a sample of rows its halves."""
    size = count_rows(batch)
    if all_rows or size == 1:
        return [batch, batch]
    return [sliced(batch, part) for part in (slice(size // 2), slice(size // 2, size))]


class _Observed(Messenger):
    """Notes the observed sites of every pass: their kind, their values, and what they count."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[Tensor]] = {}
        self.kinds: dict[str, str] = {}
        self.num_data, self.scale = 0.0, 0.0

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
        base = msg["fn"]
        while isinstance(base, Independent):
            base = base.base_dist
        kinds: dict[str, Any] = {"classes": (Categorical, Bernoulli), "numbers": Normal}
        self.kinds[msg["name"]] = next((name for name, kind in kinds.items() if isinstance(base, kind)), "other")
        self.values.setdefault(msg["name"], []).append(value)

    def constant(self) -> tuple[float | None, float]:
        """Log-likelihood per datum of the best constant prediction of all sites, and how much there is to gain."""
        total, information = 0.0, 0.0
        for name, values in self.values.items():
            y = torch.cat([value.reshape(len(value) if value.dim() else 1, -1) for value in values]).double()
            if self.kinds[name] == "classes":
                shares = y.unique(return_counts=True)[1].double() / y.numel()
                entropy = float(torch.special.entr(shares).sum()) * y.shape[1]
                total, information = total - entropy, information + entropy
            elif self.kinds[name] == "numbers" and float(y.var(0, correction=0).min()) > 0:
                total -= float(0.5 * (2 * math.pi * math.e * y.var(0, correction=0)).log().sum())
                information += 1.0
            else:
                return None, 1.0
        return total, information
