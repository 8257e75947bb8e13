"""What fuzzing found and people could hit."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd import distributions as laws
from pyro_vsd.infer import cosine_warmup, cyclical
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


def of_a_different_model():
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


# What is called, the type of the error, and the argument or site that it names. Distributions: ``test_errors.py``.
ERRORS = {
    "noise_dim, a word": (lambda: vsd.VSDGuide(classifier(), noise_dim={"net.0.weight": "a"}), ValueError, "noise_dim"),
    "num_reflections, True": (lambda: vsd.VSDGuide(classifier(), num_reflections=True), ValueError, "num_reflections"),
    "nesting, negative": (lambda: vsd.VSD_ELBO(max_plate_nesting=-1), ValueError, "max_plate_nesting"),
    "schedule of None": (lambda: loss(kl_weight=lambda step: None), ValueError, "kl_weight"),
    "schedule of NaN": (lambda: loss(kl_weight=lambda step: math.nan), ValueError, "kl_weight"),
    "to, negative": (lambda: cosine_warmup(3, to=-1), ValueError, "to"),
    "ratio, None": (lambda: cyclical(3, ratio=None), ValueError, "ratio"),
    "sizes, None": (lambda: vsd.nn.mlp(None), (TypeError, ValueError), ""),
    "in_channels, 0": (lambda: vsd.nn.convnet(in_channels=0), ValueError, "in_channels"),
    "num_classes, 2.5": (lambda: vsd.nn.resnet18(2.5), ValueError, "num_classes"),
    "targets, a list": (lambda: classifier()(torch.ones(2, 3), [0, 1]), TypeError, ""),
    "no rows": (lambda: classifier()(torch.ones(0, 3)), ValueError, "x"),
    "min_delta, None": (lambda: EarlyStopping(min_delta=None), ValueError, "min_delta"),
    "early_stopping, a word": (lambda: fit(early_stopping="a"), TypeError, "early_stopping"),
    "validation, a number": (lambda: fit(validation=3), TypeError, "validation"),
    "num_samples, None": (lambda: predict(torch.ones(2, 3), None), ValueError, "num_samples"),
    "num_samples, True": (lambda: predict(torch.ones(2, 3), True), ValueError, "num_samples"),
    "NaN in a row": (lambda: predict(nan_at(2)), ValueError, "inputs.* 2"),
    "NaN, yes or no": (yes_or_no, ValueError, "inputs.* 0"),
    "overflow": (lambda: regression(1e38), ValueError, "row 0"),
    "a wrong dtype": (lambda: predict(torch.ones(2, 3, dtype=torch.float32)), ValueError, r"net\.0\.weight"),
    "the guide of a different model": (of_a_different_model, ValueError, r"guide\b.*\bnet\.0\.weight"),
    "no model": (lambda: vsd.predict(None, classifier(), torch.ones(2, 3)), TypeError, "model"),
    "no guide": (lambda: vsd.predict(classifier(), None, torch.ones(2, 3)), TypeError, "guide"),
    "rows against rows": (rows_against_rows, ValueError, "row"),
    "samples, None": (lambda: vsd.ClassificationPrediction.from_samples(None), TypeError, "samples"),
    "samples, whole": (
        lambda: vsd.RegressionPrediction.from_samples(torch.ones(2, 3).long(), torch.ones(2, 3)), ValueError, "samples",
    ),
    "scales, a number": (lambda: vsd.RegressionPrediction.from_samples(torch.ones(2, 3), 1.0), TypeError, "scales"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "named"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(call, kind, named):
    with pytest.raises(kind, match=rf"(?s)\b{named}\b"):
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
