"""Out-of-distribution detection: by hand, against scikit-learn and brute force, with and without ties."""

import numpy as np
import pytest
import sklearn.metrics
import torch

from pyro_vsd import metrics
from pyro_vsd.prediction import ClassificationPrediction

METRICS = ["fpr_at_95_tpr", "detection_error", "auroc", "aupr_in", "aupr_out"]


def scikit(name, inside, outside):
    """The same number from scikit-learn."""
    scores, positive = np.concatenate([inside, outside]), np.repeat([1, 0], [len(inside), len(outside)])
    if name == "auroc":
        return sklearn.metrics.roc_auc_score(positive, scores)
    if name == "aupr_in":
        return sklearn.metrics.average_precision_score(positive, scores)
    if name == "aupr_out":
        return sklearn.metrics.average_precision_score(1 - positive, -scores)
    fpr, tpr, _ = sklearn.metrics.roc_curve(positive, scores, drop_intermediate=False)
    if name == "fpr_at_95_tpr":
        return fpr[tpr >= 0.95 - 1e-12][0]
    return (0.5 * (1 - tpr) + 0.5 * fpr).min()


CASES = {
    "distinct": lambda: (torch.randn(300) + 1, torch.randn(200)),
    "ties": lambda: ((torch.randn(300) + 1).round(), torch.randn(200).round()),
    "few": lambda: (torch.tensor([0.1, 0.9]), torch.tensor([0.5])),
    "twenty": lambda: (torch.arange(20.0), torch.arange(20.0) - 5.5),
    "float32": lambda: (torch.rand(50, dtype=torch.float32), torch.rand(50)),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("case", CASES)
def test_against_scikit_learn(name, case):
    inside, outside = CASES[case]()
    value = getattr(metrics, name)(inside, outside)
    assert type(value) is float
    assert value == pytest.approx(scikit(name, inside.numpy(), outside.numpy()), rel=1e-12)
    assert getattr(metrics, name)(inside.numpy(), outside.numpy()) == value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fpr_at_95_tpr", 2 / 3),  # all four inside rows need the threshold 2, which accepts 3 and 2 outside
        ("detection_error", 0.5 / 2),  # threshold 4 misses 3 and 2, and accepts nothing outside
        ("auroc", (3 + 3 + 2.5 + 1.5) / 12),
        ("aupr_in", 0.25 * 1 + 0.25 * 1 + 0.25 * 3 / 4 + 0.25 * 4 / 6),
        ("aupr_out", 1 / 3 * 1 + 1 / 3 * 2 / 3 + 1 / 3 * 3 / 5),
    ],
)
def test_by_hand_with_ties(name, expected):
    inside, outside = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([3.0, 2.0, 1.0])
    assert getattr(metrics, name)(inside, outside) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
def test_detection_error_by_brute_force(rounded):
    inside, outside = torch.randn(40) + 1, torch.randn(30)
    if rounded:
        inside, outside = inside.round(), outside.round()
    thresholds = [-9.0, *torch.cat([inside, outside]).tolist(), 9.0]
    errors = [0.5 * (inside <= d).double().mean() + 0.5 * (outside > d).double().mean() for d in thresholds]
    assert metrics.detection_error(inside, outside) == pytest.approx(min(errors).item(), rel=1e-12)


def test_auroc_counts_pairs():
    inside, outside = torch.randn(40).round(), torch.randn(30).round()
    pairs = (inside[:, None] > outside).double() + 0.5 * (inside[:, None] == outside).double()
    assert metrics.auroc(inside, outside) == pytest.approx(pairs.mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "perfect", "reversed_", "constant"),
    [
        ("fpr_at_95_tpr", 0, 1, 1),
        ("detection_error", 0, 0.5, 0.5),
        ("auroc", 1, 0, 0.5),
        ("aupr_in", 1, None, 0.75),
        ("aupr_out", 1, None, 0.25),
    ],
)
def test_limits(name, perfect, reversed_, constant):
    high, low = torch.rand(30) + 1, torch.rand(10)
    metric = getattr(metrics, name)
    assert metric(high, low) == perfect
    if reversed_ is not None:
        assert metric(low, high) == reversed_
    assert metric(torch.zeros(30), torch.zeros(10)) == constant


def test_one_row_each():
    assert metrics.auroc(torch.tensor([1.0]), torch.tensor([0.0])) == 1
    assert metrics.fpr_at_95_tpr(torch.tensor([0.0]), torch.tensor([1.0])) == 1


def test_infinite_scores_are_ranked():
    assert metrics.auroc(torch.tensor([torch.inf, 0.0]), torch.tensor([-torch.inf])) == 1


def test_95_percent_is_counted_in_integers():
    # of 20 rows 19 are 95 %; 0.95 * 20 rounds up in float32
    inside, outside = torch.arange(20.0), torch.tensor([0.5, 1.5])
    assert metrics.fpr_at_95_tpr(inside, outside) == 0.5


@pytest.mark.parametrize("score", ["max_probability", "entropy", "mutual_information"])
def test_ood_gives_all_five(score):
    inside = ClassificationPrediction.from_samples((3 * torch.randn(40, 4) + 0.3 * torch.randn(5, 40, 4)).softmax(-1))
    outside = ClassificationPrediction.from_samples((torch.randn(30, 4) + torch.randn(5, 30, 4)).softmax(-1))
    sign_and_score = {
        "max_probability": lambda p: p.confidence,
        "entropy": lambda p: -p.entropy,
        "mutual_information": lambda p: -p.mutual_information,
    }[score]
    found = metrics.ood(inside, outside, score)
    assert list(found) == METRICS
    for name, value in found.items():
        expected = getattr(metrics, name)(sign_and_score(inside), sign_and_score(outside))
        assert value == pytest.approx(expected, rel=1e-12)
    assert found["auroc"] > 0.6
    assert metrics.ood(inside.samples, outside.samples.numpy(), score) == pytest.approx(found)


def test_roc_curve_against_scikit_learn():
    inside, outside = torch.randn(40).round(), torch.randn(30).round()
    fpr, tpr, _ = sklearn.metrics.roc_curve(
        np.repeat([1, 0], [40, 30]), torch.cat([inside, outside]).numpy(), drop_intermediate=False
    )
    curve = metrics.roc_curve(inside, outside)
    np.testing.assert_allclose(curve.fpr, fpr)
    np.testing.assert_allclose(curve.tpr, tpr)


@pytest.mark.parametrize("name", [*METRICS, "roc_curve"])
@pytest.mark.parametrize(
    ("inside", "outside", "argument"),
    [
        (torch.zeros(0), torch.zeros(3), "inside"),
        (torch.zeros(3), torch.zeros(0), "outside"),
        (torch.zeros(3, 2), torch.zeros(3), "inside"),
        (torch.zeros(3), torch.tensor([1.0, torch.nan]), "outside"),
    ],
)
def test_wrong_arguments(name, inside, outside, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        getattr(metrics, name)(inside, outside)


def test_unknown_score():
    with pytest.raises(ValueError, match=r"\bscore\b"):
        metrics.ood(torch.ones(2, 2) / 2, torch.ones(2, 2) / 2, "energy")


def test_mutual_information_score_needs_samples():
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        metrics.ood_score(torch.ones(2, 2) / 2, "mutual_information")
