"""From numbers to plain advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyro_vsd.diagnosis.objective import Objective
from pyro_vsd.diagnosis.sites import COLLAPSED, EXPLODED

__all__ = [
    "Finding",
    "data_findings",
    "objective_findings",
    "overfit_findings",
    "prediction_findings",
    "row_findings",
    "site_findings",
    "tells_slopes",
    "with_causes",
]

# All droprates equal: log α that differs by less gives the vectors a gradient of 1e-6 of that at a spread of one half.
_EQUAL = 0.01
# Nats per datum that better noise must gain to be worth a line.
_WORTH = 0.02
# Share of rows that drop_last accounts for.
_SLACK = 0.01
# A step of 1 % of Θ that gains more than this share of the information in a target. On digits (0.023 nats) it gains
# 0.03 nats after one epoch, 0.018 after 30 at a constant rate, and 0.005 at the end of a schedule.
_STEEP = 0.01
# Rows of a sample that tell so. A classifier of digits at the end of its schedule was called unfinished in 1 of 20
# samples of 200 rows, in 4 of 100, in 8 of 50.
_TELLING = 200
# In 40 diagnoses of a classifier and a regression, each on other rows, there were so many notes on correlations and
# samples that 500 rows do not have: 31 with 10 rows, 16 with 20, 5 with 30, 3 with 50. The log-likelihood scatters by
# 0.2 to 0.3 nats per datum with 10 rows, by 0.1 to 0.15 with 30.
_FEW = 30
# Held-out rows that are worse than training rows by more than this share of the information in a target, beside two
# standard errors. Regressions of 100 rows were first so far apart where their held-out score was the best (0.2 nats)
# and ended 6 apart; healthy ones of 1,000 rows came to 0.15 with a standard error of 0.14, digits to 0.06.
_GAP = 0.1


class Finding(NamedTuple):
    """One thing worth knowing.

    :ivar code: a short name that stays the same, for programs.
    :ivar severity: ``"error"`` (wrong by construction), ``"warning"`` (the fit is ill) or ``"note"``.
    :ivar site: the weight it is about, or ``None``.
    :ivar text: what is so, and what to do.

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
    """Whether the likelihood counts as many data as there are.

    :param stated: the model's ``num_data``, where it has one.
    :param assumed: whether nobody said what the batch size is.
    """
    counted = objective.num_data if stated is None else float(stated)
    if num_rows is None or abs(counted / num_rows - 1) <= _SLACK:
        return []
    factor = num_rows / counted
    effect = f"the KL counts {factor:.3g} times {'too much' if factor > 1 else 'what it should'}"
    if stated is not None:
        what = f"num_data is {stated}{', the batch size' if stated == batch_size else ''}"
        remedy = f"set num_data={num_rows}"
        if factor < 1:  # a batch, say
            remedy += f", or pass all {stated} rows to diagnose if these are a part of them"
    elif math.isclose(objective.scale, 1.0):
        what = f"the likelihood of a batch of {batch_size} has scale 1"
        remedy = f"use pyro.plate(name, {num_rows}, subsample=...) or poutine.scale"
        if assumed:  # a model that is trained on all rows at once is right as it is
            remedy = f"{remedy}; if it trains on all rows at once, pass batch_size={num_rows} to diagnose"
            text = f"{what} (batch size assumed), but there are {num_rows} rows: {effect}; {remedy}"
            return [Finding("num_data", "warning", None, text)]
    else:
        what, remedy = f"the likelihood is scaled to {counted:g} rows", "mend the size of the plate"
    # a training set without its validation rows is no mistake of construction
    severity = "warning" if 0.5 < factor < 2 else "error"
    return [Finding("num_data", severity, None, f"{what}, but there are {num_rows} rows: {effect}; {remedy}")]


def row_findings(name: str, seen: int, more: bool) -> list[Finding]:
    """Whether there are enough rows to tell anything.

    :param name: the argument they came from.
    :param seen: rows that were looked at.
    :param more: whether there are others.
    """
    if seen >= _FEW:
        return []
    advice = "raise num_rows" if more else "take what is measured on them for a hint"
    rows = "1 row" if seen == 1 else f"{seen} rows"
    were = "was" if seen == 1 else "were"
    text = f"only {rows} of {name} {were} looked at, and figures of fewer than {_FEW} change with the rows: {advice}"
    return [Finding("few_rows", "note", None, text)]


def site_findings(
    name: str, site: dict[str, Any], slope: float | None, num_data: float, overfitted: bool = False
) -> list[Finding]:
    """Of one weight."""
    found = [*_droprate_findings(site), *_theta_findings(site, slope), *_gain_findings(site, num_data, overfitted)]
    return [Finding(code, severity, name, text) for code, severity, text in found]


def _droprate_findings(site: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    units, median = site["K"], site["alpha"]["median"]
    if site["collapsed"] > 0.5:
        advice = "raise kl_weight or init_alpha, or lower the learning rate of log_alpha"
        found.append(("alpha_collapsed", "warning", f"alpha collapsed (median {median:.1g}): {advice}"))
    elif site["collapsed"] > 0:
        text = f"{_of(site['collapsed'], units)} have alpha below {COLLAPSED:g}: they have no noise"
        found.append(("alpha_low", "note", text))
    if site["exploded"] > 0.5:
        advice = "lower kl_weight or init_alpha"
        found.append(("alpha_exploded", "warning", f"alpha exploded (median {median:.3g}): {advice}"))
    elif site["exploded"] > 0:
        text = f"{_of(site['exploded'], units)} have alpha above {EXPLODED:g}: right for inputs that do not matter"
        found.append(("alpha_high", "note", text))
    if site["T"] > 0 and units > 1 and site["alpha_spread"] < _EQUAL:
        advice = "set init_alpha_spread=0.5 and train log_alpha, or num_reflections=0"
        text = f"all alpha are equal, so the {site['T']} reflections can do nothing: {advice}"
        found.append(("alpha_equal", "error", text))
    return found


def _theta_findings(site: dict[str, Any], slope: float | None) -> list[tuple[str, str, str]]:
    moved, growth = site["theta_moved"], site["theta_growth"]
    if not site["trainable"]:
        return [("theta_fixed", "note", "theta does not require gradients, so only its noise is learned")]
    if moved is not None and moved < 1e-6 and slope is not None and slope > 1e-5:
        advice = "was the guide trained, and is theta in the optimiser?"
        text = f"theta has not moved from its start, though the loss has a gradient there: {advice}"
        return [("theta_frozen", "warning", text)]
    if growth is not None and growth > 10:
        advice = "nothing in the objective holds it back: lower its learning rate or add weight decay"
        return [("theta_drifted", "warning", f"theta has grown {growth:.0f} times from its start; {advice}")]
    return []


def _gain_findings(site: dict[str, Any], num_data: float, overfitted: bool) -> list[tuple[str, str, str]]:
    gain, found = site.get("gain"), []
    if not gain:
        return []
    lag = (gain["now"] - gain["rescaled"]) / num_data
    if lag > _WORTH:
        factor = max(gain["size"], 1 / gain["size"])
        how = f"the noise is about {factor:.2g} times too {'large' if gain['size'] > 1 else 'small'}"
        advice = f"{'' if overfitted else 'train longer, or '}raise the learning rate of log_alpha"
        found.append(("droprates_lag", "note", f"{how}, which costs {lag:.2g} nats per datum: {advice}"))
    left = (gain["rescaled"] - gain["best"]) / num_data
    if left > _WORTH and gain["found"] is not None and gain["found"] < 0.5:
        share = f"{100 * max(gain['found'], 0):.0f} % of what correlations can give"
        advice = "raise num_reflections or the learning rate of vectors" if site["T"] else "try num_reflections=2"
        found.append(("covariance_left", "note", f"{share} is found, {left:.2g} nats per datum are left: {advice}"))
    return found


def overfit_findings(objective: Objective, prediction: dict[str, Any]) -> list[Finding]:
    """Whether the log-likelihood of held-out rows, averaged over samples, is far below that of training rows."""
    gap = objective.log_likelihood + prediction["nll"]
    if not gap > _GAP * objective.information + 2 * prediction["nll_error"]:
        return []
    scores = f"{objective.log_likelihood:.2f} in training and {-prediction['nll']:.2f} on held-out data"
    text = f"the log-likelihood per datum is {scores}: the network has overfitted, or these rows are of another kind"
    advice = f"raise kl_weight (now {objective.kl_weight:g}), stop earlier, or add weight decay"
    return [Finding("overfitted", "warning", None, f"{text}; {advice}")]


def objective_findings(objective: Objective, others: list[Finding]) -> list[Finding]:
    """Of the KL against the fit. ``others`` may hold the cause already."""
    codes = {finding.code for finding in others}
    gain, kl = objective.gain, objective.weighted_kl
    if gain is None or "num_data" in codes:
        return []
    # The network costs more than it brings: a constant would have a better objective. Or noise has risen until the KL
    # is cheap and nothing comes through, where noise of moderate size would cost more than there is to gain.
    # A fit that held-out rows do not share is no reason for less KL, which would give more of it.
    costly = kl > abs(gain) and kl > 0.2 * objective.information and "overfitted" not in codes
    gave_up = gain < 0.05 * objective.information and objective.price > objective.information
    if costly or (gave_up and "alpha_exploded" in codes):
        cost = f"{kl:.2g} nats per datum for a gain of {gain:.2g} over a constant prediction"
        balance, now = objective.balance, objective.kl_weight
        lower = balance is not None and balance < now
        advice = f"lower kl_weight (now {now:g}){f'; the two balance at kl_weight={balance:.2g}' if lower else ''}"
        return [Finding("kl_swamps", "warning", None, f"the KL swamps the fit, {cost}: {advice}")]
    if gain < 0.05 * objective.information and not codes & {"alpha_exploded", "theta_frozen"}:
        advice = "train longer, raise the learning rate, or check inputs and targets"
        text = f"the fit gains {gain:.2g} nats per datum over a constant prediction: {advice}"
        return [Finding("no_fit", "warning", None, text)]
    steep = [name for name, slope in objective.slopes.items() if slope > _STEEP * objective.information]
    if steep and tells_slopes(objective) and "overfitted" not in codes:
        text = f"the loss still falls steeply in theta of {', '.join(steep)}: train longer"
        return [Finding("unfinished", "note", None, text)]
    return []


def tells_slopes(objective: Objective) -> bool:
    """Whether enough rows were looked at to tell if the loss still falls."""
    return objective.sampled is None or objective.sampled >= _TELLING


def with_causes(findings: list[Finding]) -> list[Finding]:
    """Where the KL swamps the fit, exploded noise is its work: a note."""
    if "kl_swamps" not in {finding.code for finding in findings}:
        return findings
    return [f._replace(severity="note") if f.code == "alpha_exploded" else f for f in findings]


# What must be mended before intervals and confidences can tell anything.
_FIRST = {"kl_swamps", "no_fit", "unfinished", "droprates_lag", "theta_frozen", "num_data"}


def prediction_findings(values: dict[str, Any], held_out: bool, others: Sequence[Finding] = ()) -> list[Finding]:
    """Of the predictions. ``others`` may hold the cause already, with its own advice."""
    found = []
    codes = {finding.code for finding in others}
    first = ["overfitted"] if "overfitted" in codes else sorted(_FIRST & codes)
    instead = f"mend the other findings first ({', '.join(first)})" if first else ""
    rows, where = values["rows"], "on held-out data" if held_out else "on the training data"
    if values["epistemic_share"] < 1e-3:
        text = f"samples agree {where}, {100 * values['epistemic_share']:.2g} % of the uncertainty is epistemic"
        found.append(Finding("no_spread", "warning", None, f"{text}: raise kl_weight or init_alpha"))
    coverage = values.get("coverage")
    # two standard errors beside 3 % that nobody minds
    if coverage is not None and coverage < 0.92 - 2 * math.sqrt(0.95 * 0.05 / rows):
        text = f"95 % intervals hold {100 * coverage:.0f} % of the targets {where}"
        advice = instead or "train longer, learn the noise of the observations if it is fixed, or raise kl_weight"
        found.append(Finding("too_sure", "warning", None, f"{text}: {advice}"))
    elif coverage is not None and coverage > 0.999 and rows >= 100:
        text = f"95 % intervals hold all targets {where}"
        advice = instead or "learn the noise of the observations if it is fixed, or lower kl_weight"
        found.append(Finding("too_unsure", "note", None, f"{text}: {advice}"))
    # the error of few rows is large by chance
    if "ece" in values and values["ece"] > 0.05 + 1 / math.sqrt(rows):
        text = f"confidence and accuracy differ by {values['ece']:.2g} on average {where}"
        advice = instead or "train longer, then try another kl_weight"
        found.append(Finding("miscalibrated", "warning", None, f"{text}: {advice}"))
    if values["samples_needed"] > values["num_samples"]:
        text = f"the log-likelihood needs about {values['samples_needed']} samples to be stable to 0.01 nats per datum"
        found.append(Finding("more_samples", "note", None, text))
    return found


def _of(share: float, units: int) -> str:
    return f"{round(share * units)} of {units} units"
