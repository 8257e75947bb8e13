"""Classification metrics: by hand, against scikit-learn and SciPy, at their limits, and their errors."""

import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from pyro_vsd import metrics
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

SCORES = ["accuracy", "error_rate", "nll", "brier", "ece", "adaptive_ece", "classwise_ece"]

# accuracy 2/3; label probabilities 0.7, 0.2, 0.5
PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.5, 0.25, 0.25]])
LABELS = torch.tensor([0, 2, 0])


def random_case(num_rows=200, num_classes=4, dtype=torch.float64):
    logits = 2 * torch.randn(num_rows, num_classes, dtype=dtype)
    return logits.softmax(-1), (logits + torch.randn(num_rows, num_classes)).argmax(-1)


def one_hot(labels, num_classes=4):
    return torch.nn.functional.one_hot(labels, num_classes).double()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 2 / 3),
        ("error_rate", 1 / 3),
        ("nll", -(math.log(0.7) + math.log(0.2) + math.log(0.5)) / 3),
        ("brier", ((0.09 + 0.04 + 0.01) + (0.09 + 0.25 + 0.64) + (0.25 + 0.0625 + 0.0625)) / 3),
    ],
)
def test_by_hand(name, expected):
    assert getattr(metrics, name)(PROBS, LABELS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("accuracy", lambda p, y: sklearn.metrics.accuracy_score(y, p.argmax(-1))),
        ("error_rate", lambda p, y: sklearn.metrics.zero_one_loss(y, p.argmax(-1))),
        ("nll", lambda p, y: sklearn.metrics.log_loss(y, p, labels=range(p.shape[1]))),
        ("brier", lambda p, y: ((p - np.eye(p.shape[1])[y]) ** 2).sum(-1).mean()),
    ],
)
@pytest.mark.parametrize("num_classes", [2, 7])
def test_against_an_independent_implementation(name, reference, num_classes):
    probs, y = random_case(num_classes=num_classes)
    assert getattr(metrics, name)(probs, y) == pytest.approx(reference(probs.numpy(), y.numpy()), rel=1e-10)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_returns_a_float_for_any_floating_dtype(name, dtype):
    probs, y = random_case()
    value = getattr(metrics, name)(probs.to(dtype), y)
    assert type(value) is float
    tolerance = {torch.float64: 0, torch.float32: 1e-5}.get(dtype, 0.03)
    assert value == pytest.approx(getattr(metrics, name)(probs, y), abs=tolerance)


@pytest.mark.parametrize("name", SCORES)
def test_accepts_every_form(name):
    samples, y = torch.randn(6, 50, 4).softmax(-1), torch.randint(4, (50,))
    metric = getattr(metrics, name)
    expected = metric(samples.mean(0), y)
    assert metric(samples, y) == pytest.approx(expected, rel=1e-12)
    assert metric(samples.numpy(), y.numpy()) == pytest.approx(expected, rel=1e-12)
    assert metric(samples.mean(0).numpy(), y.to(torch.uint8)) == pytest.approx(expected, rel=1e-12)
    assert metric(ClassificationPrediction.from_samples(samples), y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "perfect", "wrong", "uniform"),
    [
        ("accuracy", 1, 0, 0.25),
        ("error_rate", 0, 1, 0.75),
        ("nll", 0, math.inf, math.log(4)),
        ("brier", 0, 2, 0.75),
        ("ece", 0, 1, 0),
        ("adaptive_ece", 0, 1, 0),
        ("classwise_ece", 0, 0.5, 0),
    ],
)
def test_perfect_wrong_and_uniform_predictors(name, perfect, wrong, uniform):
    y = torch.arange(40) % 4
    metric = getattr(metrics, name)
    assert metric(one_hot(y), y) == perfect
    assert metric(one_hot((y + 1) % 4), y) == wrong
    assert metric(torch.full((40, 4), 0.25), y) == pytest.approx(uniform, abs=1e-15)


@pytest.mark.parametrize("name", SCORES)
def test_order_of_rows_does_not_matter(name):
    probs, y = random_case()
    probs[:100] = probs[0]  # ties
    order = torch.randperm(len(y))
    metric = getattr(metrics, name)
    assert metric(probs[order], y[order]) == pytest.approx(metric(probs, y), rel=1e-12)


def test_predictive_entropy_per_row():
    probs, _ = random_case()
    entropy = metrics.predictive_entropy(probs)
    assert entropy.shape == (200,)
    np.testing.assert_allclose(entropy, scipy.stats.entropy(probs, axis=-1), rtol=1e-12)
    assert metrics.predictive_entropy(torch.eye(3)).tolist() == [0, 0, 0]
    torch.testing.assert_close(metrics.predictive_entropy(torch.full((1, 8), 1 / 8)), torch.tensor([math.log(8)]))


def test_mutual_information_per_row():
    samples = torch.randn(6, 50, 4).softmax(-1)
    expected = scipy.stats.entropy(samples.mean(0), axis=-1) - scipy.stats.entropy(samples, axis=-1).mean(0)
    np.testing.assert_allclose(metrics.mutual_information(samples), expected, rtol=1e-9, atol=1e-14)
    prediction = ClassificationPrediction.from_samples(samples)
    torch.testing.assert_close(metrics.mutual_information(prediction), metrics.mutual_information(samples))
    assert (metrics.mutual_information(samples[:1]) == 0).all()
    assert (metrics.mutual_information(samples[:1].expand(3, -1, -1)) < 1e-15).all()


def test_mutual_information_of_certain_samples_that_differ():
    samples = torch.eye(4).unsqueeze(1)  # four samples of one row, each certain of a different class
    torch.testing.assert_close(metrics.mutual_information(samples), torch.tensor([math.log(4)]))


def test_a_million_rows_in_float32_lose_nothing():
    probs = torch.tensor([[0.9, 0.1]], dtype=torch.float32).expand(1_000_000, 2)
    assert metrics.nll(probs, torch.zeros(1_000_000, dtype=torch.long)) == pytest.approx(-math.log(0.9), rel=1e-6)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("probs", "y", "argument"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "prediction"),
        (torch.ones(3), torch.zeros(3, dtype=torch.long), "prediction"),
        (torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.long), "prediction"),
        (torch.randn(3, 2), torch.zeros(3, dtype=torch.long), "prediction"),  # logits
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "prediction"),
        (torch.ones(2, 3, 2) / 2, torch.zeros(3, 2, dtype=torch.long), "y"),
        (torch.ones(3, 2) / 2, torch.zeros(4, dtype=torch.long), "y"),
        (torch.ones(3, 2) / 2, torch.full((3,), 0.5), "y"),
        (torch.ones(3, 3) / 3, torch.zeros(3), "y"),
        (torch.ones(3, 2) / 2, torch.tensor([0, 1, 2]), "y"),
        (torch.ones(3, 2) / 2, torch.tensor([0, -1, 1]), "y"),
    ],
)
def test_wrong_arguments(name, probs, y, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        getattr(metrics, name)(probs, y)


def test_a_negative_probability_does_not_hide_in_the_mean():
    samples = torch.tensor([[[1.5, -0.5]], [[0.5, 0.5]]])
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        metrics.nll(samples, torch.tensor([0]))


def test_nan_inside_a_prediction_object():
    prediction = ClassificationPrediction(torch.full((2, 2), torch.nan), torch.zeros(2), 1)
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        metrics.nll(prediction, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    "prediction",
    [
        RegressionPrediction.from_samples(torch.zeros(2, 3), torch.tensor(1.0)),
        Prediction(torch.zeros(3), torch.ones(3), 1),
    ],
)
def test_other_predictions_raise(prediction):
    with pytest.raises(TypeError, match=r"\bprediction\b"):
        metrics.accuracy(prediction, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("name", SCORES)
def test_takes_read_only_and_reversed_arrays(name):
    probs, y = random_case()
    metric = getattr(metrics, name)
    arrays = probs.numpy().copy(), y.numpy().copy()
    for one in arrays:
        one.flags.writeable = False
    assert metric(*arrays) == metric(probs, y)
    assert metric(arrays[0][::-1], arrays[1][::-1]) == pytest.approx(metric(probs, y), rel=1e-12)


def test_mutual_information_needs_samples():
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        metrics.mutual_information(torch.ones(3, 2) / 2)


# ---- edges of all class metrics
# Elsewhere metrics were wrong in FPR and Brier (torch-uncertainty#335), mutual information wrong in rare cases (#45),
# metrics named but not implemented (#333), and logarithms taken of zero (scikit-activeml#344).

SURE, TIED = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.full((4, 2), 0.5)
RIGHT, WRONG, MOSTLY_FIRST = torch.tensor([0, 1, 0]), torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0, 1])
ONE_CLASS = torch.ones(3, 1), torch.zeros(3, dtype=torch.long)

EDGES = {
    "one bin: the gap of all rows": (lambda: metrics.ece(TIED, MOSTLY_FIRST, num_bins=1), 0.25),
    "zero probability, right": (lambda: metrics.nll(SURE, RIGHT), 0.0),
    "zero probability, wrong": (lambda: metrics.nll(SURE, WRONG), math.inf),
    "zero probability, entropy": (lambda: float(metrics.predictive_entropy(SURE).max()), 0.0),
    "certain and right": (lambda: metrics.brier(SURE, RIGHT), 0.0),
    "certain and wrong": (lambda: metrics.brier(SURE, WRONG), 2.0),
    "certain and wrong, calibration": (lambda: metrics.ece(SURE, WRONG), 1.0),
    "ties take the first class": (lambda: metrics.accuracy(TIED, MOSTLY_FIRST), 0.75),
    "ties separate nothing": (lambda: metrics.auroc(torch.ones(5), torch.ones(3)), 0.5),
    "ties accept all": (lambda: metrics.fpr_at_95_tpr(torch.ones(5), torch.ones(3)), 1.0),
    "one class": (lambda: metrics.accuracy(*ONE_CLASS), 1.0),
    "one class, likelihood": (lambda: metrics.nll(*ONE_CLASS), 0.0),
    "one class, calibration": (lambda: metrics.ece(*ONE_CLASS), 0.0),
    "samples that agree": (lambda: float(metrics.mutual_information(SURE.expand(4, 3, 2)).max()), 0.0),
    "certain samples that differ": (lambda: float(metrics.mutual_information(torch.eye(2).unsqueeze(1))), math.log(2)),
    "one score, all rejected together": (lambda: float(metrics.risk_coverage(TIED, MOSTLY_FIRST).risk[-1]), 0.25),
}


@pytest.mark.parametrize(("value", "expected"), EDGES.values(), ids=EDGES)
def test_edge(value, expected):
    assert value() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["entropy", "bald", "variation_ratio"])
def test_acquisition_of_certain_samples_is_finite(kind):
    assert bool(metrics.acquisition(SURE.expand(4, 3, 2), kind).isfinite().all())


# ---- acquisition


def three_kinds_of_rows():
    """A sure row; one that all samples find ambiguous; one that they dispute."""
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    second = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.2, 0.8]])
    return torch.stack([first, second])


@pytest.mark.parametrize(("kind", "best"), [("entropy", 1), ("variation_ratio", 1), ("bald", 2)])
def test_acquisition_ranking(kind, best):
    scores = metrics.acquisition(three_kinds_of_rows(), kind)
    assert scores.shape == (3,)
    assert scores.argmax() == best
    assert scores[0] == 0


def test_acquisition_values():
    prediction = ClassificationPrediction.from_samples(torch.randn(5, 9, 3).softmax(-1))
    torch.testing.assert_close(metrics.acquisition(prediction, "entropy"), prediction.entropy)
    torch.testing.assert_close(metrics.acquisition(prediction, "bald"), prediction.mutual_information)
    torch.testing.assert_close(metrics.acquisition(prediction, "variation_ratio"), 1 - prediction.confidence)
    torch.testing.assert_close(metrics.acquisition(prediction.samples, "bald"), prediction.mutual_information)


def test_bald_needs_samples():
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        metrics.acquisition(torch.ones(3, 2) / 2, "bald")


def test_acquisition_of_an_unknown_kind():
    with pytest.raises(ValueError, match=r"\bkind\b"):
        metrics.acquisition(torch.ones(3, 2) / 2, "batchbald")
