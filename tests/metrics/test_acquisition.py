"""Acquisition scores rank what they should."""

import pytest
import torch

from pyro_vsd import metrics
from pyro_vsd.prediction import ClassificationPrediction


def three_kinds_of_rows():
    """A sure row; one that all samples find ambiguous; one that they dispute."""
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    second = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.2, 0.8]])
    return torch.stack([first, second])


@pytest.mark.parametrize(("kind", "best"), [("entropy", 1), ("variation_ratio", 1), ("bald", 2)])
def test_ranking(kind, best):
    scores = metrics.acquisition(three_kinds_of_rows(), kind)
    assert scores.shape == (3,)
    assert scores.argmax() == best
    assert scores[0] == 0


def test_values():
    prediction = ClassificationPrediction.from_samples(torch.randn(5, 9, 3).softmax(-1))
    torch.testing.assert_close(metrics.acquisition(prediction, "entropy"), prediction.entropy)
    torch.testing.assert_close(metrics.acquisition(prediction, "bald"), prediction.mutual_information)
    torch.testing.assert_close(metrics.acquisition(prediction, "variation_ratio"), 1 - prediction.confidence)
    torch.testing.assert_close(metrics.acquisition(prediction.samples, "bald"), prediction.mutual_information)


def test_zero_probabilities_give_no_nan():
    assert not metrics.acquisition(torch.eye(3).expand(4, 3, 3), "bald").isnan().any()


def test_bald_needs_samples():
    with pytest.raises(ValueError, match=r"expected samples for mutual_information, got mean probabilities"):
        metrics.acquisition(torch.ones(3, 2) / 2, "bald")


def test_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="expected kind 'entropy', 'bald' or 'variation_ratio', got 'batchbald'"):
        metrics.acquisition(torch.ones(3, 2) / 2, "batchbald")
