"""From measurements to plain advice."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyro_vsd.diagnosis.measurements import COLLAPSED, EXPLODED, Objective

__all__ = ["Finding"]

# Spread of log α below which all noise variances count as equal: the gradient of the vectors is then 1e-6 of that at
# a spread of one half.
_EQUAL = 0.01
# Noise of the wrong size must cost this much, in nats per row, to be worth a line.
_WORTH = 0.02
# Better correlations must be worth more: up to this much was left in networks whose test scores no correlations
# improved (docs/rotation_evidence.md).
_WORTH_CORRELATIONS = 0.05
# A factor above this is called "more than"; it comes from a quadratic approximation near the present noise.
_FAR = 10
# The share of rows that drop_last may leave out.
_SLACK = 0.01
# The loss is steep if a step of 1 % of Θ gains more than this share of the information in a target. On digits (0.023
# nats) such a step gains 0.03 nats after one epoch, and 0.005 at the end of a schedule.
_STEEP = 0.01
# Rows needed to see that. A classifier of digits at the end of its schedule was called unfinished in 1 of 20 samples of
# 200 rows, in 4 of 100, in 8 of 50.
_ENOUGH = 200
# Spurious notes in 40 diagnoses, by number of rows: 31 (10 rows), 16 (20), 5 (30), 3 (50).
_FEW = 30
# Overfitting: held-out rows are worse than training rows by this share of the information in a target, plus two
# standard errors. Regressions of 100 rows had a gap of 0.2 nats at their best held-out score and of 6 at the end;
# healthy ones of 1,000 rows had 0.15 with a standard error of 0.14, digits 0.06.
_GAP = 0.1
# Classes are under-confident if confidence is below accuracy by this, plus two standard errors. Networks for digits
# were so by 0.037 to 0.047 at kl_weight 1, and by less than 0.001 without noise.
_UNDER = 0.02
# Miscalibrated: the ECE is above what chance gives by this much.
_MISCALIBRATED = 0.05
# These must be fixed before intervals and confidences mean anything.
_FIRST = {"kl_swamps", "no_fit", "unfinished", "droprates_lag", "theta_frozen", "num_data"}


class Finding(NamedTuple):
    """One thing worth knowing.

    :ivar code: a short name that stays the same, for programs.
    :ivar severity: ``"error"`` (the setup is wrong), ``"warning"`` (the fit is bad) or ``"note"``.
    :ivar site: the weight it is about, or ``None``.
    :ivar text: what is wrong, and what to do.

    >>> print(Finding("alpha_collapsed", "warning", "net.0.weight", "alpha collapsed: raise kl_weight"))
    warning  net.0.weight: alpha collapsed: raise kl_weight
    """

    code: str
    severity: str
    site: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.severity:<7}  {self.site + ': ' if self.site else ''}{self.text}"


def data_findings(
    objective: Objective, num_rows: int | None, batch_size: int, stated: int | None, assumed: bool = False
) -> list[Finding]:
    """Does the likelihood count as many rows as there are?

    :param stated: the model's ``num_data``, if it has one.
    :param assumed: whether the batch size is a guess.
    """
    counted = objective.num_data if stated is None else float(stated)
    if num_rows is None or abs(counted / num_rows - 1) <= _SLACK:
        return []
    factor = num_rows / counted
    # a training set without its validation rows is no error of the setup
    severity = "warning" if 0.5 < factor < 2 else "error"
    if stated is not None:
        what = f"num_data is {stated}{', the batch size' if stated == batch_size else ''}"
        advice = f"set num_data={num_rows}"
        if factor < 1:  # perhaps these are only some of the rows
            advice += f", or pass all {stated} rows to diagnose"
    elif math.isclose(objective.scale, 1.0):
        what = f"the likelihood of a batch of {batch_size} has scale 1"
        advice = f"use pyro.plate(name, {num_rows}, subsample=...) or poutine.scale"
        if assumed:  # a model that is trained on all rows at once is right as it is
            what, severity = f"{what} (batch size assumed)", "warning"
            advice += f"; if you train on all rows at once, pass batch_size={num_rows} to diagnose"
    else:
        what, advice = f"the likelihood is scaled to {counted:g} rows", "correct the size of the plate"
    effect = f"the KL counts {factor:.3g} times {'too much' if factor > 1 else 'what it should'}"
    return [Finding("num_data", severity, None, f"{what}, but there are {num_rows} rows, so {effect}: {advice}")]


def row_findings(name: str, seen: int, more: bool) -> list[Finding]:
    """Are there enough rows for reliable numbers? ``more``: whether the argument ``name`` has others."""
    if seen >= _FEW:
        return []
    advice = "raise num_rows" if more else "treat the numbers as rough"
    text = f"only {seen} row{'s' if seen != 1 else ''} of {name} used; numbers from fewer than {_FEW} rows vary a lot"
    return [Finding("few_rows", "note", None, f"{text}: {advice}")]


def site_findings(name: str, site: dict[str, Any], objective: Objective, overfitted: bool = False) -> list[Finding]:
    """Findings about one weight."""
    found = _noise_findings(name, site) + _theta_findings(name, site, objective.slopes.get(name))
    return found + (_better_noise_findings(name, site, objective, overfitted) if site.get("better_noise") else [])


def _noise_findings(name: str, site: dict[str, Any]) -> list[Finding]:
    found = []
    units, median, collapsed, exploded = site["K"], site["alpha"]["median"], site["collapsed"], site["exploded"]
    if collapsed > 0.5:
        advice = "raise kl_weight or init_alpha, or lower the learning rate of log_alpha"
        text = f"the noise has collapsed (median alpha {median:.1g}): {advice}"
        found.append(Finding("alpha_collapsed", "warning", name, text))
    elif collapsed > 0:
        text = f"the noise of {round(collapsed * units)} of {units} units has no effect (alpha below {COLLAPSED:g})"
        found.append(Finding("alpha_low", "note", name, text))
    if exploded > 0.5:
        text = f"the noise has exploded (median alpha {median:.3g}): lower kl_weight or init_alpha"
        found.append(Finding("alpha_exploded", "warning", name, text))
    elif exploded > 0:
        text = f"the noise of {round(exploded * units)} of {units} units drowns their signal (alpha above {EXPLODED:g})"
        found.append(Finding("alpha_high", "note", name, f"{text}, which is right for inputs that do not matter"))
    if site["T"] > 0 and units > 1 and site["alpha_spread"] < _EQUAL:
        advice = "set init_alpha_spread=0.5 and train log_alpha, or set num_reflections=0"
        text = f"all noise variances alpha are equal, so the {site['T']} reflections have no effect: {advice}"
        found.append(Finding("alpha_equal", "error", name, text))
    return found


def _theta_findings(name: str, site: dict[str, Any], slope: float | None) -> list[Finding]:
    moved, growth = site["theta_moved"], site["theta_growth"]
    if not site["trainable"]:
        return [Finding("theta_fixed", "note", name, "theta does not require gradients, so only the noise is trained")]
    if moved is not None and moved < 1e-6 and slope is not None and slope > 1e-5:
        advice = "has the guide been trained, and is theta in the optimiser?"
        text = f"theta (the mean of the weight) is still at its start, where the loss has a gradient: {advice}"
        return [Finding("theta_frozen", "warning", name, text)]
    if growth is not None and growth > 10:
        advice = "lower its learning rate or add weight decay (the objective does not limit its size)"
        text = f"theta (the mean of the weight) is {growth:.0f} times as large as at the start: {advice}"
        return [Finding("theta_drifted", "warning", name, text)]
    return []


def _better_noise_findings(name: str, site: dict[str, Any], objective: Objective, overfitted: bool) -> list[Finding]:
    noise, found = site["better_noise"], []
    lag = (noise["now"] - noise["rescaled"]) / objective.num_data
    if lag > _WORTH:
        factor = max(noise["size"], 1 / noise["size"])
        times = f"more than {_FAR} times" if factor > _FAR else f"about {_short(factor)} times"
        advice = f"{'' if overfitted else 'train longer, or '}raise the learning rate of log_alpha"
        text = f"the noise variance is {times} too {'large' if noise['size'] > 1 else 'small'} for "
        text += f"kl_weight={objective.kl_weight:g}; the right size would lower the loss by {lag:.2g} per row: {advice}"
        found.append(Finding("droprates_lag", "note", name, text))
    left = (noise["rescaled"] - noise["best"]) / objective.num_data
    if left > _WORTH_CORRELATIONS and noise["share_reached"] is not None and noise["share_reached"] < 0.5:
        advice = f"try num_reflections={8 if 2 <= site['T'] < 8 else max(2, 2 * site['T'])} and compare held-out scores"
        text = f"noise with the best correlations between units would lower the loss by {left:.2g} per row: {advice}"
        found.append(Finding("covariance_left", "note", name, text))
    return found


def overfit_findings(objective: Objective, prediction: dict[str, Any]) -> list[Finding]:
    """Is the log-likelihood, averaged over samples, much lower on held-out rows than on training rows?"""
    gap = objective.log_likelihood + prediction["nll"]
    if not gap > _GAP * objective.information + 2 * prediction["nll_error"]:
        return []
    scores = f"{objective.log_likelihood:.2f} in training but {-prediction['nll']:.2f} on held-out data"
    cause = "the network has overfitted, or the held-out rows follow a different distribution"
    advice = f"raise kl_weight (now {objective.kl_weight:g}), stop earlier, or add weight decay"
    return [Finding("overfitted", "warning", None, f"the log-likelihood per row is {scores}; {cause}: {advice}")]


def objective_findings(objective: Objective, others: list[Finding]) -> list[Finding]:
    """Does the network improve the fit by more than its KL costs? ``others`` may name the cause already."""
    codes = {finding.code for finding in others}
    better, kl = objective.improvement, objective.weighted_kl
    if better is None or "num_data" in codes:
        return []
    # Costly: a constant prediction has a better objective. But a lower KL would not help a network that overfits.
    # Gave up: the noise has grown until the KL is cheap and no signal passes, because moderate noise costs more than
    # any fit can improve.
    costly = kl > abs(better) and kl > 0.2 * objective.information and "overfitted" not in codes
    useless = better < 0.05 * objective.information
    gave_up = useless and objective.price > objective.information and "alpha_exploded" in codes
    if costly or gave_up:
        cost = f"per row it adds {kl:.2g} to the loss, and the fit is {better:.2g} better than a constant prediction"
        balance, now = objective.balance, f"now {objective.kl_weight:g}"
        if balance is not None and balance < objective.kl_weight:
            now += f"; KL and negative log-likelihood are equal at {_short(balance)}"
        return [Finding("kl_swamps", "warning", None, f"the KL dominates the fit ({cost}): lower kl_weight ({now})")]
    if useless and not codes & {"alpha_exploded", "theta_frozen"}:
        advice = "train longer, raise the learning rate, or check inputs and targets"
        text = f"the log-likelihood is only {better:.2g} per row better than that of a constant prediction: {advice}"
        return [Finding("no_fit", "warning", None, text)]
    steep = [name for name, slope in objective.slopes.items() if slope > _STEEP * objective.information]
    if steep and shows_slopes(objective) and "overfitted" not in codes:
        text = f"training has not finished, the loss still falls steeply in theta of {', '.join(steep)}: train longer"
        return [Finding("unfinished", "note", None, text)]
    return []


def shows_slopes(objective: Objective) -> bool:
    """Are there enough rows to see whether the loss still falls?"""
    return objective.sampled is None or objective.sampled >= _ENOUGH


def with_causes(findings: list[Finding]) -> list[Finding]:
    """If the KL dominates the fit, it is the cause of exploded noise, which becomes a note."""
    if "kl_swamps" not in {finding.code for finding in findings}:
        return findings
    return [f._replace(severity="note") if f.code == "alpha_exploded" else f for f in findings]


def prediction_findings(values: dict[str, Any], held_out: bool, others: Sequence[Finding] = ()) -> list[Finding]:
    """Findings about the predictions. ``others`` may name the cause already, with its own advice."""
    found = []
    codes = {finding.code for finding in others}
    first = ["overfitted"] if "overfitted" in codes else sorted(_FIRST & codes)
    instead = f"fix the other findings first ({', '.join(first)})" if first else ""
    rows, where = values["rows"], "on held-out data" if held_out else "on the training data"
    if values["epistemic_share"] < 1e-3:
        share = f"{100 * values['epistemic_share']:.2g} % of the uncertainty is model uncertainty"
        text = f"{where}, the posterior samples hardly differ ({share}): raise kl_weight or init_alpha"
        found.append(Finding("no_spread", "warning", None, text))
    coverage = values.get("coverage")
    # a tolerance of 3 %, and two standard errors
    if coverage is not None and coverage < 0.92 - 2 * math.sqrt(0.95 * 0.05 / rows):
        advice = instead or "train longer, learn the observation noise if it is fixed, or raise kl_weight"
        text = f"{where}, the 95 % intervals contain only {100 * coverage:.0f} % of the targets: {advice}"
        found.append(Finding("too_sure", "warning", None, text))
    elif coverage is not None and coverage > 0.999 and rows >= 100:
        advice = instead or "learn the observation noise if it is fixed, or lower kl_weight"
        text = f"{where}, the 95 % intervals contain all targets, so they are too wide: {advice}"
        found.append(Finding("too_unsure", "note", None, text))
    gap = values.get("overconfidence")
    if "ece" in values and values["ece"] > _MISCALIBRATED + values["ece_by_chance"]:
        advice = instead or "train longer, then try a different kl_weight, vsd.calibrate or vsd.Ensemble"
        side = "" if gap is None else f", {'over' if gap > 0 else 'under'}confident on the whole"
        text = f"{where}, confidence and accuracy differ by {values['ece']:.2g} on average{side}: {advice}"
        found.append(Finding("miscalibrated", "warning", None, text))
    # of classes on held-out rows only: on those it has learned, a network is more often right than it can know
    elif gap is not None and held_out and gap < -_UNDER - 2 * values["overconfidence_error"]:
        advice = (
            instead or "lower kl_weight, calibrate with vsd.calibrate, or use vsd.Ensemble, which chooses kl_weight"
        )
        text = f"{where}, predictions are right {100 * -gap:.2g} % more often than their confidence says: {advice}"
        found.append(Finding("too_unsure", "note", None, text))
    needed = values["samples_needed"]
    if needed > values["num_samples"]:
        what = f"with fewer than about {needed} samples the log-likelihood varies by more than 0.01 nats per row"
        found.append(Finding("more_samples", "note", None, f"{what}: raise num_samples of predict"))
    return found


def _short(value: float) -> str:
    """Two digits, without an exponent: 160, not 1.6e+02."""
    return f"{float(f'{value:.2g}'):g}"
