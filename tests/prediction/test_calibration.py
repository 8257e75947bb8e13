"""Temperature and scale, on predictions and on the distributions behind them."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, Normal, OneHotCategorical, Poisson

import pyro_vsd as vsd
from pyro_vsd.prediction import Prediction

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.1, 0.0]])


def test_temperature_divides_the_logits_of_each_sample():
    samples = torch.randn(4, 5, 3)
    found = vsd.Calibration(temperature=1.7).apply(vsd.ClassificationPrediction.from_samples(samples.softmax(-1)))
    torch.testing.assert_close(found.samples, (samples / 1.7).softmax(-1))
    torch.testing.assert_close(found.probs, found.samples.mean(0))


def test_scale_multiplies_sigma_and_leaves_the_mean():
    prediction = vsd.RegressionPrediction.from_samples(torch.randn(4, 5), torch.rand(4, 5) + 0.1)
    found = vsd.Calibration(scale=2.0).apply(prediction)
    torch.testing.assert_close(found.mean, prediction.mean)
    torch.testing.assert_close(found.epistemic, prediction.epistemic)
    torch.testing.assert_close(found.aleatoric, 4 * prediction.aleatoric)


@pytest.mark.parametrize("kind", [Categorical, OneHotCategorical, Bernoulli])
def test_temperature_of_a_distribution(kind):
    found = vsd.Calibration(temperature=2.0).distribution(kind(logits=LOGITS))
    assert isinstance(found, kind)
    torch.testing.assert_close(found.probs, kind(logits=LOGITS / 2).probs)


def test_scale_of_independent_normals():
    found = vsd.Calibration(scale=3.0).distribution(Independent(Normal(torch.zeros(4, 2), 0.5), 1))
    assert found.event_shape == (2,)
    torch.testing.assert_close(found.stddev, torch.full((4, 2), 1.5))


def test_without_factors_nothing_changes():
    poisson = Poisson(torch.ones(2))
    assert vsd.Calibration(noise=3.0).distribution(poisson) is poisson


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("noise", lambda: vsd.Calibration(noise=-1.0)),
        ("temperature", lambda: vsd.Calibration(temperature=0.0)),
        ("scale", lambda: vsd.Calibration(scale=float("nan"))),
        ("scale", lambda: vsd.Calibration(scale=2.0).distribution(Categorical(logits=LOGITS))),
        ("temperature", lambda: vsd.Calibration(temperature=2.0).distribution(Normal(0.0, 1.0))),
        ("scale", lambda: vsd.Calibration(scale=2.0).apply(Prediction(torch.zeros(3), torch.ones(3), 1))),
        ("samples", lambda: vsd.Calibration(temperature=2.0).apply(without_samples())),
    ],
)
def test_what_does_not_go_together_raises(name, call):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call()


def without_samples():
    return vsd.ClassificationPrediction(torch.full((2, 2), 0.5), torch.ones(2), 1)


def test_plain_types_make_it_again():
    calibration = vsd.Calibration(0.5, 1.2, scores={"before": -1.0, "after": -0.9}, num_rows=40)
    assert vsd.Calibration(**calibration.to_plain()) == calibration
    assert "temperature=1.2" in repr(calibration)


def test_a_calibration_does_not_change():
    calibration = vsd.Calibration(temperature=2.0)
    with pytest.raises(AttributeError):
        calibration.temperature = 1.0


def test_weights_of_samples_stay():
    """A mixture, such as an ensemble's prediction."""
    probs, weights = torch.rand(3, 5, 2).softmax(-1), torch.tensor([0.5, 0.3, 0.2])
    classes = vsd.Calibration(temperature=2.0).apply(vsd.ClassificationPrediction.from_samples(probs, weights))
    torch.testing.assert_close(classes.probs, (weights.reshape(-1, 1, 1) * (probs.log() / 2).softmax(-1)).sum(0))
    mixture = vsd.RegressionPrediction.from_samples(torch.randn(3, 5), torch.ones(3, 5), weights)
    wider = vsd.Calibration(scale=2.0).apply(mixture)
    torch.testing.assert_close(wider.mean, mixture.mean)
    torch.testing.assert_close(wider.aleatoric, 4 * mixture.aleatoric)
