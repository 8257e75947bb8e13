"""Regression metrics: by hand, against SciPy and NumPy, at their limits, and their errors."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch

from pyro_vsd import metrics
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction, regression

ALL = ["rmse", "log_likelihood", "coverage", "crps", "calibration_error"]
DISTRIBUTIONAL = ["coverage", "crps", "calibration_error"]


def random_case(num_samples=8, *shape):
    shape = shape or (30,)
    prediction = RegressionPrediction.from_samples(
        torch.randn(num_samples, *shape), torch.rand(num_samples, *shape) + 0.2
    )
    return prediction, 1.5 * torch.randn(shape)


def mixture_cdf(prediction, y):
    return scipy.stats.norm.cdf(y, prediction.samples, prediction.scales).mean(0)


def standard(num_rows):
    return RegressionPrediction.from_samples(torch.zeros(1, num_rows), torch.tensor(1.0))


def test_rmse():
    prediction, y = random_case(5, 20, 2)
    expected = math.sqrt(sklearn.metrics.mean_squared_error(y, prediction.mean))
    assert metrics.rmse(prediction, y) == pytest.approx(expected, rel=1e-12)
    assert metrics.rmse(prediction.mean.numpy(), y.numpy()) == pytest.approx(expected, rel=1e-12)
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([1, 5])) == pytest.approx(math.sqrt(4.5))


def test_log_likelihood():
    prediction, y = random_case()
    density = scipy.stats.norm.pdf(y, prediction.samples, prediction.scales).mean(0)
    assert metrics.log_likelihood(prediction, y) == pytest.approx(np.log(density).mean(), rel=1e-12)


def test_log_likelihood_of_any_prediction():
    probs, y = torch.randn(9, 3).softmax(-1), torch.arange(9) % 3
    prediction = ClassificationPrediction(probs, torch.zeros(9), 1)
    assert metrics.log_likelihood(prediction, y) == pytest.approx(-metrics.nll(probs, y), rel=1e-12)
    rate = torch.rand(2, 3) + 1
    counts = Prediction(rate.mean(0), rate.mean(0), 2, components=torch.distributions.Poisson(rate))
    expected = np.log(scipy.stats.poisson.pmf([1, 0, 3], rate).mean(0)).mean()
    assert metrics.log_likelihood(counts, torch.tensor([1.0, 0.0, 3.0])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("shape", [(40,), (20, 2)])
def test_coverage_counts_targets_in_the_interval(level, shape):
    prediction, y = random_case(6, *shape)
    lower, upper = prediction.interval(level)
    expected = ((y >= lower) & (y <= upper)).double().mean().item()
    assert metrics.coverage(prediction, y, level) == pytest.approx(expected)


def test_coverage_by_hand():
    y = torch.tensor([-1.97, -1.95, 0.0, 1.95, 1.97])
    assert metrics.coverage(standard(5), y, 0.95) == 0.6


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 400])  # pairs, and for the last the integral
def test_crps_against_its_integral(num_samples):
    prediction, y = random_case(num_samples, 4)
    expected = []
    for row in range(4):
        loc, scale, target = prediction.samples[:, row].numpy(), prediction.scales[:, row].numpy(), y[row].item()

        def below(t, loc=loc, scale=scale):
            return scipy.stats.norm.cdf(t, loc, scale).mean() ** 2

        def above(t, loc=loc, scale=scale):
            return scipy.stats.norm.sf(t, loc, scale).mean() ** 2

        left, _ = scipy.integrate.quad(below, -20, target, limit=200)
        right, _ = scipy.integrate.quad(above, target, 20, limit=200)
        expected.append(left + right)
    assert metrics.crps(prediction, y) == pytest.approx(np.mean(expected), rel=1e-6)


def test_crps_of_one_normal_in_closed_form():
    y = torch.tensor([-0.7, 0.0, 2.1])
    z, norm = y.numpy(), scipy.stats.norm
    expected = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
    assert metrics.crps(standard(3), y) == pytest.approx(expected.mean(), rel=1e-12)


def test_crps_of_a_certain_prediction_is_the_absolute_error():
    prediction = RegressionPrediction.from_samples(torch.zeros(3, 2), torch.tensor(1e-9))
    assert metrics.crps(prediction, torch.tensor([2.0, -4.0])) == pytest.approx(3.0)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0, 1000.0])
@pytest.mark.parametrize("num_samples", [60, 61, 300])
def test_crps_both_ways_against_all_pairs(num_samples, spread):
    loc, scale = spread * torch.randn(num_samples, 3), torch.rand(num_samples, 3) + 0.5
    y = torch.randn(3)

    def mean_abs(shift, width):
        z = shift / width
        return (2 * width * scipy.stats.norm.pdf(z) + shift * (2 * scipy.stats.norm.cdf(z) - 1)).mean((0, 1))

    pairs = mean_abs((loc[:, None] - loc).numpy(), torch.hypot(scale[:, None], scale[None]).numpy())
    alone = mean_abs((loc[:, None] - y).numpy(), scale[:, None].numpy())
    prediction = RegressionPrediction.from_samples(loc, scale)
    assert metrics.crps(prediction, y) == pytest.approx((alone - 0.5 * pairs).mean(), rel=1e-10)


@pytest.mark.parametrize("block", [1, 17])
def test_crps_in_blocks_equals_all_at_once(block, monkeypatch):
    prediction, y = random_case(5, 10, 2)
    expected = metrics.crps(prediction, y)
    monkeypatch.setattr(regression, "_BLOCK", block)
    assert metrics.crps(prediction, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_levels", [1, 9, 99])
def test_calibration_error_against_numpy(num_levels):
    prediction, y = random_case(5, 60)
    cdf, levels = mixture_cdf(prediction, y), np.arange(1, num_levels + 1) / (num_levels + 1)
    expected = np.mean([abs((cdf <= level).mean() - level) for level in levels])
    assert metrics.calibration_error(prediction, y, num_levels) == pytest.approx(expected, rel=1e-12)


def test_calibration_error_approaches_the_wasserstein_distance():
    prediction, y = random_case(5, 60)
    uniform = (np.arange(100_000) + 0.5) / 100_000
    expected = scipy.stats.wasserstein_distance(mixture_cdf(prediction, y), uniform)
    assert metrics.calibration_error(prediction, y, 9999) == pytest.approx(expected, abs=1e-4)


def test_calibrated_narrow_and_shifted_predictions():
    y = torch.randn(20_000)
    assert metrics.calibration_error(standard(20_000), y) < 0.01
    assert metrics.coverage(standard(20_000), y) == pytest.approx(0.95, abs=0.01)
    narrow = RegressionPrediction.from_samples(torch.zeros(1, 20_000), torch.tensor(0.3))
    assert metrics.calibration_error(narrow, y) > 0.1
    assert metrics.coverage(narrow, y) < 0.5
    assert metrics.calibration_error(standard(20_000), y + 9) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ALL)
def test_returns_a_float_in_single_precision(name):
    prediction, y = random_case()
    value = getattr(metrics, name)(prediction.to(torch.float32), y)
    assert type(value) is float
    assert value == pytest.approx(getattr(metrics, name)(prediction, y), rel=1e-4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("num_rows", "y", "argument"),
    [
        (3, torch.zeros(3, 2), "y"),
        (3, torch.zeros(4), "y"),
        (3, torch.tensor([0, torch.nan, 1]), "y"),
        (0, torch.zeros(0), "prediction"),
    ],
)
def test_wrong_arguments(name, num_rows, y, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        getattr(metrics, name)(standard(num_rows), y)


@pytest.mark.parametrize("name", ALL)
def test_a_prediction_that_is_not_finite(name):
    prediction = RegressionPrediction.from_samples(torch.full((1, 2), torch.nan), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        getattr(metrics, name)(prediction, torch.zeros(2))


@pytest.mark.parametrize("name", DISTRIBUTIONAL)
def test_needs_samples(name):
    prediction = RegressionPrediction(torch.zeros(3), torch.ones(3), torch.ones(3), 5)
    with pytest.raises(ValueError, match=rf"\b{name}\b.*\bkeep_samples\b"):
        getattr(metrics, name)(prediction, torch.zeros(3))


@pytest.mark.parametrize("name", DISTRIBUTIONAL)
def test_other_predictions_raise(name):
    with pytest.raises(TypeError, match=rf"\b{name}\b.*\bprediction\b"):
        getattr(metrics, name)(Prediction(torch.zeros(3), torch.ones(3), 1), torch.zeros(3))


def test_log_likelihood_of_an_array():
    with pytest.raises(TypeError, match=r"\bprediction\b"):
        metrics.log_likelihood(torch.ones(3, 2) / 2, torch.zeros(3))


@pytest.mark.parametrize("level", [0, 1, 95])
def test_coverage_at_a_wrong_level(level):
    with pytest.raises(ValueError, match=r"\blevel\b"):
        metrics.coverage(standard(2), torch.zeros(2), level)


def test_calibration_error_without_levels():
    with pytest.raises(ValueError, match=r"\bnum_levels\b"):
        metrics.calibration_error(standard(2), torch.zeros(2), 0)
