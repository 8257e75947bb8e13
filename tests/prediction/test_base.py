"""Predictions of any kind: copies, moves, densities, and errors."""

import copy
import pickle

import pytest
import scipy.stats
import torch
from torch.distributions import AffineTransform, Gamma, Independent, Normal, TransformedDistribution

from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from tests.prediction.kinds import classes, gaussians, poisson

EVERY_KIND = {
    "generic": lambda: poisson()[0],
    "classification": classes,
    "regression": lambda: gaussians(5, 7),
    "regression, 2 outputs": lambda: gaussians(5, 7, 2),
}


@pytest.fixture(params=EVERY_KIND)
def kind(request):
    return EVERY_KIND[request.param]()


def test_length_and_stddev(kind):
    assert len(kind) == len(kind.mean)
    torch.testing.assert_close(kind.stddev**2, kind.variance)
    assert kind.samples.shape == (kind.num_samples, *kind.mean.shape)


def test_moves_to_a_different_dtype_and_leaves_the_first_alone(kind):
    moved = kind.to(torch.float32)
    assert type(moved) is type(kind)
    assert {moved.mean.dtype, moved.variance.dtype, moved.samples.dtype} == {torch.float32}
    assert {kind.mean.dtype, kind.samples.dtype} == {torch.float64}
    y = kind.labels if isinstance(kind, ClassificationPrediction) else kind.mean.round()
    torch.testing.assert_close(moved.log_prob(y).double(), kind.log_prob(y), rtol=1e-4, atol=1e-4)


def test_moves_to_a_device(kind):
    assert kind.to("cpu").mean.device.type == "cpu"
    assert kind.to(torch.device("cpu")).num_samples == kind.num_samples


def test_an_integer_dtype_raises(kind):
    with pytest.raises(ValueError, match=r"\btarget\b"):
        kind.to(torch.int64)


def test_copies_and_pickles(kind):
    for twin in (copy.deepcopy(kind), pickle.loads(pickle.dumps(kind))):
        torch.testing.assert_close(twin.mean, kind.mean)
        assert repr(twin) == repr(kind)


def test_is_detached():
    samples = torch.randn(2, 3, 4, requires_grad=True).softmax(-1)
    one = ClassificationPrediction.from_samples(samples)
    two = RegressionPrediction.from_samples(samples[..., 0], torch.ones((), requires_grad=True))
    three = Prediction(samples[0], samples[1], 1)
    tensors = [one.probs, one.samples, one.expected_entropy, two.mean, two.scales, two.log_prob(torch.zeros(3))]
    assert not any(tensor.requires_grad for tensor in [*tensors, three.mean, three.variance])


def test_repr_says_what_is_there():
    assert repr(classes()) == "ClassificationPrediction(mean=(7, 3), num_samples=5, samples kept)"
    bare = Prediction(torch.zeros(2), torch.ones(2), 9)
    assert repr(bare) == "Prediction(mean=(2,), num_samples=9, samples not kept)"


def test_generic_log_prob_is_the_log_of_the_mean():
    prediction, rate = poisson()
    y = torch.tensor([0.0, 1.0, 2.0, 5.0])
    expected = torch.tensor(scipy.stats.poisson.pmf(y, rate)).mean(0).log()
    torch.testing.assert_close(prediction.log_prob(y), expected)
    torch.testing.assert_close(prediction.log_prob(y.numpy()), expected)


def test_generic_with_an_event_shape():
    loc = torch.randn(3, 4, 2)
    components = Independent(Normal(loc, 1.0), 1)
    prediction = Prediction(loc.mean(0), 1 + loc.var(0, correction=0), 3, components=components)
    twin = RegressionPrediction.from_samples(loc, torch.tensor(1.0))
    y = torch.randn(4, 2)
    torch.testing.assert_close(prediction.log_prob(y), twin.log_prob(y))
    with pytest.raises(ValueError, match=r"\by\b"):
        prediction.log_prob(y[:, 0])


def test_moves_transformed_components():
    base = Gamma(torch.ones(2, 3), torch.ones(2, 3))
    components = TransformedDistribution(base, [AffineTransform(torch.zeros(()), torch.ones(()))])
    moved = Prediction(torch.ones(3), torch.ones(3), 2, components=components).to(torch.float32)
    assert moved.components.transforms[0].loc.dtype == torch.float32
    assert moved.log_prob(torch.ones(3, dtype=torch.float32)).dtype == torch.float32
    assert components.transforms[0].loc.dtype == torch.float64


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_samples": 0},
        {"mean": torch.tensor(0.0)},
        {"variance": torch.ones(4)},
        {"samples": torch.ones(3, 3)},
        {"components": Normal(torch.zeros(2, 3, 1), 1.0)},
    ],
)
def test_wrong_arguments(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        Prediction(**{"mean": torch.zeros(3), "variance": torch.ones(3), "num_samples": 2, **arguments})


def test_generic_log_prob_needs_components():
    with pytest.raises(ValueError, match=r"\blog_prob\b.*\bkeep_samples\b"):
        Prediction(torch.zeros(3), torch.ones(3), 1).log_prob(torch.zeros(3))
