"""Calibration errors: bins by hand, against torchmetrics and NumPy, ties and edges."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from pyro_vsd import metrics

ERRORS = ["ece", "adaptive_ece", "classwise_ece"]


def random_case(num_rows=500, num_classes=5):
    logits = 2 * torch.randn(num_rows, num_classes)
    return logits.softmax(-1), (logits + 2 * torch.randn(num_rows, num_classes)).argmax(-1)


def sure_of_first(confidence, num_classes=2):
    """Rows whose first class has that probability, and the others the rest in equal parts."""
    confidence = torch.as_tensor(confidence).unsqueeze(-1)
    return torch.cat([confidence, ((1 - confidence) / (num_classes - 1)).expand(-1, num_classes - 1)], -1)


def test_ece_by_hand():
    # bins of width 1/5: (0.4, 0.6] holds 0.55 and 0.6, (0.6, 0.8] holds 0.7, (0.8, 1] holds 0.9 and 0.95
    probs = sure_of_first([0.55, 0.6, 0.7, 0.9, 0.95])
    y = torch.tensor([0, 1, 0, 0, 0])
    expected = (abs(1 - 1.15) + abs(1 - 0.7) + abs(2 - 1.85)) / 5
    assert metrics.ece(probs, y, num_bins=5) == pytest.approx(expected, rel=1e-12)


def test_adaptive_ece_by_hand():
    # two bins: 0.55, 0.6 | 0.7, 0.9
    probs = sure_of_first([0.9, 0.6, 0.7, 0.55])
    y = torch.tensor([0, 1, 0, 1])
    assert metrics.adaptive_ece(probs, y, num_bins=2) == pytest.approx((1.15 + abs(2 - 1.6)) / 4, rel=1e-12)


def test_classwise_ece_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7]])
    y = torch.tensor([0, 1, 1])
    first = (abs(1 - 1.8) + 0.3) / 3
    second = (abs(1 - 0.2) + 0.3) / 3
    assert metrics.classwise_ece(probs, y, num_bins=10) == pytest.approx((first + second) / 2, rel=1e-12)


@pytest.mark.parametrize("num_bins", [1, 2, 10, 15, 100])
def test_ece_against_torchmetrics(num_bins):
    probs, y = random_case()
    expected = multiclass_calibration_error(probs, y, num_classes=5, n_bins=num_bins, norm="l1")
    assert metrics.ece(probs, y, num_bins) == pytest.approx(expected.item(), rel=1e-5)  # it sums in float32


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_classwise_ece_against_torchmetrics(num_bins):
    probs, y = random_case()
    columns = enumerate(probs.mT.contiguous())
    each = [binary_calibration_error(column, (y == c).long(), n_bins=num_bins, norm="l1") for c, column in columns]
    expected = torch.stack(each).mean().item()
    assert metrics.classwise_ece(probs, y, num_bins) == pytest.approx(expected, rel=1e-5)  # it sums in float32


@pytest.mark.parametrize("num_bins", [1, 10, 15, 600])
def test_adaptive_ece_against_numpy(num_bins):
    probs, y = random_case()
    confidence, hits = probs.amax(-1).numpy(), (probs.argmax(-1) == y).numpy()
    order = confidence.argsort()
    ends = np.arange(1, num_bins) * len(y) // num_bins
    groups = np.split(order, ends)
    expected = sum(abs(hits[g].sum() - confidence[g].sum()) for g in groups if len(g)) / len(y)
    assert metrics.adaptive_ece(probs, y, num_bins) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_bins", [10, 100, 15])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(dtype, num_bins):
    edges = torch.arange(num_bins // 2 + 1, num_bins + 1, dtype=dtype) / num_bins
    bins = metrics.reliability_bins(sure_of_first(edges), torch.zeros(len(edges), dtype=torch.long), num_bins)
    assert bins.size[num_bins // 2 :].tolist() == [1] * len(edges)


def test_reliability_bins_add_up():
    probs, y = random_case()
    bins = metrics.reliability_bins(probs, y, 15)
    kept = bins.size > 0
    assert bins.edges.shape == (16,)
    assert bins.size.sum() == 500
    gap = (bins.size * (bins.accuracy - bins.confidence).abs())[kept].sum() / 500
    assert metrics.ece(probs, y, 15) == pytest.approx(gap.item(), rel=1e-12)
    assert (bins.confidence[kept] <= bins.edges[1:][kept]).all()
    assert (bins.confidence[kept] > bins.edges[:-1][kept]).all()
    assert bins.accuracy[~kept].isnan().all()


@pytest.mark.parametrize("name", ["ece", "adaptive_ece"])
def test_constant_predictor_has_one_gap(name):
    y = torch.tensor([0] * 60 + [1] * 40)
    probs = sure_of_first(torch.full((100,), 0.9))
    assert getattr(metrics, name)(probs, y) == pytest.approx(0.3, rel=1e-12)
    assert getattr(metrics, name)(probs, y.flip(0)) == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize("name", ERRORS)
def test_one_row(name):
    assert getattr(metrics, name)(torch.tensor([[0.75, 0.25]]), torch.tensor([0])) == 0.25


@pytest.mark.parametrize("name", [*ERRORS, "reliability_bins"])
@pytest.mark.parametrize("num_bins", [0, -3])
def test_no_bins(name, num_bins):
    with pytest.raises(ValueError, match=r"\bnum_bins\b"):
        getattr(metrics, name)(torch.tensor([[0.75, 0.25]]), torch.tensor([0]), num_bins)


@pytest.mark.parametrize("name", ERRORS)
def test_calibrated_labels_have_a_small_error(name):
    probs = torch.randn(20_000, 5).softmax(-1)
    y = torch.distributions.Categorical(probs).sample()
    assert getattr(metrics, name)(probs, y) < 0.02
    overconfident = probs.pow(3) / probs.pow(3).sum(-1, keepdim=True)
    assert getattr(metrics, name)(overconfident, y) > 0.05
