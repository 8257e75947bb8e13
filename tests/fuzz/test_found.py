"""What fuzzing found, each with the words of its error."""

import math

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd import distributions as laws
from pyro_vsd.infer import cosine_warmup, cyclical, linear_warmup
from pyro_vsd.training import EarlyStopping

ONES, ALPHA = torch.ones(3, 2), torch.ones(3)


def classifier():
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 2])), num_data=5)


def predict(x, num_samples=2, **options):
    model = classifier()
    return vsd.predict(model, vsd.VSDGuide(model), x, num_samples=num_samples, progress=False, **options)


def loss(**options):
    model = classifier()
    return vsd.VSD_ELBO(**options).loss(model, vsd.VSDGuide(model), torch.ones(2, 3), torch.zeros(2, dtype=torch.long))


def nan_at(row):
    x = torch.ones(4, 3)
    x[row, 1] = math.nan
    return x


def regression(scale=1.0):
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 1])).float(), num_data=5)
    return vsd.predict(model, vsd.VSDGuide(model), torch.full((2, 3), scale, dtype=torch.float32), num_samples=2)


def of_another_model():
    other = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 5, 2])), num_data=5)
    return vsd.predict(classifier(), vsd.VSDGuide(other), torch.ones(2, 3), num_samples=2)


def yes_or_no():
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 1])), num_data=5)
    return vsd.predict(model, vsd.VSDGuide(model), nan_at(0), num_samples=2)


def rows_against_rows():
    """Means (B, 1) in a plate of B rows: every row would be predicted for every other."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    guide = vsd.VSDGuide(model).setup(torch.ones(1, 3), torch.ones(1))
    return vsd.predict(model, guide, torch.ones(4, 3), num_samples=2)


def fit(**options):
    model = classifier()
    data = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
    return vsd.fit(model, vsd.VSDGuide(model), data, epochs=1, progress=False, **options)


REFUSED = {
    "alpha, a number": (lambda: laws.HouseholderNormal(1.0, 0.5), TypeError, "alpha: expected a tensor, got float"),
    "alpha, whole": (lambda: laws.HouseholderNormal(1.0, torch.ones(2).long()), ValueError, "alpha: expected floating"),
    "alpha, empty": (
        lambda: laws.HouseholderNormal(1.0, torch.ones(0)), ValueError, "alpha: expected at least one entry",
    ),
    "alpha, infinite": (
        lambda: laws.ColumnProduct(ONES, ALPHA * math.inf), ValueError, "alpha: expected positive finite",
    ),
    "loc, a word": (lambda: laws.HouseholderNormal("a", ALPHA), TypeError, "loc: expected a number or a tensor"),
    "loc, infinite": (lambda: laws.HouseholderNormal(math.inf, ALPHA), ValueError, "loc: expected finite"),
    "vectors, a list": (
        lambda: laws.HouseholderNormal(1.0, ALPHA, [1]), TypeError, "vectors: expected a tensor, got list",
    ),
    "vectors, infinite": (
        lambda: laws.HouseholderNormal(1.0, ALPHA, torch.full((1, 3), math.inf)), ValueError,
        "vectors: expected finite",
    ),
    "theta, None": (lambda: laws.StructuredDropout(None, ALPHA), TypeError, "theta: expected a tensor, got NoneType"),
    "event_dim, a word": (
        lambda: laws.ColumnProduct(ONES, ALPHA, event_dim="a"), TypeError, "event_dim: expected an int",
    ),
    "scale, a number": (
        lambda: laws.StructuredDropout(ONES, ALPHA, scale=1.0), TypeError, "scale: expected a tensor, got float",
    ),
    "shape, a number": (lambda: laws.WeightNormal(1.0, 3), TypeError, "shape: expected the sizes of a weight, got 3"),
    "shape, negative": (lambda: laws.WeightNormal(1.0, (2, -1)), ValueError, "shape: expected positive sizes, got"),
    "scale of a prior": (lambda: laws.WeightNormal("a", (2, 2)), TypeError, "scale: expected a number or a tensor"),
    "init, a number": (
        lambda: laws.WeightNormal(1.0, (2, 2), init=1.0), TypeError, "init: expected a tensor, got float",
    ),
    "z, a number": (lambda: laws.ScaleMixtureNormal(1.0, -1, (2, 2)), TypeError, "z: expected a tensor, got float"),
    "beta, a word": (
        lambda: laws.ScaleMixtureNormal(ALPHA, -1, (2, 3), beta="a"), TypeError, "beta: expected a number or a tensor",
    ),
    "num_columns, None": (
        lambda: laws.empirical_bayes_kl(ALPHA, None, None), ValueError, "num_columns: expected a pos",
    ),
    "z_loc, None": (lambda: laws.hierarchical_kl(ALPHA, None, None, ALPHA, 1), TypeError, "z_loc: expected a tensor"),
    "theta of beta_star": (lambda: laws.beta_star(1.0, ALPHA), TypeError, "theta: expected a tensor, got float"),
    "conv_noise, an array": (
        lambda: vsd.VSDGuide(classifier(), conv_noise=numpy.ones(2)), ValueError, "conv_noise: expected 'out' or 'in'",
    ),
    "noise_dim, a word": (
        lambda: vsd.VSDGuide(classifier(), noise_dim={"net.0.weight": "a"}), ValueError, "noise_dim: expected a dict",
    ),
    "spread, a word": (
        lambda: vsd.VSDGuide(classifier(), init_alpha_spread="a"), ValueError,
        "init_alpha_spread: expected a number >= 0",
    ),
    "kl_scale, an array": (lambda: vsd.VSD_ELBO(kl_scale=numpy.ones(2)), ValueError, "kl_scale: expected 'unit' or"),
    "nesting, negative": (lambda: vsd.VSD_ELBO(max_plate_nesting=-1), ValueError, "max_plate_nesting: expected an int"),
    "schedule of None": (
        lambda: loss(kl_weight=lambda step: None), ValueError, "kl_weight: expected the schedule to give",
    ),
    "schedule of NaN": (lambda: loss(kl_weight=lambda step: math.nan), ValueError, "got nan at step 0"),
    "steps, a word": (lambda: linear_warmup("a"), ValueError, "steps: expected a positive number, got 'a'"),
    "to, negative": (lambda: cosine_warmup(3, to=-1), ValueError, "to: expected a number >= 0, got -1"),
    "ratio, None": (lambda: cyclical(3, ratio=None), ValueError, r"ratio: expected a number in \(0, 1\], got None"),
    "sizes, None": (lambda: vsd.nn.mlp(None), ValueError, "sizes: expected two or more positive numbers"),
    "sizes, a word": (lambda: vsd.nn.mlp([2, "a"]), ValueError, "sizes: expected two or more positive numbers"),
    "activation, a number": (
        lambda: vsd.nn.mlp([2, 2], 3), TypeError, "activation: expected a function that makes a mod",
    ),
    "activation of numbers": (lambda: vsd.nn.mlp([2, 2], lambda: 3), TypeError, "activation: expected a function"),
    "in_channels, 0": (
        lambda: vsd.nn.convnet(in_channels=0), ValueError, "in_channels: expected a positive integer, got 0",
    ),
    "num_classes, 2.5": (lambda: vsd.nn.resnet18(2.5), ValueError, "num_classes: expected a positive integer, got 2.5"),
    "bayesianize, an array": (
        lambda: vsd.nn.bayesianize(nn.Linear(2, 2), conv_noise=numpy.ones(2)), ValueError,
        "conv_noise: expected 'out' or",
    ),
    "min_delta, None": (
        lambda: EarlyStopping(min_delta=None), ValueError, "min_delta: expected a number >= 0, got None",
    ),
    "early_stopping, a word": (
        lambda: fit(early_stopping="a"), TypeError, "early_stopping: expected epochs to wait or",
    ),
    "num_samples, None": (lambda: predict(torch.ones(2, 3), None), ValueError, "num_samples: expected an integer >= 1"),
    "num_samples, True": (lambda: predict(torch.ones(2, 3), True), ValueError, "num_samples: expected an integer >= 1"),
    "NaN in a row": (lambda: predict(nan_at(2)), ValueError, "inputs: expected finite numbers, got NaN .* in row 2"),
    "overflow": (lambda: regression(1e38), ValueError, "expected a finite prediction, got another for row 0"),
    "another dtype": (
        lambda: predict(torch.ones(2, 3, dtype=torch.float32)), ValueError,
        "net.0.weight: expected an input of torch.float64, as the weight is, got torch.float32",
    ),
    "no dimension": (
        lambda: torch.tensor(1.0) @ laws.StructuredDropout(ONES.T, torch.ones(2)).sample(),
        ValueError, "weight: expected an input with 2 features in dimension -1",
    ),
    "another guide": (of_another_model, ValueError, "guide: expected a posterior of 'net.0.weight' of event shape"),
    "no model": (
        lambda: vsd.predict(3, classifier(), torch.ones(2, 3)), TypeError, "model: expected a function or a mod",
    ),
    "no guide": (lambda: vsd.predict(classifier(), None, torch.ones(2, 3)), TypeError, "guide: expected a function"),
    "beta_star of NaN": (lambda: laws.beta_star(ONES * math.nan, ALPHA), ValueError, "theta: expected finite values"),
    "vectors, an empty batch": (
        lambda: laws.HouseholderNormal(1.0, ALPHA, torch.ones(0, 0, 3)), ValueError, "vectors: expected a batch shape",
    ),
    "num_reflections, True": (
        lambda: vsd.VSDGuide(classifier(), num_reflections=True), ValueError, "num_reflections: expected an int",
    ),
    "sizes, a tensor": (
        lambda: vsd.nn.mlp(torch.tensor(2)), ValueError, "sizes: expected two or more positive numbers",
    ),
    "particles, a tensor": (
        lambda: vsd.VSD_ELBO(vectorize_particles=ALPHA), TypeError, "vectorize_particles: expected True or False",
    ),
    "nesting, huge": (
        lambda: vsd.VSD_ELBO(max_plate_nesting=1e30), ValueError, "max_plate_nesting: expected an integer",
    ),
    "num_outputs, a tuple": (
        lambda: vsd.nn.Regressor(vsd.nn.bayesianize(nn.Linear(2, 1)), 5, "learned", (2,)), ValueError,
        "num_outputs: expected a positive number",
    ),
    "beta of a prior, an array": (
        lambda: vsd.nn.HierarchicalPrior(beta=numpy.ones(2)), ValueError, "beta: expected 'paper' or 'full'",
    ),
    "kind of a prior, an array": (
        lambda: vsd.nn.HierarchicalPrior(numpy.ones(2)), ValueError, "kind: expected one of 'inverse_gamma'",
    ),
    "targets, a list": (lambda: classifier()(torch.ones(2, 3), [0, 1]), TypeError, "y: expected a tensor of targets"),
    "no rows": (lambda: classifier()(torch.ones(0, 3)), ValueError, "x: expected at least one row, got an input"),
    "validation, a number": (lambda: fit(validation=3), TypeError, "validation: expected data or a function"),
    "interval, an array": (
        lambda: fit(scheduler_interval=numpy.ones(2)), ValueError, "scheduler_interval: expected 'epoch' or 'batch'",
    ),
    "channels of a convolution": (
        lambda: nn.functional.conv1d(
            torch.ones(2, 3, 4), laws.StructuredDropout(torch.ones(2, 1, 1), torch.ones(2), noise_dim=0).sample()
        ), ValueError, "weight: expected an input with 1 features in dimension -2",
    ),
    "loc, empty": (lambda: laws.HouseholderNormal(torch.ones(0, 3), ALPHA), ValueError, "loc: expected at least one"),
    "site, a dict": (lambda: predict(torch.ones(2, 3), site={}), TypeError, "site: expected the name of an obs"),
    "rows against rows": (rows_against_rows, ValueError, "expected an observed site of the same shape for each row"),
    "NaN, yes or no": (yes_or_no, ValueError, "inputs: expected finite numbers, got NaN or infinity in row 0"),
    "samples, None": (
        lambda: vsd.ClassificationPrediction.from_samples(None), TypeError,
        r"\bsamples\b",
    ),
    "samples, whole": (
        lambda: vsd.RegressionPrediction.from_samples(torch.ones(2, 3).long(), torch.ones(2, 3)), ValueError,
        r"\bsamples\b",
    ),
    "scales, a number": (
        lambda: vsd.RegressionPrediction.from_samples(torch.ones(2, 3), 1.0), TypeError, r"\bscales\b",
    ),
    "quantile, a word": (
        lambda: regression().quantile("a"), TypeError, r"\bq\b",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_a_likelihood_without_a_mean_may_say_so():
    """A Cauchy has no mean: that is an answer, not a failure."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.StudentT(1.0, (x @ w).squeeze(-1), 1.0), obs=y)

    guide = vsd.VSDGuide(model).setup(torch.ones(2, 3), torch.ones(2))
    assert vsd.predict(model, guide, torch.ones(2, 3), num_samples=2).mean.isnan().all()


def test_values_of_higher_precision_are_scored():
    law = laws.ColumnProduct(ONES, ALPHA.bfloat16(), torch.ones(1, 3, dtype=torch.bfloat16))
    assert law.log_prob(ONES).isfinite()


def test_targets_of_yes_and_no_are_scored():
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 1])), num_data=5)
    prediction = vsd.predict(model, vsd.VSDGuide(model), torch.ones(2, 1, 3), num_samples=2)
    assert prediction.log_prob(torch.ones(prediction.mean.shape, dtype=torch.bool)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_targets_that_are_no_floats_are_scored(dtype):
    assert regression().log_prob(torch.ones(2, dtype=dtype)).isfinite().all()


def test_autocast_may_mix_dtypes():
    weight = laws.StructuredDropout(ONES.float(), torch.ones(2).float(), noise_dim=-1).sample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.functional.linear(torch.ones(4, 2, dtype=torch.bfloat16), weight).dtype == torch.bfloat16
