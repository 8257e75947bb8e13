"""Elsewhere newcomers ask what to call for a prediction and how to refuse one (blitz#56, #52), where the uncertainty of
a class is (Laplace#131), and why the observed values come back (numpyro#1278). Here ``predict`` gives a record with
named parts of stated shapes, takes no targets, and ``risk_coverage`` says what error remains when unsure rows are
refused.

More of it: ``tests/infer/test_predict.py``, ``tests/metrics/test_selective.py``.
"""

import pytest
import torch
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models


def test_classes_come_with_names_and_shapes():
    model, (x, _) = models.classifier(), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=7)
    assert prediction.probs.shape == (12, 3)
    assert prediction.samples.shape == (7, 12, 3)
    for name in ("labels", "confidence", "entropy", "expected_entropy", "mutual_information"):
        assert getattr(prediction, name).shape == (12,), name
    assert_close(prediction.entropy, prediction.expected_entropy + prediction.mutual_information)


@pytest.mark.parametrize(("sizes", "shape"), [((3, 5, 1), (12,)), ((3, 5, 2), (12, 2))])
def test_numbers_come_with_names_and_shapes(sizes, shape):
    model, (x, _) = models.regressor(sizes=sizes), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=7)
    for name in ("mean", "variance", "aleatoric", "epistemic", "stddev"):
        assert getattr(prediction, name).shape == shape, name
    assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    low, high = prediction.interval(0.9)
    assert bool(((low < prediction.mean) & (prediction.mean < high)).all())


def test_a_prediction_is_not_the_observed_value():
    """numpyro#1278: there a model called with its targets returns them."""
    model, (x, y) = models.regressor(noise=0.01), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y, steps=1)
    assert float((vsd.predict(model, guide, x, num_samples=20).mean - y).abs().max()) > 0.1


def test_from_scratch_or_converted():
    """bayesian-torch#37: there it is unclear whether a network must be converted."""
    x, _ = models.data()
    trained = torch.nn.Sequential(torch.nn.Linear(3, 1))
    for net in (vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 1])), vsd.nn.bayesianize(trained)):
        model = vsd.nn.Regressor(net, num_data=12)
        assert vsd.predict(model, vsd.VSDGuide(model), x, num_samples=3).mean.shape == (12,)


def test_refusing_the_unsure_half_leaves_less_error(digits):
    """Decide or abstain: the error on the half it is surest of, against the error on all."""
    _, _, prediction, test = digits
    curve = vsd.metrics.risk_coverage(prediction, test.y)
    _, all_rows, _ = curve.at(1.0)
    kept, half, threshold = curve.at(0.5)
    sure = prediction.confidence >= threshold
    assert float((prediction.labels[sure] != test.y[sure]).double().mean()) == pytest.approx(half)
    assert kept == pytest.approx(0.5, abs=0.02)
    assert all_rows > 0.01
    assert half <= 0.25 * all_rows
