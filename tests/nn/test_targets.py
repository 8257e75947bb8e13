"""What networks return and what targets look like: tokens, several labels, weights, output objects, probabilities."""

from types import SimpleNamespace

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.nn import BinaryClassifier, Classifier, Regressor, bayesianize, mlp

B, L, C, N = 6, 5, 3, 30


class Function(nn.Module):
    """A network of two inputs, whose output is that of a function of the two products."""

    def __init__(self, make, outputs=C):
        super().__init__()
        self.first, self.second, self.make = nn.Linear(4, outputs), nn.Linear(4, outputs), make

    def forward(self, left, right=None):
        return self.make(self.first(left) + self.second(left if right is None else right))


def without_noise(model):
    """A guide whose draws are the means of the weights."""
    return vsd.VSDGuide(model, init_alpha=1e-30)


def log_likelihood(model, *args):
    elbo = vsd.VSD_ELBO()
    elbo.loss(model, without_noise(model), *args)
    return elbo.terms["log_likelihood"]


@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: {"left": x, "right": y}], ids=["tuple", "dict"])
def test_several_inputs(make):
    net = Function(lambda h: h)
    x, z, y = torch.randn(B, 4), torch.randn(B, 4), torch.arange(B) % C
    expected = -F.cross_entropy(net(x, z), y, reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(Classifier(bayesianize(net), N), make(x, z), y), expected)


def test_inputs_that_are_not_packed_say_so():
    model = Classifier(bayesianize(Function(lambda h: h)), N)
    with pytest.raises(ValueError, match=r"\by\b"):
        model(torch.randn(B, 4), torch.randn(B, 4))


def test_an_output_object_has_logits():
    net, x, y = Function(lambda h: SimpleNamespace(loss=None, logits=h)), torch.randn(B, 4), torch.arange(B) % C
    expected = -F.cross_entropy(net(x).logits, y, reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(Classifier(bayesianize(net), N), x, y), expected)
    with pytest.raises(TypeError, match=r"\bnet\b"):
        Classifier(bayesianize(Function(lambda h: {"scores": h})), N)(x)


# ---- tokens


def test_tokens():
    """One class for each position; those of -100 count nothing, as in torch's cross entropy."""
    net, x = nn.Linear(4, C), torch.randn(B, L, 4)
    y = torch.randint(C, (B, L))
    y[0, 2:], y[1] = -100, -100
    model = Classifier(bayesianize(net), N)
    expected = -F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(model, x, y), expected)
    assert model(x).shape == (B, L)


def test_tokens_with_vectorised_particles():
    model, x, y = Classifier(bayesianize(nn.Linear(4, C)), N), torch.randn(B, L, 4), torch.randint(C, (B, L))
    values = []
    for vectorized in (False, True):
        elbo = vsd.VSD_ELBO(4, vectorized, 1)
        elbo.loss(model, without_noise(model), x, y)
        values.append(elbo.terms["log_likelihood"])
    torch.testing.assert_close(*values)


def test_predictions_of_tokens():
    model, x, y = Classifier(bayesianize(nn.Linear(4, C)), N), torch.randn(B, L, 4), torch.randint(C, (B, L))
    y[0] = -100
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=20, seed=0)
    assert isinstance(prediction, vsd.ClassificationPrediction)
    assert prediction.labels.shape == prediction.entropy.shape == (B, L)
    # all tokens of a row are drawn together
    each = torch.distributions.Categorical(probs=prediction.samples[:, 1:]).log_prob(y[1:]).sum(-1)
    torch.testing.assert_close(prediction.log_prob(y)[1:], each.logsumexp(0) - torch.tensor(20.0).log())
    assert prediction.log_prob(y)[0] == 0
    # metrics count tokens
    expected = -prediction.probs[1:].gather(-1, y[1:].unsqueeze(-1)).log().mean()
    assert vsd.metrics.nll(prediction, y) == pytest.approx(float(expected))
    report = vsd.metrics.report(prediction, y)
    assert report.num_rows == (B - 1) * L
    assert report["nll"] == pytest.approx(float(expected))


def test_one_class_a_row_needs_one_output_a_row():
    model = Classifier(bayesianize(nn.Linear(4, C)), N)
    with pytest.raises(ValueError, match=rf"\by\b.*\({B}, {L}\)"):
        model(torch.randn(B, L, 4), torch.zeros(B, dtype=torch.long))


# ---- several labels


@pytest.mark.parametrize("dtype", [torch.long, torch.float64, torch.bool])
def test_several_labels(dtype):
    net, x, y = mlp([4, L]), torch.randn(B, 4), torch.randint(2, (B, L))
    model = BinaryClassifier(bayesianize(net), N)
    expected = -F.binary_cross_entropy_with_logits(net(x), y.double(), reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(model, x, y.to(dtype)), expected)
    prediction = vsd.predict(model, without_noise(model), x, num_samples=3)
    torch.testing.assert_close(prediction.probs[..., 1], net(x).sigmoid().detach())
    assert vsd.metrics.accuracy(prediction, y.to(dtype)) == float(((net(x) > 0) == y.bool()).double().mean())


# ---- weights


@pytest.mark.parametrize("make", [lambda net: Classifier(net, N), lambda net: Regressor(net, N)])
def test_weights_of_rows(make):
    """A weight of 2 is the row twice, of 0 no row; the scale stays N/B, so that N is the sum of the weights."""
    net, x = mlp([4, C]), torch.randn(B, 4)
    model = make(bayesianize(net))
    y = torch.arange(B) % C if isinstance(model, Classifier) else torch.randn(B, C)
    weight = torch.tensor([2, 0, 1, 1, 0, 2])
    rows = torch.tensor([0, 0, 2, 3, 5, 5])
    torch.testing.assert_close(log_likelihood(model, x, y, weight), log_likelihood(model, x[rows], y[rows]))
    with pytest.raises(ValueError, match=r"\bweight\b"):
        model(x, y, torch.ones(B - 1))


def test_weights_of_classes():
    net, x, y, weights = mlp([4, C]), torch.randn(B, 4), torch.arange(B) % C, torch.tensor([1.0, 2.0, 0.5])
    model = Classifier(bayesianize(net), N, class_weights=weights)
    expected = -F.cross_entropy(net(x), y, weight=weights, reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(model, x, y), expected)
    tokens = Classifier(bayesianize(nn.Linear(4, C)), N, class_weights=weights, ignore_index=1)
    x, y = torch.randn(B, L, 4), torch.randint(C, (B, L))
    logits = tokens.net.network(x).flatten(0, 1)
    expected = -F.cross_entropy(logits, y.flatten(), weight=weights, ignore_index=1, reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(tokens, x, y), expected)


def test_rows_that_count_nothing():
    net, x, y = mlp([4, C]), torch.randn(B, 4), torch.tensor([0, 1, 9, 2, 9, 0])
    expected = -F.cross_entropy(net(x), y, ignore_index=9, reduction="sum") * N / B
    torch.testing.assert_close(log_likelihood(Classifier(bayesianize(net), N, ignore_index=9), x, y), expected)


@pytest.mark.parametrize("weights", [[1.0, -1.0, 1.0], torch.ones(2, 2), [1.0, 1.0]])
def test_bad_weights_of_classes(weights):
    with pytest.raises(ValueError, match=r"\bclass_weights\b"):
        Classifier(bayesianize(mlp([4, C])), N, class_weights=weights)(torch.randn(B, 4), torch.zeros(B).long())


# ---- probabilities


@pytest.mark.parametrize(
    ("make", "end", "y"),
    [
        (lambda net: Classifier(net, N), nn.Softmax(-1), torch.zeros(B, dtype=torch.long)),
        (lambda net: BinaryClassifier(net, N), nn.Sigmoid(), torch.zeros(B, C)),
    ],
)
def test_outputs_that_are_probabilities(make, end, y):
    model = make(bayesianize(nn.Sequential(mlp([4, C]), end)))
    with pytest.warns(UserWarning, match=r"\bnet\b.*probabilities"):
        model(torch.randn(B, 4), y)
    model(torch.randn(B, 4), y)  # once
    make(bayesianize(mlp([4, C])))(torch.randn(B, 4), y)  # no false alarm
    Classifier(bayesianize(nn.Sequential(mlp([4, C]), nn.LogSoftmax(-1))), N)(torch.randn(B, 4), torch.zeros(B).long())


def test_probabilities_are_not_looked_for_without_validation():
    model = Classifier(bayesianize(nn.Sequential(mlp([4, C]), nn.Softmax(-1))), N)
    with pyro.validation_enabled(False):
        model(torch.randn(B, 4), torch.zeros(B, dtype=torch.long))
