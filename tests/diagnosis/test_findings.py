"""Advice that depends on what else was found, and on what nobody said."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from pyro import distributions as dist
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.diagnosis.findings import (
    Finding,
    _gain_findings,
    data_findings,
    objective_findings,
    overfit_findings,
    prediction_findings,
)
from pyro_vsd.diagnosis.objective import Objective, measure_objective
from pyro_vsd.diagnosis.rows import Rows
from pyro_vsd.infer.parameters import get_parameter

ROOT = Path(__file__).parents[2]
VALUES = {"rows": 100, "epistemic_share": 0.2, "samples_needed": 10, "num_samples": 100}
UNSURE = [{"coverage": 0.7}, {"ece": 0.4}]


@pytest.mark.parametrize("measured", UNSURE, ids=["coverage", "ece"])
@pytest.mark.parametrize("code", ["kl_swamps", "no_fit", "unfinished", "droprates_lag", "num_data"])
def test_a_cause_that_is_known_goes_first(measured, code):
    cause = Finding(code, "warning", None, "the cause")
    (found,) = prediction_findings(VALUES | measured, True, [cause])
    assert f"mend the other findings first ({code})" in found.text
    assert "kl_weight" not in found.text


@pytest.mark.parametrize("measured", UNSURE, ids=["coverage", "ece"])
def test_without_a_cause_training_longer_comes_before_the_kl(measured):
    (found,) = prediction_findings(VALUES | measured, True)
    assert found.text.index("train longer") < found.text.index("kl_weight")


@pytest.mark.parametrize(("assumed", "severity"), [(True, "warning"), (False, "error")])
def test_scale_one_with_a_batch_size_that_nobody_stated(assumed, severity):
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


@pytest.mark.parametrize(("sampled", "told"), [(199, False), (200, True), (None, True)])
def test_a_steep_loss_is_told_by_enough_rows(sampled, told):
    objective = Objective(1000.0, 10.0, -0.5, {"w": 10.0}, 1e-3, -1.0, 1.0, slopes={"w": 0.1}, sampled=sampled)
    assert [finding.code for finding in objective_findings(objective, [])] == ["unfinished"] * told


def test_what_a_small_sample_cannot_tell_is_left_out():
    x = torch.randn(300, 2)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=300)
    guide = vsd.VSDGuide(model)
    for num_rows, said in ((60, True), (250, False), (300, False)):
        report = vsd.diagnose(model, guide, (x, x[:, 0]), num_rows=num_rows, num_samples=4)
        assert any("a sample of 60 rows cannot tell" in line for line in report.left_out) == said


@pytest.mark.parametrize("num_rows", [40, 400])
def test_the_slope_of_one_batch_is_not_that_of_its_own_rows(num_rows):
    """At the least squares of all rows, a sample has a gradient of its own, which is no reason to train on."""
    x = torch.randn(400, 3)
    y = x.sum(-1) + torch.randn(400)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 1])), num_data=400, noise=1.0)
    guide = vsd.VSDGuide(model, init_alpha=1e-8)
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(400, 1)], -1), y[:, None]).solution[:, 0]
    with torch.no_grad():
        get_parameter(guide, "theta.net.0.weight").copy_(best[None, :3])
        model.net[0].bias.copy_(best[3:])

    def slope(seed: int) -> float:
        rows = Rows("data", (x, y), 400)
        elbo = vsd.VSD_ELBO(kl_weight=0.0)
        found = measure_objective(model, guide, rows, elbo, seed, num_rows, None, torch.device("cpu"))
        assert found.num_data == pytest.approx(400)
        assert found.sampled == (None if num_rows == 400 else num_rows)
        return found.slopes["net.0.weight"]

    slopes = torch.tensor([slope(seed) for seed in range(20)])
    # the gradient of 40 rows has a length of about √(3/40) = 0.27 at a Θ of 1.7; that of halves is as often against
    # as along
    assert slopes.max() < 0.01 * 0.27 * 1.7 * 3
    assert (slopes < 1e-6).sum() >= 5


def test_arrays_are_told_from_tensors():
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=5)
    data = (np.zeros((5, 2)), np.zeros(5))
    with pytest.raises(ValueError, match="no tensor. torch.as_tensor makes tensors of arrays"):
        vsd.diagnose(model, vsd.VSDGuide(model), data)
    with pytest.raises(ValueError, match="'ndarray'.*torch.as_tensor makes tensors of arrays"):
        vsd.fit(model, vsd.VSDGuide(model), data, epochs=1)


def objective(**changes):
    values = {"num_data": 100.0, "scale": 1.0, "log_likelihood": -0.1, "kl": {"w": 0.5}, "kl_weight": 1.0}
    return Objective(**values | {"constant": -0.7, "information": 0.7, "slopes": {"w": 0.1}} | changes)


@pytest.mark.parametrize(("nll", "told"), [(0.1, False), (0.25, False), (0.31, True), (2.0, True)])
def test_held_out_rows_far_below_training_rows_are_told(nll, told):
    values = VALUES | {"nll": nll, "nll_error": 0.05}  # 0.1 + 0.1 * 0.7 + 2 * 0.05 = 0.27
    assert [finding.code for finding in overfit_findings(objective(), values)] == ["overfitted"] * told


def test_who_has_overfitted_is_not_told_to_train_longer_or_to_lower_the_kl():
    (cause,) = overfit_findings(objective(), VALUES | {"nll": 2.0, "nll_error": 0.05})
    assert "raise kl_weight (now 1)" in cause.text
    assert [finding.code for finding in objective_findings(objective(), [])] == ["unfinished"]
    assert objective_findings(objective(), [cause]) == []
    costly = objective(kl={"w": 0.65})
    assert [finding.code for finding in objective_findings(costly, [])] == ["kl_swamps"]
    assert objective_findings(costly, [cause]) == []
    (found,) = prediction_findings(VALUES | {"coverage": 0.7}, True, [cause, Finding("droprates_lag", "note", "w", "")])
    assert found.text.endswith("mend the other findings first (overfitted)")
    site = {"K": 2, "T": 2, "gain": {"now": 30.0, "rescaled": 0.0, "best": 0.0, "found": 1.0, "size": 0.5}}
    (lag,) = (f for f in _gain_findings(site, 100.0, overfitted=True))
    assert "train longer" not in lag[2]


@pytest.mark.parametrize(("total", "offered"), [(0.65, False), (3.0, True)])
def test_a_balance_is_offered_only_where_it_is_lower(total, offered):
    (found,) = objective_findings(objective(log_likelihood=-0.68, kl={"w": total}), [])
    assert found.code == "kl_swamps"
    assert ("balance at" in found.text) == offered


@pytest.mark.slow
def test_a_small_regression_trained_for_long_has_overfitted():
    """With a stronger KL it has not, and its held-out score is the better one."""
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


@pytest.mark.parametrize("name", ["data", "validation"])
def test_a_loader_without_a_batch_is_told(name):
    x = torch.randn(30, 2)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=30)
    rows = TensorDataset(x, x[:, 0])
    data = {"data": (x, x[:, 0]), name: DataLoader(rows, batch_size=50, drop_last=True)}
    with pytest.raises(ValueError, match=f"{name}: expected at least one batch, got none"):
        vsd.diagnose(model, vsd.VSDGuide(model), **data)


def test_a_part_of_the_rows_may_be_one():
    (found,) = data_findings(objective(), 20, 20, 300)
    assert "set num_data=20, or pass all 300 rows" in found.text


def test_the_docs_list_every_name():
    source = "".join((ROOT / "pyro_vsd/diagnosis" / name).read_text() for name in ("findings.py", "diagnose.py"))
    made = set(re.findall(r"(?:Finding|append\(|return \[)\(\"(\w+)\", (?:\"|severity)", source))
    page = (ROOT / "docs/trouble.md").read_text(encoding="utf-8")
    table = page[page.index("| name | severity |") : page.index("`report.codes` has")]
    assert set(re.findall(r"`(\w+)`", table)) == made
    assert len(made) > 20
