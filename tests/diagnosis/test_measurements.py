"""Rows that are not finite or too few, slopes without bias, and the number of samples."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.diagnosis import diagnose
from pyro_vsd.diagnosis.findings import row_findings
from pyro_vsd.diagnosis.measurements import Rows, measure_objective, samples_needed


def regression(num_rows=60):
    x = torch.randn(num_rows, 3)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=num_rows)
    return model, vsd.VSDGuide(model), x, x[:, 0] + 0.1 * torch.randn(num_rows)


def classification(num_rows=60, num_classes=2):
    """Above 32 classes labels are drawn, where a NaN raises at a different place."""
    x = torch.randn(num_rows, 3)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, num_classes])), num_data=num_rows)
    return model, vsd.VSDGuide(model), x, torch.arange(num_rows) % num_classes


def with_one(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[7] = value
    return tensor


PROBLEMS = {"regression": regression, "classes": classification, "many classes": lambda: classification(num_classes=40)}
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
    sets = {"data": (x, y), "validation": (x, y), argument: (with_one(x, value), y)}
    with pytest.raises(ValueError, match=rf"^{argument}\[0\]"):
        diagnose(model, guide, **sets, num_samples=4)


@pytest.mark.parametrize("argument", ["data", "validation"])
@pytest.mark.parametrize("form", FORMS)
def test_targets_that_are_not_finite_are_named(form, argument):
    model, guide, x, y = regression()
    sets = {"data": (x, y), "validation": (x, y), argument: FORMS[form](x, with_one(y, torch.nan))}
    with pytest.raises(ValueError, match=rf"^{argument}\[1\]"):
        diagnose(model, guide, **sets, num_samples=4)


def hand_written(x, y, seen=None):
    """Needs its targets, so that there are no predictions; rows that are not seen do not count."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
    with pyro.plate("rows", 60, subsample=torch.arange(len(x))), pyro.poutine.mask(mask=True if seen is None else seen):
        pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 1.0, validate_args=False), obs=y)


def test_targets_by_keyword_are_named():
    _, _, x, y = regression()
    guide, batch = vsd.VSDGuide(hand_written).setup(x, y), {"x": x, "y": with_one(y, torch.nan)}
    with pytest.raises(ValueError, match=r"^data\['y'\]"):
        diagnose(hand_written, guide, [batch], num_samples=4)


def test_targets_that_the_model_masks_are_no_mistake():
    _, _, x, y = regression()
    missing = with_one(y, torch.nan)
    report = diagnose(hand_written, vsd.VSDGuide(hand_written).setup(x, y), (x, missing, ~missing.isnan()))
    assert report.objective["log_likelihood"] < 0


def test_an_error_with_a_different_cause_stays_as_it_is():
    model, guide, x, y = regression()
    with pytest.raises(ValueError, match=r"^(?!data).*\by\b"):
        diagnose(model, guide, (x, y.unsqueeze(-1).expand(-1, 2)))


@pytest.mark.parametrize(("num_rows", "limit"), [(12, 1000), (60, 12)])
def test_few_rows_are_noted(num_rows, limit):
    model, guide, x, y = regression(num_rows)
    report = diagnose(model, guide, (x, y), num_rows=limit, num_samples=4)
    (found,) = [finding for finding in report.findings if finding.code == "few_rows"]
    assert found.severity == "note"
    assert "12 rows of data" in found.text
    assert ("num_rows" in found.text) == (limit == 12)
    assert found.text in str(report)


def test_few_rows_of_validation_are_noted():
    model, guide, x, y = regression()
    report = diagnose(model, guide, (x, y), (x[:5], y[:5]), num_samples=4)
    (found,) = [finding for finding in report.findings if finding.code == "few_rows"]
    assert "5 rows of validation" in found.text


def test_enough_rows_are_not_noted():
    assert (len(row_findings("data", 29, False)), row_findings("data", 30, False)) == (1, [])


@pytest.mark.parametrize("name", ["data", "validation"])
def test_a_loader_without_a_batch(name):
    x = torch.randn(30, 2)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=30)
    rows = TensorDataset(x, x[:, 0])
    data = {"data": (x, x[:, 0]), name: DataLoader(rows, batch_size=50, drop_last=True)}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        vsd.diagnose(model, vsd.VSDGuide(model), **data)


@pytest.mark.parametrize("num_rows", [40, 400])
def test_the_slope_of_one_batch_is_not_that_of_its_own_rows(num_rows):
    """At the least squares of all rows, a sample has a gradient of its own, which is no reason to train longer."""
    x = torch.randn(400, 3)
    y = x.sum(-1) + torch.randn(400)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 1])), num_data=400, noise=1.0)
    guide = vsd.VSDGuide(model, init_alpha=1e-8)
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(400, 1)], -1), y[:, None]).solution[:, 0]
    with torch.no_grad():
        guide.get_parameter("theta.net.0.weight").copy_(best[None, :3])
        model.net[0].bias.copy_(best[3:])

    def slope(seed: int) -> float:
        rows = Rows((x, y), 400, at_most=num_rows, seed=seed)
        found = measure_objective(model, guide, rows, vsd.VSD_ELBO(kl_weight=0.0))
        assert found.num_data == pytest.approx(400)
        assert found.sampled == (None if num_rows == 400 else num_rows)
        return found.slopes["net.0.weight"]

    slopes = torch.tensor([slope(seed) for seed in range(20)])
    # the gradient of 40 rows has a length of about √(3/40) = 0.27 at a Θ of 1.7; that of halves is as often against
    # as along
    assert slopes.max() < 0.01 * 0.27 * 1.7 * 3
    assert (slopes < 1e-6).sum() >= 5


@pytest.mark.parametrize("seed", range(3))
def test_samples_needed_of_normal_log_densities(seed):
    """p_s = exp(s z): the bias of the log-mean is (e^{s²} - 1)/(2 S) per row, its spread over draws far smaller."""
    torch.manual_seed(seed)
    needed, curve = samples_needed(0.7 * torch.randn(400, 2000), tolerance=0.001)
    assert needed == pytest.approx((math.exp(0.49) - 1) / 2 / 0.001, rel=0.25)
    assert curve[1] > curve[10] > curve[400]


@pytest.mark.parametrize("call", [diagnose, lambda *args: vsd.fit(*args, epochs=1)], ids=["diagnose", "fit"])
def test_arrays_are_not_tensors(call):
    model, guide, x, y = regression()
    with pytest.raises(ValueError, match=r"\bdata\b.*torch\.as_tensor"):
        call(model, guide, (x.numpy(), y.numpy()))
