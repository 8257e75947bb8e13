"""Rows that cannot be measured, and too few of them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.diagnosis import diagnose
from pyro_vsd.diagnosis.findings import row_findings


def regression(num_rows=60):
    x = torch.randn(num_rows, 3)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=num_rows)
    return model, vsd.VSDGuide(model), x, x[:, 0] + 0.1 * torch.randn(num_rows)


def classification(num_rows=60, num_classes=2):
    """Above 32 classes labels are drawn, which NaN stop in another way."""
    x = torch.randn(num_rows, 3)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, num_classes])), num_data=num_rows)
    return model, vsd.VSDGuide(model), x, torch.arange(num_rows) % num_classes


def spoilt(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[7] = value
    return tensor


PROBLEMS = {"numbers": regression, "classes": classification, "many": lambda: classification(num_classes=40)}
FORMS = {
    "tuple": lambda x, y: (x, y),
    "data": vsd.datasets.Data,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=20),
}


@pytest.mark.parametrize("argument", ["data", "validation"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_inputs_that_are_not_finite_are_named(problem, value, argument):
    model, guide, x, y = PROBLEMS[problem]()
    sets = {"data": (x, y), "validation": (x, y), argument: (spoilt(x, value), y)}
    with pytest.raises(ValueError, match=rf"^{argument}\[0\]: expected finite numbers, got NaN or inf.*Leave these"):
        diagnose(model, guide, **sets, num_samples=4)


@pytest.mark.parametrize("argument", ["data", "validation"])
@pytest.mark.parametrize("form", FORMS)
def test_targets_that_are_not_finite_are_named(form, argument):
    model, guide, x, y = regression()
    sets = {"data": (x, y), "validation": (x, y), argument: FORMS[form](x, spoilt(y, torch.nan))}
    with pytest.raises(ValueError, match=rf"^{argument}\[1\]: expected finite numbers, got NaN"):
        diagnose(model, guide, **sets, num_samples=4)


def hand_written(x, y, seen=None):
    """Needs its targets, so that there are no predictions; rows that are not seen do not count."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
    with pyro.plate("rows", 60, subsample=torch.arange(len(x))), pyro.poutine.mask(mask=True if seen is None else seen):
        pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 1.0, validate_args=False), obs=y)


def test_targets_by_keyword_are_named():
    _, _, x, y = regression()
    guide, batch = vsd.VSDGuide(hand_written).setup(x, y), {"x": x, "y": spoilt(y, torch.nan)}
    with pytest.raises(ValueError, match=r"^data\['y'\]: expected finite numbers, got NaN"):
        diagnose(hand_written, guide, [batch], num_samples=4)


def test_targets_that_the_model_masks_are_no_mistake():
    _, _, x, y = regression()
    missing = spoilt(y, torch.nan)
    report = diagnose(hand_written, vsd.VSDGuide(hand_written).setup(x, y), (x, missing, ~missing.isnan()))
    assert report.objective["log_likelihood"] < 0


def test_an_error_of_another_cause_is_left_as_it_is():
    model, guide, x, y = regression()
    with pytest.raises(ValueError, match=r"y: expected .*shape"):
        diagnose(model, guide, (x, y.unsqueeze(-1).expand(-1, 2)))


@pytest.mark.parametrize(("num_rows", "limit", "text"), [(12, 1000, "for a hint"), (60, 12, "raise num_rows")])
def test_few_rows_are_noted(num_rows, limit, text):
    model, guide, x, y = regression(num_rows)
    report = diagnose(model, guide, (x, y), num_rows=limit, num_samples=4)
    (found,) = [finding for finding in report.findings if finding.code == "few_rows"]
    assert found.severity == "note"
    assert found.text.startswith("only 12 rows of data were looked at")
    assert found.text.endswith(text)
    assert "only 12 rows of data" in str(report)


def test_few_rows_of_validation_are_noted():
    model, guide, x, y = regression()
    report = diagnose(model, guide, (x, y), (x[:5], y[:5]), num_samples=4)
    (found,) = [finding for finding in report.findings if finding.code == "few_rows"]
    assert found.text.startswith("only 5 rows of validation were looked at")


def test_enough_rows_are_not_noted():
    assert (len(row_findings("data", 29, False)), row_findings("data", 30, False)) == (1, [])
