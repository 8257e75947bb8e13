"""Predicted classes: entropies, labels, densities, and errors."""

import numpy as np
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
    assert prediction.log_prob(np.array([True, True])).exp().tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(7, 2, dtype=torch.long),
        torch.zeros(6, dtype=torch.long),
        torch.zeros(7),
        torch.full((7,), 3),
        torch.full((7,), -1),
    ],
    ids=["two columns", "too few", "floats", "too large", "negative"],
)
def test_wrong_labels(y):
    with pytest.raises(ValueError, match=r"\by\b"):
        classes().log_prob(y)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ClassificationPrediction(torch.ones(3), torch.ones(3), 1), "probs"),
        (lambda: ClassificationPrediction(torch.ones(3, 2), torch.ones(2), 1), "expected_entropy"),
        (lambda: ClassificationPrediction.from_samples(torch.ones(3, 2)), "samples"),
        (lambda: ClassificationPrediction.from_samples(torch.ones(0, 3, 2)), "samples"),
    ],
)
def test_wrong_arguments(call, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call()


@pytest.mark.parametrize("y", [None, ["a", "b"]])
def test_labels_that_are_no_numbers(y):
    with pytest.raises(TypeError, match=r"\by\b"):
        classes().log_prob(y)
