"""Predictions: moments, densities, quantiles, and refusal of what does not fit."""

import copy
import pickle

import numpy
import pytest
import scipy.stats
import torch
from torch.distributions import AffineTransform, Gamma, Independent, Normal, Poisson, TransformedDistribution

from pyro_vsd import prediction as prediction_module
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction


def poisson(num_samples=3, num_rows=4):
    rate = torch.rand(num_samples, num_rows) + 0.5
    variance = rate.mean(0) + rate.var(0, correction=0)
    return Prediction(rate.mean(0), variance, num_samples, samples=rate, components=Poisson(rate)), rate


def classes(num_samples=5, num_rows=7, num_classes=3):
    return ClassificationPrediction.from_samples(torch.randn(num_samples, num_rows, num_classes).softmax(-1))


def gaussians(*shape):
    return RegressionPrediction.from_samples(torch.randn(shape), torch.rand(shape) + 0.1)


EVERY_KIND = {
    "generic": lambda: poisson()[0],
    "classification": classes,
    "regression": lambda: gaussians(5, 7),
    "regression, 2 outputs": lambda: gaussians(5, 7, 2),
}


@pytest.fixture(params=EVERY_KIND)
def kind(request):
    return EVERY_KIND[request.param]()


# every kind


def test_length_and_stddev(kind):
    assert len(kind) == len(kind.mean)
    torch.testing.assert_close(kind.stddev**2, kind.variance)
    assert kind.samples.shape == (kind.num_samples, *kind.mean.shape)


def test_moves_to_another_dtype_and_leaves_the_first_alone(kind):
    moved = kind.to(torch.float32)
    assert type(moved) is type(kind)
    assert {moved.mean.dtype, moved.variance.dtype, moved.samples.dtype} == {torch.float32}
    assert {kind.mean.dtype, kind.samples.dtype} == {torch.float64}
    y = kind.labels if isinstance(kind, ClassificationPrediction) else kind.mean.round()
    torch.testing.assert_close(moved.log_prob(y).double(), kind.log_prob(y), rtol=1e-4, atol=1e-4)


def test_moves_to_a_device(kind):
    assert kind.to("cpu").mean.device.type == "cpu"
    assert kind.to(torch.device("cpu")).num_samples == kind.num_samples


def test_refuses_an_integer_dtype(kind):
    with pytest.raises(ValueError, match=r"expected a device or a floating dtype, got torch.int64"):
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


# generic


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
    with pytest.raises(ValueError, match=r"expected y of shape \(4, 2\), got \(4,\)"):
        prediction.log_prob(y[:, 0])


def test_moves_transformed_components():
    base = Gamma(torch.ones(2, 3), torch.ones(2, 3))
    components = TransformedDistribution(base, [AffineTransform(torch.zeros(()), torch.ones(()))])
    moved = Prediction(torch.ones(3), torch.ones(3), 2, components=components).to(torch.float32)
    assert moved.components.transforms[0].loc.dtype == torch.float32
    assert moved.log_prob(torch.ones(3, dtype=torch.float32)).dtype == torch.float32
    assert components.transforms[0].loc.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_samples": 0}, "expected num_samples of at least 1, got 0"),
        ({"mean": torch.tensor(0.0)}, r"expected mean of shape \(N, ...\), got \(\)"),
        ({"variance": torch.ones(4)}, r"expected variance of shape \(3,\), got \(4,\)"),
        ({"samples": torch.ones(3, 3)}, r"expected samples of shape \(2, 3\), got \(3, 3\)"),
        ({"components": Normal(torch.zeros(2, 3, 1), 1.0)}, r"batch shape \(2, 3\), got \(2, 3, 1\).*to_event"),
    ],
)
def test_generic_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        Prediction(**{"mean": torch.zeros(3), "variance": torch.ones(3), "num_samples": 2, **arguments})


# classification


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


# regression


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
    monkeypatch.setattr(prediction_module, "_BLOCK", block)
    prediction, y = gaussians(6, 9, 2), torch.randn(9, 2)
    density = scipy.stats.norm.pdf(y, prediction.samples, prediction.scales).prod(-1).mean(0)
    torch.testing.assert_close(prediction.log_prob(y), torch.tensor(density).log())


def test_log_prob_far_away_is_finite():
    prediction = gaussians(3, 2)
    assert prediction.log_prob(torch.full((2,), 1e6)).isfinite().all()


@pytest.mark.parametrize("block", [1, 20, 2**22])
def test_cdf(block, monkeypatch):
    monkeypatch.setattr(prediction_module, "_BLOCK", block)
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
    monkeypatch.setattr(prediction_module, "_BLOCK", block)
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
    with pytest.raises(ValueError, match="expected kept samples for (log_prob|cdf|quantile).*keep_samples=True"):
        getattr(prediction, method)(argument)


def test_generic_log_prob_needs_components():
    with pytest.raises(ValueError, match="expected kept samples for log_prob.*keep_samples=True"):
        Prediction(torch.zeros(3), torch.ones(3), 1).log_prob(torch.zeros(3))


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, [0.5, 1.5], [[0.5]]])
def test_quantile_refuses(q):
    with pytest.raises(ValueError, match="expected q strictly between 0 and 1"):
        gaussians(2, 3).quantile(q)


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_interval_refuses(level):
    with pytest.raises(ValueError, match=f"expected level strictly between 0 and 1, got {level}"):
        gaussians(2, 3).interval(level)


@pytest.mark.parametrize(
    ("mean", "y", "remedy"),
    [((4,), (4, 1), r"y.squeeze\(-1\)"), ((4, 1), (4,), r"y.unsqueeze\(-1\)"), ((4,), (3,), "one target for each row")],
)
def test_targets_of_another_shape_get_a_remedy(mean, y, remedy):
    with pytest.raises(ValueError, match=rf"expected y of shape .* got .*{remedy}"):
        gaussians(2, *mean).log_prob(torch.zeros(y))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: RegressionPrediction.from_samples(torch.zeros(3), torch.ones(3)), r"\(S, N\) or \(S, N, D\)"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(0, 3), torch.ones(())), "S of at least 1"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.ones(2)), r"broadcast to \(2, 3\), got"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.zeros(())), "expected positive scales"),
        (lambda: RegressionPrediction.from_samples(torch.zeros(2, 3), torch.tensor(torch.nan)), "smallest of nan"),
        (lambda: RegressionPrediction(*[torch.zeros(2, 2, 2)] * 3, 1), r"expected mean of shape \(N,\) or \(N, D\)"),
        (
            lambda: RegressionPrediction(*[torch.zeros(2)] * 3, 1, samples=torch.zeros(1, 2)),
            "expected samples and scales, got samples alone",
        ),
    ],
)
def test_regression_refuses(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("y", [None, ["a", "b"], object()])
def test_what_is_no_number_is_refused(y):
    with pytest.raises(TypeError, match="expected a tensor or an array of numbers, got"):
        classes().log_prob(y)


def test_empty_predictions_are_allowed():
    empty = RegressionPrediction.from_samples(torch.zeros(2, 0), torch.tensor(1.0))
    assert len(empty) == 0
    assert empty.log_prob(torch.zeros(0)).shape == empty.quantile(0.5).shape == (0,)
