"""Mixtures of predictions, weighted samples, and stacking."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal, Poisson
from torch.testing import assert_close

import pyro_vsd as vsd
from pyro_vsd.prediction import ClassificationPrediction, RegressionPrediction, Stacking, mixture, stack, with_base_rate
from tests.prediction import kinds

WEIGHTS = [0.2, 0.5, 0.3]


def three_gaussians():
    """Members with 2, 1 and 3 samples of 4 rows, and the same mixture made by torch."""
    members = [kinds.gaussians(number, 4) for number in (2, 1, 3)]
    samples, scales = torch.cat([m.samples for m in members]), torch.cat([m.scales for m in members])
    weights = torch.tensor([0.1, 0.1, 0.5, 0.1, 0.1, 0.1])
    twin = MixtureSameFamily(Categorical(weights.expand(4, -1)), Normal(samples.T, scales.T))
    return members, twin


def test_a_mixture_of_gaussians_is_exact():
    members, twin = three_gaussians()
    found, y = mixture(members, WEIGHTS), torch.randn(4)
    assert isinstance(found, RegressionPrediction)
    assert found.num_samples == 6
    assert_close(found.mean, twin.mean)
    assert_close(found.variance, twin.variance)
    assert_close(found.aleatoric + found.epistemic, found.variance)
    assert_close(found.log_prob(y), twin.log_prob(y))
    assert_close(found.cdf(y), twin.cdf(y))
    for level in (0.03, 0.5, 0.9):
        assert_close(twin.cdf(found.quantile(level)), torch.full((4,), level))


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["integral", "pairs"])
def test_crps_of_a_mixture(scale):
    """Narrow components far apart take the way over pairs."""
    members = [RegressionPrediction.from_samples(m.samples, scale * m.scales) for m in three_gaussians()[0]]
    found, y = mixture(members, WEIGHTS), torch.randn(4)
    # the same with each sample repeated in proportion to its weight
    times = torch.tensor([1, 1, 5, 1, 1, 1])
    assert found.samples is not None
    assert found.scales is not None
    repeated = [t.repeat_interleave(times, 0) for t in (found.samples, found.scales)]
    assert math.isclose(vsd.metrics.crps(found, y), vsd.metrics.crps(RegressionPrediction.from_samples(*repeated), y))


def test_from_samples_takes_weights():
    (found,) = [mixture(three_gaussians()[0], WEIGHTS)]
    again = RegressionPrediction.from_samples(found.samples, found.scales, found.weights)
    for name in ("mean", "aleatoric", "epistemic"):
        assert_close(getattr(again, name), getattr(found, name))
    own = again.rescaled(3.0, 1.0)
    assert_close(own.log_prob(3 * again.mean + 1), again.log_prob(again.mean) - math.log(3.0))


def test_a_mixture_of_classes():
    members = [kinds.classes(number) for number in (2, 1, 3)]
    found = mixture(members, WEIGHTS)
    assert isinstance(found, ClassificationPrediction)
    assert_close(found.probs, sum(w * m.probs for w, m in zip(WEIGHTS, members, strict=True)))
    again = ClassificationPrediction.from_samples(found.samples, found.weights)
    assert_close(again.probs, found.probs)
    assert_close(again.expected_entropy, found.expected_entropy)
    assert bool((found.mutual_information >= 0).all())


def test_a_mixture_of_any_likelihood():
    members = [kinds.poisson(number)[0] for number in (2, 3)]
    found, y = mixture(members, [0.75, 0.25]), torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert_close(found.log_prob(y).exp(), 0.75 * members[0].log_prob(y).exp() + 0.25 * members[1].log_prob(y).exp())
    assert found.to(torch.float32).log_prob(y).shape == (4,)


def test_samples_that_were_not_kept():
    without = RegressionPrediction(torch.zeros(2), torch.ones(2), torch.ones(2), 3)
    found = mixture([without, kinds.gaussians(2, 2)])
    assert found.samples is None
    with pytest.raises(ValueError, match="keep_samples"):
        found.log_prob(torch.zeros(2))


@pytest.mark.parametrize(
    ("predictions", "weights", "name"),
    [
        ([], None, "predictions"),
        ([kinds.gaussians(2, 4), kinds.classes()], None, "predictions"),
        ([kinds.gaussians(2, 4), kinds.gaussians(2, 5)], None, "predictions"),
        ([kinds.gaussians(2, 4)], [0.5, 0.5], "weights"),
        ([kinds.gaussians(2, 4)] * 2, [1.0, 0.0], "weights"),
    ],
)
def test_bad_mixtures(predictions, weights, name):
    with pytest.raises(ValueError, match=name):
        mixture(predictions, weights)


def gaussian(mean, scale, rows):
    return RegressionPrediction.from_samples(torch.full((3, rows), mean), torch.tensor(scale))


@pytest.mark.parametrize("rows", [2000, 100])
def test_weights_and_widths_are_found(rows):
    """Targets of a mixture of two known Gaussians; members start with the wrong width."""
    first = torch.rand(rows) < 0.7
    y = torch.where(first, -3 + 0.5 * torch.randn(rows), 3 + 2 * torch.randn(rows))
    found = stack([gaussian(-3.0, 1.0, rows), gaussian(3.0, 1.0, rows), gaussian(50.0, 1.0, rows)], y)
    slack = 6 / math.sqrt(rows)
    assert_close(found.weights[:2], torch.tensor([0.7, 0.3]), rtol=0, atol=slack)
    assert_close(found.factors[:2], torch.tensor([0.5, 2.0]), rtol=slack, atol=0)
    assert 0 < float(found.weights[2]) < 0.02
    assert found.fitted
    assert found.after > found.before


def test_a_useless_member_cannot_ruin_a_far_row():
    """Without bounds its width would run away, and a row near it would cost everything."""
    y = torch.randn(200)
    found = stack([gaussian(0.0, 1.0, 200), gaussian(30.0, 1e-3, 200)], y)
    far = found.mix([gaussian(0.0, 1.0, 1), gaussian(30.0, 1e-3, 1)]).log_prob(torch.tensor([60.0]))
    assert float(far) > -1e4


@pytest.mark.parametrize(("rows", "fitted", "widened"), [(60, True, True), (30, False, True), (5, False, False)])
def test_few_rows(rows, fitted, widened):
    found = stack([gaussian(0.0, 0.1, rows), gaussian(0.5, 0.1, rows)], torch.randn(rows))
    assert found.fitted is fitted
    assert found.num_rows == rows
    if not fitted:
        assert_close(found.weights, torch.tensor([0.5, 0.5]))
    assert (found.factors != 1).all() if widened else (found.factors == 1).all()


def test_rows_that_are_all_classified_correctly_do_not_send_temperatures_to_zero():
    """They went to 1/30, and a single wrong row then had a log-density of minus infinity."""
    probs = torch.tensor([0.9, 0.1]).expand(20, 200, 2)
    members = [vsd.ClassificationPrediction.from_samples(probs) for _ in range(2)]
    assert bool((stack(members, torch.zeros(200).long()).factors > 0.3).all())


def test_temperatures_of_classes():
    logits = 2 * torch.randn(3000, 4)
    y = Categorical(logits=logits).sample()
    too_sure, too_unsure = (ClassificationPrediction.from_samples((c * logits).softmax(-1)[None]) for c in (3.0, 0.5))
    found = stack([too_sure, too_unsure], y)
    assert_close(found.factors, torch.tensor([3.0, 0.5]), rtol=0.15, atol=0)
    assert_close(found.mix([too_sure, too_unsure]).probs, logits.softmax(-1), rtol=0, atol=0.05)


def test_weights_alone_for_any_likelihood():
    rates = torch.full((2, 80), 2.0), torch.full((3, 80), 9.0)
    members = [vsd.Prediction(r[0], r[0], len(r), samples=r, components=Poisson(r)) for r in rates]
    found = stack(members, Poisson(torch.full((80,), 2.0)).sample())
    assert float(found.weights[0]) > 0.9
    assert bool((found.factors == 1).all())


def test_a_zero_probability_is_no_error():
    certain = ClassificationPrediction.from_samples(torch.eye(2).repeat(50, 1)[None])
    y = torch.arange(100) % 2
    y[0] = 1 - y[0]
    assert math.isfinite(stack([certain, kinds.classes(2, 100, 2)], y).after)


def test_mix_wants_all_members():
    with pytest.raises(ValueError, match="predictions"):
        Stacking.equal(3).mix([kinds.gaussians(2, 4)])


def test_a_column_of_targets_is_stacked_like_the_targets():
    y = torch.randn(60)  # as many rows as samples: broadcasting would not fail
    members = [RegressionPrediction.from_samples(y + s * torch.randn(60, 60), torch.tensor(1.0)) for s in (0.1, 1.0)]
    assert_close(stack(members, y.unsqueeze(-1)).weights, stack(members, y).weights)


@pytest.mark.parametrize("outputs", [(), (2,)], ids=["one output", "two outputs"])
def test_a_base_rate_of_numbers_is_one_more_component(outputs):
    y, target = torch.randn(9, *outputs) + 3, torch.randn(4, *outputs)
    prediction = vsd.RegressionPrediction.from_samples(torch.randn(5, 4, *outputs), torch.tensor(0.1))
    found = with_base_rate(prediction, y)
    base = torch.distributions.Normal(y.mean(0), y.std(0, correction=0)).log_prob(target)
    base = base.sum(-1) if outputs else base
    expected = torch.logaddexp(prediction.log_prob(target) + math.log(0.9), base + math.log(0.1))
    assert_close(found.log_prob(target), expected)
    assert_close(found.mean, 0.9 * prediction.mean + 0.1 * y.mean(0))


def test_a_base_rate_of_classes_has_their_frequencies():
    y = torch.tensor([0, 0, 0, 1])
    prediction = vsd.ClassificationPrediction.from_samples(torch.tensor([[[0.0, 1.0, 0.0]]]))
    assert_close(with_base_rate(prediction, y).probs, 0.8 * prediction.probs + 0.2 * torch.tensor([4.0, 2.0, 1.0]) / 7)
    assert_close(
        with_base_rate(prediction, y, share=0.7).probs, 0.3 * prediction.probs + 0.7 * torch.tensor([4.0, 2.0, 1.0]) / 7
    )


def test_a_base_rate_bounds_what_a_row_can_cost():
    y = torch.randn(99)
    sure = vsd.RegressionPrediction.from_samples(torch.full((1, 99), 50.0), torch.tensor(1e-3))
    nothing = torch.distributions.Normal(y.mean(), y.std(correction=0)).log_prob(y)
    assert (with_base_rate(sure, y).log_prob(y) >= nothing - math.log(100) - 1e-9).all()


@pytest.mark.parametrize("share", [0.0, 1.0, -1])
def test_the_share_of_a_base_rate(share):
    with pytest.raises(ValueError, match="share"):
        with_base_rate(vsd.RegressionPrediction.from_samples(torch.zeros(1, 2), torch.ones(1)), torch.zeros(2), share)


@pytest.mark.parametrize("y", [torch.ones(5), torch.zeros(0), torch.tensor([1.0, math.nan])], ids=str)
def test_a_base_rate_needs_targets_that_vary(y):
    prediction = vsd.RegressionPrediction.from_samples(torch.zeros(1, 2), torch.ones(1))
    with pytest.raises(ValueError, match=r"\by "):
        with_base_rate(prediction, y)


def test_a_base_rate_of_any_other_likelihood():
    with pytest.raises(TypeError, match="prediction"):
        with_base_rate(vsd.Prediction(torch.zeros(2), torch.ones(2), 1), torch.zeros(2))
