"""One call that looks at everything."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pyro
import torch

from pyro_vsd.diagnosis.findings import (
    Finding,
    data_findings,
    objective_findings,
    overfit_findings,
    prediction_findings,
    row_findings,
    site_findings,
    tells_slopes,
    with_causes,
)
from pyro_vsd.diagnosis.objective import Objective, measure_objective, settled
from pyro_vsd.diagnosis.prediction import measure_prediction
from pyro_vsd.diagnosis.report import Diagnosis, described
from pyro_vsd.diagnosis.rows import Rows
from pyro_vsd.diagnosis.sites import measure_gains, measure_sites
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd._utils import evaluation_mode

__all__ = ["diagnose"]


def diagnose(
    model: Any,
    guide: VSDGuide,
    data: Any,
    validation: Any = None,
    *,
    elbo: VSD_ELBO | None = None,
    batch_size: int | None = None,
    num_rows: int = 1000,
    num_samples: int = 50,
    max_units: int = 512,
    seed: int = 0,
) -> Diagnosis:
    """Why a training went as it did: measures of every weight, of the objective and of the predictions, with advice.

    The report names what is wrong by construction (droprates all equal beside reflections, a ``num_data`` that is not
    the number of rows, a likelihood without scale), noise that collapsed or exploded, a KL that swamps the fit, Θ that
    froze or drifted, a fit that held-out rows do not share, predictions that are too sure; and how much of the gain is
    found that the best covariance of the noise could give. A note says where fewer than 30 rows are behind the figures,
    which then scatter.

    For models of ``vsd.nn`` and hand-written Pyro models alike. What a model does not tell is left out, and the report
    says so: where Θ started (known for ``vsd.nn``), predictions (the model must accept a call without its last
    argument, the targets), the gain (for weights that are met row by row, outside of plates, up to ``max_units``; for
    ``prior="empirical_bayes"`` and a positive ``kl_weight``).

    Nothing is changed: parameters, their gradients, modes, random generators and Pyro's parameter store are as before.
    Costs a pass with gradients over ``num_rows`` rows, another with a backward pass for each class, and
    ``num_samples`` forward passes: a few epochs on a small data set, less on a large one.

    :param model: a Pyro model.
    :param guide: its guide, trained or at least set up.
    :param data: what it was trained on: ``vsd.datasets.Data``, a tuple ``(x, y)``, or a ``DataLoader``.
    :param validation: held-out data in the same form; without it predictions are measured on ``data``.
    :param elbo: the objective of training, for its ``kl_weight`` and ``kl_scale``; by default ``VSD_ELBO()``.
    :param batch_size: that of training; by default the loader's, or that of ``vsd.fit``.
    :param num_rows: rows of each set that are looked at, at most.
    :param num_samples: posterior samples of the predictions, at least 4.
    :param max_units: weights of more noise units are left out of the search for the best covariance, which is O(K³).
    :param seed: of all draws.

    >>> import pyro_vsd as vsd
    >>> x = torch.randn(200, 4)
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 2])), num_data=32)
    >>> report = vsd.diagnose(model, vsd.VSDGuide(model), (x, (x[:, 0] > 0).long()), batch_size=32)
    >>> print(report.findings[0].text)
    num_data is 32, the batch size, but there are 200 rows: the KL counts 6.25 times too much; set num_data=200
    """
    if not isinstance(guide, VSDGuide):
        raise TypeError(f"guide: expected a VSDGuide, got a {type(guide).__name__}, which has no structured noise.")
    if not guide.sites:
        raise ValueError(
            "guide: expected one with parameters, got one that has not seen its model's sites. Train it, call "
            "guide.setup(x, y), or load a state first."
        )
    for name, value, least in (("num_rows", num_rows, 1), ("num_samples", num_samples, 4), ("max_units", max_units, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}.")
    if not isinstance(seed, int):
        raise ValueError(f"seed: expected an integer, got {seed!r}.")
    rows = Rows("data", data, batch_size)
    held_out = None if validation is None else Rows("validation", validation, batch_size)
    device = next(guide.parameters()).device
    store = pyro.get_param_store()
    with ExitStack() as stack:
        for source in (rows, held_out):
            if source is not None:
                stack.enter_context(source.untouched())
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(store.scope(store.get_state()))
        stack.enter_context(evaluation_mode(model))
        torch.manual_seed(seed)
        run = _Run(model, guide, rows, settled(elbo), device, seed, num_rows)
        try:
            return run.report(held_out, num_samples, max_units, assumed=elbo is None)
        except (ValueError, RuntimeError) as error:
            # not before: a model may mask a NaN, and a mask may hold -inf
            where = sorted(rows.not_finite | (held_out.not_finite if held_out else set()))
            if not where:
                raise
            raise ValueError(
                f"{', '.join(where)}: expected finite numbers, got NaN or infinities among them, which the model does "
                "not mask. Leave these rows out, or fill in numbers."
            ) from error


class _Run:
    """One diagnosis: measures in turn, what was left out, and findings."""

    def __init__(
        self, model: Any, guide: VSDGuide, rows: Rows, elbo: VSD_ELBO, device: torch.device, seed: int, num_rows: int
    ) -> None:
        self.model, self.guide, self.rows, self.elbo = model, guide, rows, elbo
        self.device, self.seed, self.num_rows = device, seed, num_rows
        stated = getattr(model, "num_data", None)
        self.stated = stated if isinstance(stated, int) else None
        self.left_out: list[str] = []

    def report(self, held_out: Rows | None, num_samples: int, max_units: int, assumed: bool) -> Diagnosis:
        sites = measure_sites(self.model, self.guide)
        findings = self._not_finite()
        objective: Objective | None = None
        prediction: dict[str, Any] = {}
        if findings:
            self.left_out.append("everything that runs the model: its parameters are not finite")
        else:
            strengths = self._strengths(sites)
            objective = self._objective(sites)
            units = sum(strengths[name] * site["K"] for name, site in sites.items())
            objective.price = 0.5 * math.log(2) * units / objective.num_data
            self._gains(sites, strengths, max_units)
            prediction = self._prediction(held_out, num_samples)
            if prediction and held_out is not None:
                findings += overfit_findings(objective, prediction)
            overfitted = bool(findings)
            for name, values in sites.items():
                findings += site_findings(name, values, objective.slopes.get(name), objective.num_data, overfitted)
            rows = self.rows
            findings += data_findings(objective, rows.num_rows, rows.batch_size, self.stated, rows.assumed)
            findings = with_causes(findings + objective_findings(objective, findings))
            if prediction:
                findings += prediction_findings(prediction, held_out is not None, findings)
            for source in (rows, held_out):
                if source is not None:
                    limited = source.seen == self.num_rows and source.num_rows != self.num_rows
                    findings += row_findings(source.name, source.seen, limited)
        looked_at = self.num_rows if self.rows.num_rows is None else min(self.num_rows, self.rows.num_rows)
        settings: dict[str, Any] = {"data": self.rows.num_rows, "rows": looked_at, "assumed": assumed}
        settings |= {name: getattr(self.elbo, name) for name in ("kl_weight", "kl_scale", "prior")}
        alpha = {name: self.guide.alpha(name).detach().flatten().cpu() for name in sites}
        return Diagnosis(sites, described(objective, **settings), prediction, findings, self.left_out, alpha)

    def _not_finite(self) -> list[Finding]:
        found = []
        for name, value in [*self.guide.named_parameters(), *getattr(self.model, "named_parameters", list)()]:
            if not bool(value.isfinite().all()):
                count = int((~value.isfinite()).sum())
                text = f"{count} of {value.numel()} numbers of {name} are NaN or infinite: lower the learning rate"
                found.append(Finding("not_finite", "error", None, text))
        return found

    def _objective(self, sites: dict[str, dict[str, Any]]) -> Objective:
        objective = measure_objective(
            self.model, self.guide, self.rows, self.elbo, self.seed, self.num_rows, self.stated, self.device
        )
        for name, values in sites.items():
            values["kl"] = objective.kl.get(name)
            values["theta_slope"] = objective.slopes.get(name)
        if self.rows.not_finite and not math.isfinite(objective.log_likelihood):
            raise ValueError(f"the log-likelihood of the data is {objective.log_likelihood}")  # `diagnose` says why
        if objective.constant is None:
            reason = "not known for this likelihood, or the targets are all equal"
            self.left_out.append(f"the log-likelihood of a constant prediction: {reason}")
        if not tells_slopes(objective):
            self.left_out.append(f"whether the loss still falls: a sample of {objective.sampled} rows cannot tell")
        if self.rows.num_rows is None:
            self.left_out.append("whether num_data is right: the loader does not tell its number of rows")
        return objective

    def _strengths(self, sites: dict[str, dict[str, Any]]) -> dict[str, float]:
        """What the KL of one unit counts, by site."""
        weight = self.elbo.kl_weight
        assert isinstance(weight, float | int)
        return {n: weight * (s["Q"] if self.elbo.kl_scale == "weight" else 1) for n, s in sites.items()}

    def _gains(self, sites: dict[str, dict[str, Any]], strengths: dict[str, float], max_units: int) -> None:
        weight = self.elbo.kl_weight
        if self.elbo.prior != "empirical_bayes" or weight == 0:
            reason = "kl_weight is 0" if weight == 0 else f"prior={self.elbo.prior!r}"
            self.left_out.append(f"the gain from the best covariance: {reason}")
            return
        gains, reasons = measure_gains(
            self.model, self.guide, self.rows, strengths, self.seed, self.num_rows, self.stated, max_units, self.device
        )
        for name, values in sites.items():
            values["gain"] = gains.get(name)
        self.left_out += [f"the gain of {name}: {reason}" for name, reason in reasons.items()]

    def _prediction(self, held_out: Rows | None, num_samples: int) -> dict[str, Any]:
        values = measure_prediction(
            self.model, self.guide, held_out or self.rows, num_samples, self.seed, self.num_rows, self.device
        )
        if isinstance(values, str):
            self.left_out.append(f"predictions: {values}")
            return {}
        return {"on": "held-out data" if held_out else "training data", **values}
