"""Likelihoods of classes against torch's losses, and the checks of labels."""

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn

from pyro_vsd.nn import BinaryClassifier, Classifier, bayesianize, mlp


def observed(model, x, y):
    """The observed site, and the network's output under the same draw."""
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    values = {name: trace.nodes[name]["value"] for name in model.latent_sites()}
    with model._pyro_context:
        output = poutine.condition(model.net, values)(x)
    return trace.nodes["y"], output


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_classifier_is_cross_entropy(dtype):
    model = Classifier(bayesianize(mlp([4, 5, 3])), 20)
    y = torch.tensor([0, 2, 1, 1, 0])
    site, logits = observed(model, torch.randn(5, 4), y.to(dtype))
    torch.testing.assert_close(site["log_prob"] / 4, -F.cross_entropy(logits, y, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float32])
@pytest.mark.parametrize("squeezed", [False, True])
def test_binary_classifier_is_binary_cross_entropy(dtype, squeezed):
    net = mlp([4, 5, 1])
    if squeezed:
        net = nn.Sequential(net, nn.Flatten(0))
    model = BinaryClassifier(bayesianize(net), 20)
    y = torch.tensor([0, 1, 1, 0, 0])
    site, logits = observed(model, torch.randn(5, 4), y.to(dtype))
    expected = F.binary_cross_entropy_with_logits(logits.flatten(), y.double(), reduction="none")
    torch.testing.assert_close(site["log_prob"] / 4, -expected)


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(5),
        torch.zeros(5, dtype=torch.bool),
        torch.zeros(5, 2, dtype=torch.long),
        torch.zeros(5, 3),
        torch.zeros(4, dtype=torch.long),
        torch.tensor([0, 1, 2, 3, 0]),
        torch.tensor([0, 1, 2, -1, 0]),
    ],
)
def test_bad_labels(y):
    with pytest.raises(ValueError, match=r"\by\b"):
        Classifier(bayesianize(mlp([4, 5, 3])), 20)(torch.randn(5, 4), y)


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(5, 2),
        torch.zeros(4),
        torch.tensor([0, 1, 2, 1, 0]),
        torch.tensor([-1.0, 1, -1, 1, 1]),
    ],
)
def test_bad_binary_labels(y):
    with pytest.raises(ValueError, match=r"\by\b"):
        BinaryClassifier(bayesianize(mlp([4, 5, 1])), 20)(torch.randn(5, 4), y)


def test_values_are_not_looked_at_without_validation():
    """Their look would wait for the device in each step."""
    with pyro.validation_enabled(False):
        model = BinaryClassifier(bayesianize(mlp([4, 5, 1])), 20)
        model(torch.randn(5, 4), torch.full((5,), 2.0))


def test_one_output_is_for_the_binary_classifier():
    with pytest.raises(ValueError, match=r"\bBinaryClassifier\b"):
        Classifier(bayesianize(mlp([4, 5, 1])), 20)(torch.randn(5, 4))


def test_several_outputs_are_for_the_classifier():
    with pytest.raises(ValueError, match=r"\bClassifier\b"):
        BinaryClassifier(bayesianize(mlp([4, 5, 3])), 20)(torch.randn(5, 4), torch.zeros(5))
