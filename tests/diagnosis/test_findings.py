"""Advice that depends on what else was found, and on what nobody said."""

from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from pyro import distributions as dist

import pyro_vsd as vsd
from pyro_vsd.diagnosis.findings import Finding, data_findings, prediction_findings

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


def test_arrays_are_told_from_tensors():
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=5)
    data = (np.zeros((5, 2)), np.zeros(5))
    with pytest.raises(ValueError, match="no tensor. torch.as_tensor makes tensors of arrays"):
        vsd.diagnose(model, vsd.VSDGuide(model), data)
    with pytest.raises(ValueError, match="'ndarray'.*torch.as_tensor makes tensors of arrays"):
        vsd.fit(model, vsd.VSDGuide(model), data, epochs=1)
