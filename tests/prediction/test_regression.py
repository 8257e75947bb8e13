"""Predicted regression targets: moments, densities, quantiles, other units, and errors."""

import numpy as np
import pytest
import scipy.stats
import torch

from pyro_vsd.prediction import RegressionPrediction, regression
from tests.prediction.kinds import gaussians


def mixture_cdf(prediction, y):
    return scipy.stats.norm.cdf(y, prediction.samples, prediction.scales).mean(0)


@pytest.mark.parametrize("shape", [(6, 9), (6, 9, 2), (1, 3)])
def test_variances_add_up(shape):
    prediction = gaussians(*shape)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.variance)
    torch.testing.assert_close(prediction.epistemic, prediction.samples.var(0, correction=0))
    second_moment = (prediction.scales**2 + prediction.samples**2).mean(0)
    torch.testing.assert_close(prediction.variance, second_moment - prediction.mean**2)


def test_one_sample_has_no_epistemic_variance():
    assert (gaussians(1, 5).epistemic == 0).all()


@pytest.mark.parametrize("scales", [torch.tensor(0.3), torch.full((4, 1), 0.3), torch.full((5,), 0.3)])
def test_scales_broadcast(scales):
    samples = torch.randn(4, 5)
    prediction = RegressionPrediction.from_samples(samples, scales)
    torch.testing.assert_close(prediction.aleatoric, torch.full((5,), 0.09))
    assert prediction.scales.shape == (4, 5)


@pytest.mark.parametrize("block", [1, 20, 2**22])
def test_joint_density_over_outputs(block, monkeypatch):
    monkeypatch.setattr(regression, "_BLOCK", block)
    prediction, y = gaussians(6, 9, 2), torch.randn(9, 2)
    density = scipy.stats.norm.pdf(y, prediction.samples, prediction.scales).prod(-1).mean(0)
    torch.testing.assert_close(prediction.log_prob(y), torch.tensor(density).log())


def test_log_prob_far_away_is_finite():
    prediction = gaussians(3, 2)
    assert prediction.log_prob(torch.full((2,), 1e6)).isfinite().all()


@pytest.mark.parametrize("block", [1, 20, 2**22])
def test_cdf(block, monkeypatch):
    monkeypatch.setattr(regression, "_BLOCK", block)
    prediction, y = gaussians(6, 9, 2), torch.randn(9, 2)
    torch.testing.assert_close(prediction.cdf(y), torch.tensor(mixture_cdf(prediction, y)))


@pytest.mark.parametrize("level", [1e-9, 0.025, 0.3, 0.5, 0.9, 1 - 1e-6])
@pytest.mark.parametrize("shape", [(1, 4), (50, 20), (8, 5, 3)])
def test_quantile_inverts_the_cdf(shape, level):
    prediction = gaussians(*shape)
    assert abs(mixture_cdf(prediction, prediction.quantile(level)) - level).max() < 1e-13


@pytest.mark.parametrize("level", [0.025, 0.25, 0.5, 0.75, 0.975])
def test_quantile_of_far_apart_narrow_modes(level):
    samples = torch.tensor([[-1000.0], [0.0], [1.0], [1000.0]])
    prediction = RegressionPrediction.from_samples(samples, torch.tensor([[1e-4], [1e-3], [1.0], [50.0]]))
    assert abs(mixture_cdf(prediction, prediction.quantile(level)) - level).max() < 1e-10


def test_quantile_of_a_single_normal_is_exact():
    prediction = RegressionPrediction.from_samples(torch.tensor([[3.0]]), torch.tensor(2.0))
    torch.testing.assert_close(prediction.quantile(0.975), torch.tensor([scipy.stats.norm.ppf(0.975, 3, 2)]))


def test_quantile_far_in_the_upper_tail_is_as_exact_as_in_the_lower():
    prediction = gaussians(6, 9)
    mirrored = RegressionPrediction.from_samples(-prediction.samples, prediction.scales)
    upper, lower = prediction.quantile(1 - 2.0**-40), mirrored.quantile(2.0**-40)
    torch.testing.assert_close(upper, -lower, rtol=1e-12, atol=0)


def test_quantile_shapes():
    prediction = gaussians(3, 4, 2)
    assert prediction.quantile(0.5).shape == (4, 2)
    assert prediction.quantile([0.1, 0.5, 0.9]).shape == (3, 4, 2)
    assert prediction.quantile(torch.tensor([0.1])).shape == (1, 4, 2)
    assert (prediction.quantile([0.1, 0.5, 0.9]).diff(dim=0) > 0).all()


@pytest.mark.parametrize("block", [1, 20])
def test_quantile_in_blocks_equals_all_at_once(block, monkeypatch):
    prediction = gaussians(6, 9)
    expected = prediction.quantile([0.1, 0.7])
    monkeypatch.setattr(regression, "_BLOCK", block)
    torch.testing.assert_close(prediction.quantile([0.1, 0.7]), expected, rtol=1e-12, atol=1e-12)


def test_quantile_in_float32():
    prediction = gaussians(6, 9)
    single = prediction.to(torch.float32).quantile(0.3)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), prediction.quantile(0.3), rtol=1e-5, atol=1e-5)


def test_interval_holds_its_level():
    prediction = gaussians(20, 5)
    lower, upper = prediction.interval(0.8)
    inside = mixture_cdf(prediction, upper) - mixture_cdf(prediction, lower)
    torch.testing.assert_close(torch.tensor(inside), torch.full((5,), 0.8))


@pytest.mark.parametrize("method", ["log_prob", "cdf", "quantile", "interval"])
def test_what_needs_samples_says_so(method):
    prediction = RegressionPrediction(torch.zeros(3), torch.ones(3), torch.ones(3), 8)
    argument = torch.zeros(3) if method in ("log_prob", "cdf") else 0.5
    with pytest.raises(ValueError, match=r"\b(log_prob|cdf|quantile)\b.*\bkeep_samples\b"):
        getattr(prediction, method)(argument)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, [0.5, 1.5], [[0.5]]])
def test_wrong_levels_of_quantiles(q):
    with pytest.raises(ValueError, match=r"\bq\b"):
        gaussians(2, 3).quantile(q)


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_wrong_level_of_an_interval(level):
    with pytest.raises(ValueError, match=r"\blevel\b"):
        gaussians(2, 3).interval(level)


@pytest.mark.parametrize(
    ("mean", "y", "remedy"),
    [((4, 1), (4,), "y.unsqueeze"), ((4,), (3,), "y"), ((4,), (4, 2), "y")],
)
def test_targets_of_a_wrong_shape_get_a_remedy(mean, y, remedy):
    with pytest.raises(ValueError, match=rf"\b{remedy}\b"):
        gaussians(2, *mean).log_prob(torch.zeros(y))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: RegressionPrediction.from_samples(torch.zeros(3), torch.ones(3)), "samples"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(0, 3), torch.ones(())), "samples"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.ones(2)), "scales"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.zeros(())), "scales"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.tensor(torch.nan)), "scales"),
        (lambda: RegressionPrediction(*[torch.zeros(2, 2, 2)] * 3, 1), "mean"),
        (
            lambda: RegressionPrediction(*[torch.zeros(2)] * 3, 1, samples=torch.zeros(1, 2)),
            "scales",
        ),
    ],
)
def test_wrong_arguments(call, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call()


def test_empty_predictions_are_allowed():
    empty = RegressionPrediction.from_samples(torch.zeros(2, 0), torch.tensor(1.0))
    assert len(empty) == 0
    assert empty.log_prob(torch.zeros(0)).shape == empty.quantile(0.5).shape == (0,)


# other units

SCALE, SHIFT = torch.tensor([3.0, 0.25]), torch.tensor([-7.0, 100.0])
UNITS = [((6, 9), 3.0, -7.0), ((6, 9, 2), 3.0, -7.0), ((6, 9, 2), SCALE, SHIFT), ((6, 9, 2), SCALE.unsqueeze(0), 1.0)]


@pytest.mark.parametrize(("shape", "scale", "shift"), UNITS)
def test_rescaled_is_the_prediction_of_rescaled_samples(shape, scale, shift):
    prediction = gaussians(*shape)
    found = prediction.rescaled(scale, shift)
    twin = RegressionPrediction.from_samples(scale * prediction.samples + shift, scale * prediction.scales)
    for name in ("mean", "variance", "stddev", "aleatoric", "epistemic", "samples", "scales"):
        torch.testing.assert_close(getattr(found, name), getattr(twin, name))
    assert type(found) is RegressionPrediction
    assert found.num_samples == prediction.num_samples


@pytest.mark.parametrize(("shape", "scale", "shift"), UNITS)
def test_rescaled_changes_the_density_by_the_scale(shape, scale, shift):
    prediction, y = gaussians(*shape), torch.randn(shape[1:])
    jacobian = (torch.as_tensor(scale) * torch.ones(shape[2:])).log().sum()
    found = prediction.rescaled(scale, shift).log_prob(scale * y + shift)
    torch.testing.assert_close(found, prediction.log_prob(y) - jacobian)


@pytest.mark.parametrize("level", [0.025, 0.5, 0.9])
def test_rescaled_moves_quantiles_with_the_targets(level):
    prediction = gaussians(6, 9, 2)
    found = prediction.rescaled(SCALE, SHIFT).quantile(level)
    torch.testing.assert_close(found, SCALE * prediction.quantile(level) + SHIFT)


def test_rescaled_there_and_back():
    prediction = gaussians(6, 9)
    back = prediction.rescaled(4.0, 3.0).rescaled(1 / 4, -3 / 4)
    torch.testing.assert_close(back.samples, prediction.samples)
    torch.testing.assert_close(back.variance, prediction.variance)


def test_rescaled_needs_no_samples():
    found = RegressionPrediction(torch.zeros(3), torch.ones(3), torch.full((3,), 3.0), 8).rescaled(2.0, 5.0)
    assert found.samples is None
    assert (found.mean.tolist(), found.stddev.tolist()) == ([5.0] * 3, [4.0] * 3)


@pytest.mark.parametrize(
    "scale", [2, 2.0, np.float32(2), np.array([2.0]), torch.tensor(2.0), torch.tensor([2.0], dtype=torch.float32)]
)
def test_rescaled_takes_numbers_of_any_kind_and_keeps_the_dtype(scale):
    prediction = gaussians(6, 9).to(torch.float32)
    found = prediction.rescaled(scale)
    assert found.mean.dtype == found.samples.dtype == torch.float32
    assert torch.equal(found.mean, 2 * prediction.mean)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((0.0,), ValueError, "scale"),
        ((torch.tensor([1.0, -1.0]),), ValueError, "scale"),
        ((torch.nan,), ValueError, "scale"),
        ((1.0, torch.inf), ValueError, "shift"),
        ((torch.ones(9),), ValueError, "scale"),
        ((1.0, torch.ones(9, 1)), ValueError, "shift"),
        ((None,), TypeError, "scale"),
        ((1.0, "mean"), TypeError, "shift"),
    ],
)
def test_wrong_units(arguments, error, name):
    with pytest.raises(error, match=rf"\b{name}\b"):
        gaussians(6, 9, 2).rescaled(*arguments)


def test_rescaled_of_one_output_wants_a_number():
    with pytest.raises(ValueError, match=r"\bscale\b"):
        gaussians(6, 9).rescaled(torch.ones(9))
