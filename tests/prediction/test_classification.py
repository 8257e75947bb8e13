"""Predicted classes: entropies, labels, and refusal of what does not fit."""

import numpy
import pytest
import scipy.stats
import torch

from pyro_vsd.prediction import ClassificationPrediction
from tests.prediction.kinds import classes


def test_entropies_of_samples():
    prediction = classes()
    mean = prediction.samples.mean(0)
    entropy = torch.tensor(scipy.stats.entropy(mean, axis=-1))
    expected = torch.tensor(scipy.stats.entropy(prediction.samples, axis=-1)).mean(0)
    torch.testing.assert_close(prediction.probs, mean)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.expected_entropy, expected)
    torch.testing.assert_close(prediction.mutual_information, entropy - expected)
    torch.testing.assert_close(prediction.variance, mean * (1 - mean))


def test_one_sample_has_no_mutual_information():
    assert (classes(num_samples=1).mutual_information == 0).all()


def test_mutual_information_is_never_negative():
    prediction = ClassificationPrediction(torch.tensor([[0.5, 0.5]]), torch.tensor([0.7]), 10)
    assert prediction.mutual_information.tolist() == [0.0]


def test_labels_take_the_first_of_equals():
    prediction = ClassificationPrediction(torch.tensor([[0.4, 0.4, 0.2]]), torch.zeros(1), 1)
    assert prediction.labels.tolist() == [0]
    assert prediction.confidence.tolist() == [0.4]


def test_class_log_prob_needs_no_samples():
    prediction = ClassificationPrediction(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.zeros(2), 4)
    assert prediction.samples is None
    assert prediction.log_prob(torch.tensor([1, 0])).exp().tolist() == [0.5, 0.0]
    assert prediction.log_prob(numpy.array([True, True])).exp().tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (torch.zeros(7, 1, dtype=torch.long), r"expected y of shape \(7,\), got \(7, 1\). Use y.squeeze\(-1\)"),
        (torch.zeros(6, dtype=torch.long), r"expected y of shape \(7,\), got \(6,\)"),
        (torch.zeros(7), r"expected integer labels y, got torch.float64. Use y.long\(\)"),
        (torch.full((7,), 3), "expected labels y between 0 and 2, got 3 to 3"),
        (torch.full((7,), -1), "expected labels y between 0 and 2, got -1 to -1"),
    ],
)
def test_class_log_prob_refuses(y, match):
    with pytest.raises(ValueError, match=match):
        classes().log_prob(y)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ClassificationPrediction(torch.ones(3), torch.ones(3), 1), r"expected probs of shape \(N, C\), got"),
        (lambda: ClassificationPrediction(torch.ones(3, 2), torch.ones(2), 1), r"expected_entropy of shape \(3,\)"),
        (lambda: ClassificationPrediction.from_samples(torch.ones(3, 2)), r"expected samples of shape \(S, N, C\)"),
        (lambda: ClassificationPrediction.from_samples(torch.ones(0, 3, 2)), "S of at least 1, got"),
    ],
)
def test_classification_refuses(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("y", [None, ["a", "b"], object()])
def test_what_is_no_number_is_refused(y):
    with pytest.raises(TypeError, match="expected a tensor or an array of numbers, got"):
        classes().log_prob(y)
