"""Advice that depends on what else was found, and on what nobody said."""

from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from pyro import distributions as dist

import pyro_vsd as vsd
from pyro_vsd.diagnosis.findings import Finding, data_findings, objective_findings, prediction_findings
from pyro_vsd.diagnosis.objective import Objective, measure_objective
from pyro_vsd.diagnosis.rows import Rows
from pyro_vsd.infer.parameters import get_parameter

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
