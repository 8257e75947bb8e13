"""Findings that depend on other findings, and on what was not stated."""

import re
from pathlib import Path
from types import SimpleNamespace

import pyro
import pytest
import torch
from pyro import distributions as dist

import pyro_vsd as vsd
from pyro_vsd.diagnosis.findings import (
    Finding,
    data_findings,
    objective_findings,
    overfit_findings,
    prediction_findings,
    site_findings,
)
from pyro_vsd.diagnosis.measurements import Objective

ROOT = Path(__file__).parents[2]
VALUES = {"rows": 100, "epistemic_share": 0.2, "samples_needed": 10, "num_samples": 100}
UNSURE = [{"coverage": 0.7}, {"ece": 0.4, "ece_by_chance": 0.05}]


@pytest.mark.parametrize(
    ("gap", "error", "held_out", "found"),
    [(-0.1, 0.01, True, True), (-0.1, 0.01, False, False), (-0.1, 0.06, True, False), (-0.01, 0.001, True, False)],
    ids=["unsure", "on the training data", "few rows", "small"],
)
def test_classes_that_are_not_sure_enough(gap, error, held_out, found):
    values = {**VALUES, "ece": 0.06, "ece_by_chance": 0.02, "overconfidence": gap, "overconfidence_error": error}
    findings = prediction_findings(values, held_out)
    assert [finding.code for finding in findings] == ["too_unsure"] * found
    assert all("vsd.calibrate" in finding.text and "vsd.Ensemble" in finding.text for finding in findings)


@pytest.mark.parametrize(("gap", "word"), [(-0.1, "underconfident"), (0.1, "overconfident")])
def test_one_finding_says_that_classes_are_miscalibrated(gap, word):
    """It says in which direction; ``too_unsure`` would repeat it."""
    values = {**VALUES, "ece": 0.1, "ece_by_chance": 0.02, "overconfidence": gap, "overconfidence_error": 0.01}
    (found,) = prediction_findings(values, True)
    assert found.code == "miscalibrated"
    assert word in found.text


@pytest.mark.parametrize("measured", UNSURE, ids=["coverage", "ece"])
@pytest.mark.parametrize("code", ["kl_swamps", "no_fit", "unfinished", "droprates_lag", "num_data"])
def test_a_cause_that_is_known_goes_first(measured, code):
    cause = Finding(code, "warning", None, "the cause")
    (found,) = prediction_findings(VALUES | measured, True, [cause])
    assert found.code in ("too_sure", "miscalibrated")
    assert f"({code})" in found.text
    assert "kl_weight" not in found.text


@pytest.mark.parametrize("measured", UNSURE, ids=["coverage", "ece"])
def test_without_a_cause_the_kl_is_suggested(measured):
    (found,) = prediction_findings(VALUES | measured, True)
    assert "kl_weight" in found.text


@pytest.mark.parametrize(("assumed", "severity"), [(True, "warning"), (False, "error")])
def test_scale_one_with_an_assumed_batch_size(assumed, severity):
    objective = SimpleNamespace(num_data=93.0, scale=1.0)
    (found,) = data_findings(objective, 354, 100, None, assumed)
    assert found.code == "num_data"
    assert found.severity == severity
    assert ("batch_size=354" in found.text) == assumed


def full_batch(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)


@pytest.mark.parametrize("batch_size", [None, 150])
def test_a_model_of_all_rows_is_right_with_its_batch_size(batch_size):
    x = torch.randn(150, 2)
    y = x[:, 0] + 0.5 * torch.randn(150)
    guide = vsd.VSDGuide(full_batch).setup(x, y)
    report = vsd.diagnose(full_batch, guide, (x, y), batch_size=batch_size)
    assert ("num_data" in report.codes) == (batch_size is None)


@pytest.mark.parametrize(("sampled", "seen"), [(199, False), (200, True), (None, True)])
def test_a_steep_loss_is_seen_with_enough_rows(sampled, seen):
    objective = Objective(1000.0, 10.0, -0.5, {"w": 10.0}, 1e-3, -1.0, 1.0, slopes={"w": 0.1}, sampled=sampled)
    assert [finding.code for finding in objective_findings(objective, [])] == ["unfinished"] * seen


def test_what_a_small_sample_cannot_show_is_left_out():
    x = torch.randn(300, 2)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=300)
    guide = vsd.VSDGuide(model)
    for num_rows, said in ((60, True), (250, False), (300, False)):
        report = vsd.diagnose(model, guide, (x, x[:, 0]), num_rows=num_rows, num_samples=4)
        assert any("60 rows" in line for line in report.left_out) == said


#: A weight without a problem of its own, but with noise that is too small.
SITE = {"K": 2, "T": 2, "alpha": {"median": 0.1}, "alpha_spread": 1.0, "collapsed": 0.0, "exploded": 0.0}
SITE |= {"theta_moved": None, "theta_growth": None, "trainable": True}
SITE |= {"better_noise": {"now": 30.0, "rescaled": 0.0, "best": 0.0, "share_reached": 1.0, "size": 0.5}}


def objective(**changes):
    values = {"num_data": 100.0, "scale": 1.0, "log_likelihood": -0.1, "kl": {"w": 0.5}, "kl_weight": 1.0}
    return Objective(**values | {"constant": -0.7, "information": 0.7, "slopes": {"w": 0.1}} | changes)


@pytest.mark.parametrize(("nll", "found"), [(0.1, False), (0.25, False), (0.31, True), (2.0, True)])
def test_a_lower_likelihood_of_held_out_rows(nll, found):
    values = VALUES | {"nll": nll, "nll_error": 0.05}  # 0.1 + 0.1 * 0.7 + 2 * 0.05 = 0.27
    assert [finding.code for finding in overfit_findings(objective(), values)] == ["overfitted"] * found


def test_overfitting_rules_out_advice_for_more_of_it():
    (cause,) = overfit_findings(objective(), VALUES | {"nll": 2.0, "nll_error": 0.05})
    assert "kl_weight" in cause.text
    assert [finding.code for finding in objective_findings(objective(), [])] == ["unfinished"]
    assert objective_findings(objective(), [cause]) == []
    costly = objective(kl={"w": 0.65})
    assert [finding.code for finding in objective_findings(costly, [])] == ["kl_swamps"]
    assert objective_findings(costly, [cause]) == []
    (found,) = prediction_findings(VALUES | {"coverage": 0.7}, True, [cause, Finding("droprates_lag", "note", "w", "")])
    assert found.text.endswith("(overfitted)")
    (lag,), (usual,) = (site_findings("w", SITE, objective(), overfitted) for overfitted in (True, False))
    assert lag.code == usual.code == "droprates_lag"
    assert usual.text.replace("train longer, or ", "") == lag.text


@pytest.mark.parametrize(("size", "text"), [(0.5, "about 2 times too small"), (1e-3, "more than 10 times too small")])
def test_a_far_factor_is_not_quoted(size, text):
    (found,) = site_findings("w", SITE | {"better_noise": SITE["better_noise"] | {"size": size}}, objective())
    assert text in found.text


@pytest.mark.parametrize(("T", "advised"), [(0, 2), (1, 2), (2, 8), (8, 16)])
def test_more_reflections_are_advised_where_correlations_are_worth_it(T, advised):
    noise = {"now": 6.0, "rescaled": 6.0, "best": 0.0, "share_reached": 0.1, "size": 1.0}
    (found,) = site_findings("w", SITE | {"T": T, "better_noise": noise}, objective())
    assert found.code == "covariance_left"
    assert f"num_reflections={advised} " in found.text
    assert not site_findings("w", SITE | {"T": T, "better_noise": noise | {"rescaled": 4.0, "now": 4.0}}, objective())


@pytest.mark.parametrize(("total", "offered"), [(0.65, False), (3.0, True)])
def test_a_balance_is_offered_only_where_it_is_lower(total, offered):
    (found,) = objective_findings(objective(log_likelihood=-0.68, kl={"w": total}), [])
    assert found.code == "kl_swamps"
    assert ("equal at" in found.text) == offered


@pytest.mark.slow
def test_a_small_regression_trained_for_long_has_overfitted():
    """With a stronger KL it has not, and its held-out score is better."""
    torch.manual_seed(0)
    x = torch.randn(600, 5)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.3 * torch.randn(600)
    train, held_out = (x[:100], y[:100]), (x[100:], y[100:])
    nll = {}
    for weight in (1.0, 3.0):
        torch.manual_seed(1)
        model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([5, 50, 1])), num_data=100, noise="learned")
        guide, elbo = vsd.VSDGuide(model), vsd.VSD_ELBO(kl_weight=weight)
        optimizer = torch.optim.Adam(guide.parameter_groups(lr=1e-2))
        vsd.fit(model, guide, train, epochs=2000, optimizer=optimizer, elbo=elbo, seed=0, progress=False)
        report = vsd.diagnose(model, guide, train, held_out, elbo=elbo)
        assert ("overfitted" in report.codes) == (weight == 1.0), report
        nll[weight] = report.prediction["nll"]
    assert nll[3.0] < nll[1.0] - 0.2


def test_a_part_of_the_rows_may_be_one():
    (found,) = data_findings(objective(), 20, 20, 300)
    assert found.code == "num_data"
    assert "num_data=20" in found.text
    assert "300 rows to diagnose" in found.text


def test_the_docs_list_every_name():
    source = "".join((ROOT / "pyro_vsd/diagnosis" / name).read_text() for name in ("findings.py", "report.py"))
    made = set(re.findall(r'\bFinding\("(\w+)"', source))
    page = (ROOT / "docs/trouble.md").read_text(encoding="utf-8")
    table = page[page.index("| name | severity |") : page.index("`report.codes` has")]
    assert set(re.findall(r"`(\w+)`", table)) == made
    assert len(made) > 20
