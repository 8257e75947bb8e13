"""Looks at a trained guide and reports what is wrong: :func:`pyro_vsd.diagnose` and its report."""

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import torch

from pyro_vsd._utils import check_integer, evaluation_mode, flatten_dict
from pyro_vsd.diagnosis import findings as advice
from pyro_vsd.diagnosis import measurements
from pyro_vsd.diagnosis.findings import Finding
from pyro_vsd.diagnosis.measurements import Objective, Rows
from pyro_vsd.infer import VSD_ELBO, VSDGuide
from pyro_vsd.training.fitting import make_elbo

__all__ = ["Diagnosis", "diagnose"]


class Diagnosis:
    """What :func:`pyro_vsd.diagnose` found; prints as a table.

    :ivar sites: by weight: ``K``, ``Q``, ``T``, quantiles of ``alpha``, shares ``collapsed`` and ``exploded``,
        ``alpha_spread`` (of log α), ``correlated`` (share of ‖Σ‖² off the diagonal), ``kl`` (nats per row, not
        weighted), ``theta_moved`` (distance from the start over its norm), ``theta_growth``, ``theta_slope`` and
        ``better_noise``; ``None`` where not known. This last one holds the loss of the noise as it is, ``now``, and of
        better noise: ``rescaled`` (the same correlations, each unit's noise at its best size), ``best_diagonal``
        (independent) and ``best``; ``share_reached``, how far the correlations are on the way from independent noise
        (0) to the best (1); and ``size``, the noise variance over its best.
    :ivar objective: nats per row: ``log_likelihood``, ``constant``, ``kl``, ``weighted_kl``; ``balance``, the
        kl_weight at which KL and log-likelihood would be equal; settings.
    :ivar prediction: metrics on held-out rows, or on the data; empty where there are none.
    :ivar findings: the worst first.
    :ivar left_out: what could not be measured, and why.
    :ivar alpha: noise variances of each weight, for the figure.
    """

    def __init__(
        self,
        sites: dict[str, dict[str, Any]],
        objective: dict[str, Any],
        prediction: dict[str, Any],
        findings: Sequence[Finding],
        left_out: Sequence[str],
        alpha: dict[str, Any],
    ) -> None:
        self.sites, self.objective, self.prediction = sites, objective, prediction
        self.findings = sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))
        self.left_out, self.alpha = list(left_out), alpha

    @property
    def healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not self.codes

    @property
    def codes(self) -> set[str]:
        """Short names of the errors and warnings."""
        return {finding.code for finding in self.findings if finding.severity != "note"}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings and containers."""
        result = {"healthy": self.healthy, "sites": self.sites, "objective": self.objective}
        result |= {"prediction": self.prediction, "left_out": self.left_out}
        return copy.deepcopy(result) | {"findings": [finding._asdict() for finding in self.findings]}

    def to_pandas(self) -> Any:
        """A data frame with a row for each weight, and a column ``alpha.median`` for ``["alpha"]["median"]``."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        rows = [flatten_dict(values) for values in self.sites.values()]
        return pandas.DataFrame(rows, index=pandas.Index(list(self.sites), name="site"))

    def plot(self, axes: Sequence[Any] | None = None) -> Sequence[Any]:
        """Draws :func:`pyro_vsd.plots.diagnosis`: four panels, on new axes without."""
        from pyro_vsd.plots import diagnosis

        return diagnosis(self, axes=axes)

    def __repr__(self) -> str:
        blocks = [self._objective_lines(), self._site_lines(), self._prediction_lines()]
        blocks.append([str(finding) for finding in self.findings] or ["no problems found"])
        blocks.append([f"not measured: {text}" for text in self.left_out])
        return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)

    def _objective_lines(self) -> list[str]:
        values = self.objective
        head = f"{values['rows']} of {_text(values['data'])} rows, kl_weight {values['kl_weight']:g}, "
        head += f"kl_scale {values['kl_scale']!r}" + (" (assumed: no elbo was given)" if values["assumed"] else "")
        if values["log_likelihood"] is None:
            return [head]
        labels = {"log_likelihood": "log-likelihood", "constant": "of a constant prediction", "kl": "KL"}
        labels |= {"weighted_kl": "kl_weight × KL", "balance": "kl_weight with KL = NLL"}
        lines = [f"{label:<28}{_text(values[name], '.4f'):>10}" for name, label in labels.items()]
        return [head, f"{'nats per row':<28}{'value':>10}", *lines]

    def _site_lines(self) -> list[str]:
        table = [["site", "K", "Q", "T", "alpha 5%", "median", "95%", "correlated", "KL/row", "theta moved"]]
        for name, site in self.sites.items():
            alpha = [f"{site['alpha'][level]:.2g}" for level in ("5%", "median", "95%")]
            shares = _text(site["correlated"], ".0%"), _text(site.get("kl"), ".4f"), _text(site["theta_moved"], ".0%")
            table.append([name, *(str(site[key]) for key in ("K", "Q", "T")), *alpha, *shares])
        first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
        return ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in table]

    def _prediction_lines(self) -> list[str]:
        values = self.prediction
        if not values:
            return []
        names = ("nll", "error_rate", "rmse", "ece", "coverage", "epistemic_share", "samples_needed")
        shown = {name: values[name] for name in names if name in values}
        lines = [f"{name:<28}{_text(v, '' if isinstance(v, int) else '.4f'):>10}" for name, v in shown.items()]
        return [f"{values['on']}: {values['rows']} rows, {values['num_samples']} samples", *lines]


def _text(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def diagnose(
    model: Any,
    guide: VSDGuide,
    data: Any,
    validation: Any = None,
    *,
    elbo: VSD_ELBO | None = None,
    kl_weight: float | None = None,
    batch_size: int | None = None,
    target: str | None = None,
    num_rows: int = 1000,
    num_samples: int = 50,
    max_units: int = 512,
    seed: int = 0,
) -> Diagnosis:
    """Explains what is wrong with a training run and what to try.

    The report names mistakes in the setup (equal noise variances with reflections, a ``num_data`` that is not the
    number of rows, a likelihood without scale), noise that collapsed or exploded, a KL that dominates the fit, Θ that
    did not move or grew without limit, overfitting, and predictions that are too sure or not sure enough. It also says
    whether noise of a different size or with different correlations would be better. With fewer than 30 rows the
    numbers are only indicative.

    Works for models of ``vsd.nn`` and for hand-written Pyro models. The report lists what could not be measured: the
    movement of Θ is known for ``vsd.nn`` alone; predictions need a model that can be called without its last argument,
    the targets; the best noise is known for a weight used row by row, outside of plates, of up to ``max_units``,
    with ``prior="empirical_bayes"`` and a positive ``kl_weight``.

    Parameters, gradients, modes, random generators and Pyro's parameter store stay as they are. Costs a pass with
    gradients over ``num_rows`` rows, a second one with a backward pass for each class, and ``num_samples`` forward
    passes: a few epochs on a small data set, less on a large one.

    :param model: a Pyro model.
    :param guide: its guide, trained or at least set up.
    :param data: the training data, in any form that :func:`vsd.fit <pyro_vsd.training.fit>` takes.
    :param validation: held-out data in the same form; without it predictions are evaluated on ``data``.
    :param elbo: the objective of training, for its ``kl_weight`` and ``kl_scale``; by default ``VSD_ELBO()``.
    :param kl_weight: that of training, in place of ``elbo``, as for ``vsd.fit``.
    :param batch_size: that of training; by default the loader's, or that of ``vsd.fit``.
    :param target: the key of the targets in dicts; by default ``"labels"`` or ``"y"``.
    :param num_rows: the largest number of rows to use of each set.
    :param num_samples: posterior samples of the predictions, at least 4.
    :param max_units: weights with more noise units are left out of the search for the best covariance, which is O(K³).
    :param seed: of all draws.

    >>> x = torch.randn(200, 4)
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 2])), num_data=32)
    >>> report = vsd.diagnose(model, vsd.VSDGuide(model), (x, (x[:, 0] > 0).long()), batch_size=32)
    >>> print(report.findings[0].text)
    num_data is 32, the batch size, but there are 200 rows, so the KL counts 6.25 times too much: set num_data=200
    """
    if not isinstance(guide, VSDGuide):
        raise TypeError(f"guide must be a VSDGuide, not a {type(guide).__name__}, which has no structured noise.")
    if not guide.sites:
        raise ValueError("guide has no parameters yet: train it, call guide.setup(x, y), or load a state first.")
    if elbo is not None and not isinstance(elbo, VSD_ELBO):
        raise TypeError(f"elbo must be the VSD_ELBO of the training run or None, not a {type(elbo).__name__}.")
    if kl_weight is not None:
        elbo = make_elbo(elbo, kl_weight)
    check_integer("num_rows", num_rows, 1)
    check_integer("num_samples", num_samples, 4)
    check_integer("max_units", max_units, 0)
    check_integer("seed", seed)
    device = next(guide.parameters()).device
    options: dict[str, Any] = {"at_most": num_rows, "seed": seed, "device": device, "model": model, "target": target}
    rows = Rows(data, batch_size, **options)
    held_out = None if validation is None else Rows(validation, batch_size, "validation", **options)
    sources = [rows] if held_out is None else [rows, held_out]
    store = pyro.get_param_store()
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.generators_kept())
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(store.scope(store.get_state()))
        stack.enter_context(evaluation_mode(model))
        torch.manual_seed(seed)
        try:
            return _Run(model, guide, rows, held_out, elbo).report(num_samples, max_units)
        except (ValueError, RuntimeError) as error:
            # not checked before: a model may mask a NaN, and a mask may hold -inf
            where = sorted(set().union(*(source.not_finite for source in sources)))
            if not where:
                raise
            text = f"{', '.join(where)} has NaN or infinite values that the model does not mask."
            raise ValueError(f"{text} Leave these rows out, or fill in values.") from error


class _Run:
    """One diagnosis: measurements in turn, what was left out, and findings."""

    def __init__(self, model: Any, guide: VSDGuide, rows: Rows, held_out: Rows | None, elbo: VSD_ELBO | None) -> None:
        self.model, self.guide, self.rows, self.held_out = model, guide, rows, held_out
        self.assumed = elbo is None
        self.elbo = VSD_ELBO() if elbo is None else copy.copy(elbo)
        self.elbo.auto_step = False
        self.elbo.stop_watching()  # the report says so
        self.elbo.num_particles = 1  # batches average enough
        weight = self.elbo.kl_weight
        self.kl_weight = float(weight(self.elbo.step) if callable(weight) else weight)
        stated = getattr(model, "num_data", None)
        self.stated = stated if isinstance(stated, int) else None
        self.left_out: list[str] = []

    def report(self, num_samples: int, max_units: int) -> Diagnosis:
        rows, objective, prediction = self.rows, None, dict[str, Any]()
        sites = measurements.measure_sites(self.model, self.guide)
        findings = self._not_finite()
        if findings:
            self.left_out.append("everything that runs the model: parameters are not finite")
        else:
            objective = self._objective(sites)
            self._better_noise(sites, objective, max_units)
            measured = measurements.measure_prediction(self.model, self.guide, self.held_out or rows, num_samples)
            if isinstance(measured, str):
                self.left_out.append(f"predictions: {measured}")
            else:
                prediction = {"on": "held-out data" if self.held_out else "training data", **measured}
            findings = self._findings(sites, objective, prediction)
        names = ("log_likelihood", "constant", "total_kl", "weighted_kl", "balance", "num_data")
        described: dict[str, Any] = {name.removeprefix("total_"): getattr(objective, name, None) for name in names} | {
            "data": rows.num_rows,
            "rows": rows.at_most if rows.num_rows is None else min(rows.at_most, rows.num_rows),
            "assumed": self.assumed,
            "kl_weight": self.kl_weight,
            "kl_scale": self.elbo.kl_scale,
            "prior": self.elbo.prior,
        }
        alpha = {name: self.guide.alpha(name).detach().flatten().cpu() for name in sites}
        return Diagnosis(sites, described, prediction, findings, self.left_out, alpha)

    def _not_finite(self) -> list[Finding]:
        parameters = [*self.guide.named_parameters(), *getattr(self.model, "named_parameters", list)()]
        text = "{} of {} entries of {} are NaN or infinite: lower the learning rate"
        counts = [(int((~value.isfinite()).sum()), value.numel(), name) for name, value in parameters]
        return [Finding("not_finite", "error", None, text.format(*found)) for found in counts if found[0]]

    def _objective(self, sites: dict[str, dict[str, Any]]) -> Objective:
        rows = self.rows
        objective = measurements.measure_objective(self.model, self.guide, rows, self.elbo, self.stated)
        for name, values in sites.items():
            values["kl"] = objective.kl.get(name)
            values["theta_slope"] = objective.slopes.get(name)
        if rows.not_finite and not math.isfinite(objective.log_likelihood):
            raise ValueError(f"the log-likelihood of the data is {objective.log_likelihood}")  # `diagnose` says why
        if objective.constant is None:
            reason = "not known for this likelihood, or all targets are equal"
            self.left_out.append(f"the log-likelihood of a constant prediction: {reason}")
        if not advice.shows_slopes(objective):
            self.left_out.append(f"whether the loss still falls: {objective.sampled} rows are too few to see it")
        if rows.num_rows is None:
            self.left_out.append("whether num_data is right: the loader does not know its number of rows")
        return objective

    def _better_noise(self, sites: dict[str, dict[str, Any]], objective: Objective, max_units: int) -> None:
        # the weight of one unit's KL in the objective, by site
        factors = {name: site["Q"] if self.elbo.kl_scale == "weight" else 1 for name, site in sites.items()}
        strengths = {name: self.kl_weight * factor for name, factor in factors.items()}
        units = sum(strengths[name] * site["K"] for name, site in sites.items())
        objective.price = 0.5 * math.log(2) * units / objective.num_data
        if self.elbo.prior != "empirical_bayes" or self.kl_weight == 0:
            reason = "kl_weight is 0" if self.kl_weight == 0 else f"prior={self.elbo.prior!r}"
            self.left_out.append(f"the best noise: {reason}")
            return
        about = (self.model, self.guide, self.rows)
        found, reasons = measurements.measure_better_noise(*about, strengths, self.stated, max_units)
        for name, values in sites.items():
            values["better_noise"] = found.get(name)
        self.left_out += [f"the best noise of {name}: {reason}" for name, reason in reasons.items()]

    def _findings(
        self, sites: dict[str, dict[str, Any]], objective: Objective, prediction: dict[str, Any]
    ) -> list[Finding]:
        rows, held_out = self.rows, self.held_out
        findings = advice.overfit_findings(objective, prediction) if prediction and held_out else []
        overfitted = bool(findings)
        for name, values in sites.items():
            found = advice.site_findings(name, values, objective, overfitted)
            if self.assumed:  # what noise is right depends on it
                doubt = "; if training had a different kl_weight, pass it to diagnose"
                found = [f._replace(text=f.text + doubt) if f.code == "droprates_lag" else f for f in found]
            findings += found
        findings += advice.data_findings(objective, rows.num_rows, rows.batch_size, self.stated, rows.assumed)
        findings = advice.with_causes(findings + advice.objective_findings(objective, findings))
        if prediction:
            findings += advice.prediction_findings(prediction, held_out is not None, findings)
        for source in [rows] if held_out is None else [rows, held_out]:
            more = source.seen == source.at_most and source.num_rows != source.at_most
            findings += advice.row_findings(source.name, source.seen, more)
        return findings
