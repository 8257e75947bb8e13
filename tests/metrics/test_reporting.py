"""The report holds what the single metrics say; a stream of batches gives the same."""

import builtins
import math

import pytest
import torch
from torch.distributions import Poisson

from pyro_vsd import metrics
from pyro_vsd.metrics import Report, Stream, base, report
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

DETECTION = ["fpr_at_95_tpr", "detection_error", "auroc", "aupr_in", "aupr_out"]
CLASSIFICATION = ["accuracy", "error_rate", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc"]
REGRESSION = ["rmse", "log_likelihood", "crps", "coverage", "calibration_error"]


def classes(num_rows=120, scale=2.0):
    logits = scale * torch.randn(num_rows, 4)
    y = (logits + torch.randn(num_rows, 4)).argmax(-1)
    return ClassificationPrediction.from_samples((logits + torch.randn(5, num_rows, 4)).softmax(-1)), y


def gaussians(*shape):
    prediction = RegressionPrediction.from_samples(torch.randn(6, *shape), torch.rand(6, *shape) + 0.2)
    return prediction, 1.5 * torch.randn(shape)


def rows_of(prediction, rows):
    if isinstance(prediction, ClassificationPrediction):
        return ClassificationPrediction.from_samples(prediction.samples[:, rows])
    return RegressionPrediction.from_samples(prediction.samples[:, rows], prediction.scales[:, rows])


def test_classification_report_agrees_with_the_metrics():
    prediction, y = classes()
    values = report(prediction, y).to_dict()
    assert list(values) == [*CLASSIFICATION, "predictive_entropy", "mutual_information"]
    for name in CLASSIFICATION:
        assert values[name] == pytest.approx(getattr(metrics, name)(prediction, y), rel=1e-12)
    assert values["predictive_entropy"] == pytest.approx(prediction.entropy.mean().item())
    assert values["mutual_information"] == pytest.approx(prediction.mutual_information.mean().item())


@pytest.mark.parametrize("shape", [(40,), (20, 3)])
def test_regression_report_agrees_with_the_metrics(shape):
    prediction, y = gaussians(*shape)
    values = report(prediction, y).to_dict()
    assert list(values) == REGRESSION
    for name in REGRESSION:
        assert values[name] == pytest.approx(getattr(metrics, name)(prediction, y), rel=1e-12)


@pytest.mark.parametrize("score", ["max_probability", "entropy", "mutual_information"])
def test_detection_is_added(score):
    (prediction, y), (outside, _) = classes(), classes(80, 0.5)
    values = report(prediction, y, outside, score=score).to_dict()
    expected = metrics.ood(prediction, outside, score)
    assert {name: values[name] for name in DETECTION} == pytest.approx(expected)


def test_report_is_a_mapping_from_names_to_numbers():
    prediction, y = classes()
    found = report(prediction, y)
    assert list(found) == list(found.to_dict())
    assert len(found) == 10
    assert dict(found) == dict(found.items()) == found.to_dict()
    assert ("nll" in found, "rmse" in found, found.get("rmse")) == (True, False, None)


@pytest.mark.parametrize("probs", [[0.3, 0.7], [1.0, 0.0]])
def test_no_metric_of_one_sample_is_minus_zero(probs):
    found = report(ClassificationPrediction.from_samples(torch.tensor([[probs]])), torch.tensor([0]))
    assert "-0.0000" not in str(found)
    assert math.copysign(1, found["mutual_information"]) == 1


def test_several_sets_outside_by_name():
    (prediction, y), (one, _), (two, _) = classes(), classes(80, 0.5), classes(50, 0.1)
    values = report(prediction, y, {"svhn": one, "cifar": two})
    assert values["auroc (svhn)"] == pytest.approx(metrics.ood(prediction, one)["auroc"])
    assert values["auroc (cifar)"] == pytest.approx(metrics.ood(prediction, two)["auroc"])
    assert values.better("auroc (cifar)") == "higher ↑"


@pytest.mark.parametrize("bounds", [[0, 120], [0, 1, 60, 119, 120], list(range(121))])
@pytest.mark.parametrize("score", ["max_probability", "mutual_information"])
def test_stream_of_class_batches_equals_all_at_once(bounds, score):
    (prediction, y), (outside, _) = classes(), classes(40, 0.5)
    stream = Stream(score=score)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        stream.update(rows_of(prediction, slice(start, stop)), y[start:stop])
    for rows in (slice(0, 10), slice(10, 40)):
        stream.update_ood(rows_of(outside, rows))
    expected = report(prediction, y, outside, score=score).to_dict()
    assert stream.compute().to_dict() == pytest.approx(expected, rel=1e-10)
    assert stream.compute().num_rows == 120


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_stream_of_regression_batches_equals_all_at_once(shape):
    prediction, y = gaussians(*shape)
    stream = Stream(level=0.8)
    for rows in (slice(0, 1), slice(1, 25), slice(25, 40)):
        stream.update(rows_of(prediction, rows), y[rows])
    assert stream.compute().to_dict() == pytest.approx(report(prediction, y, level=0.8).to_dict(), rel=1e-10)


def test_merged_streams_are_one_stream_of_all_batches():
    (prediction, y), (outside, _) = classes(), classes(40, 0.5)
    whole, parts = Stream(), [Stream(), Stream(), Stream()]  # the last one sees no batch
    for part, rows in zip(parts, (slice(0, 50), slice(50, 120)), strict=False):
        for stream in (whole, part):
            stream.update(rows_of(prediction, rows), y[rows])
            stream.update_ood(outside)
    assert Stream.merged(parts).compute().to_dict() == whole.compute().to_dict()


def test_plain_probabilities_have_no_mutual_information():
    prediction, y = classes()
    assert "mutual_information" not in report(prediction.probs, y).to_dict()
    assert report(prediction.probs.numpy(), y.numpy()).num_samples is None
    assert report(prediction.samples, y).to_dict() == pytest.approx(report(prediction, y).to_dict())


def test_what_needs_samples_is_left_out():
    prediction = RegressionPrediction(torch.zeros(3), torch.ones(3), torch.ones(3), 5)
    assert report(prediction, torch.ones(3)).to_dict() == {"rmse": 1.0}


def test_generic_prediction():
    rate = torch.rand(2, 3) + 1
    prediction = Prediction(rate.mean(0), rate.mean(0), 2, components=Poisson(rate))
    y = torch.tensor([0.0, 1.0, 4.0])
    values = report(prediction, y).to_dict()
    assert values["rmse"] == pytest.approx(metrics.rmse(prediction, y))
    assert values["log_likelihood"] == pytest.approx(metrics.log_likelihood(prediction, y))
    assert list(report(Prediction(rate[0], rate[0], 1), y).to_dict()) == ["rmse"]


def test_prints_as_a_table():
    prediction, y = classes()
    lines = str(report(prediction, y)).splitlines()
    assert lines[0] == "120 rows, 5 samples"
    assert lines[1].split() == ["metric", "value", "better"]
    assert lines[2].split() == ["accuracy", f"{metrics.accuracy(prediction, y):.4f}", "higher", "↑"]
    assert len({line.index(line.split()[1]) + len(line.split()[1]) for line in lines[1:]}) == 1  # aligned
    assert str(report(*gaussians(9))).splitlines()[-2].endswith("near 0.95")


def test_an_infinite_value_prints():
    assert "inf" in str(report(torch.eye(2), torch.tensor([1, 0])))
    assert report(torch.eye(2), torch.tensor([1, 0]))["nll"] == math.inf


def test_to_pandas():
    prediction, y = classes()
    found = report(prediction, y)
    frame = found.to_pandas()
    assert list(frame.columns) == ["value", "better"]
    assert frame["value"].to_dict() == found.to_dict()
    assert frame.loc["nll", "better"] == "lower ↓"


def test_to_pandas_without_pandas(monkeypatch):
    real = builtins.__import__

    def without_pandas(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"\bpandas\b"):
        Report({"nll": 1.0}, num_rows=1).to_pandas()


def test_to_dict_is_a_copy():
    found = Report({"nll": 1.0}, num_rows=1)
    found.to_dict()["nll"] = 2.0
    assert found["nll"] == 1.0


def test_unknown_name():
    with pytest.raises(KeyError, match=r"\bNLL\b"):
        Report({"nll": 1.0}, num_rows=1)["NLL"]


def test_stream_without_batches():
    with pytest.raises(ValueError, match=r"\bupdate\b"):
        Stream().compute()


@pytest.mark.parametrize(
    "batch",
    [
        gaussians(4),
        (torch.ones(2, 3) / 3, torch.zeros(2, dtype=torch.long)),  # a different number of classes
        (torch.ones(2, 4) / 4, torch.zeros(2, dtype=torch.long)),  # no samples
    ],
)
def test_a_batch_of_a_different_kind_raises_and_changes_nothing(batch):
    stream = Stream()
    stream.update(*classes())
    before = stream.compute().to_dict()
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        stream.update(*batch)
    assert stream.compute().to_dict() == before


def test_a_wrong_batch_leaves_nothing_behind():
    stream, (prediction, y) = Stream(), classes()
    stream.update(prediction, y)
    before = stream.compute().to_dict()
    with pytest.raises(ValueError, match=r"\by\b"):
        stream.update(prediction, y + 1)
    assert stream.compute().to_dict() == before


def test_detection_of_a_regression_raises():
    prediction, y = gaussians(4)
    with pytest.raises(ValueError, match=r"\bood\b"):
        report(prediction, y, classes()[0])


# ---- the registry


@pytest.mark.parametrize("name", base.METRICS)
def test_every_entry_is_a_public_function(name):
    assert getattr(metrics, name).__name__ == name
    assert name in metrics.__all__


def test_directions():
    higher = {"accuracy", "log_likelihood", "auroc", "aupr_in", "aupr_out"}
    none = {"predictive_entropy", "mutual_information"}
    assert {name for name in base.METRICS if metrics.better(name) == "higher ↑"} == higher
    assert {name for name in base.METRICS if not metrics.better(name)} == none
    assert metrics.better("coverage", level=0.5) == "near 0.5"
    assert metrics.better("loss") == ""


def test_one_decorated_function_enters_report_and_stream():
    @base.metric("classes", "higher", lambda batch: base.total(batch.confidence))
    def mean_confidence(prediction, y):
        return float(base.probabilities(prediction).amax(-1).mean())

    try:
        (prediction, y), stream = classes(), Stream()
        for rows in (slice(0, 50), slice(50, 120)):
            stream.update(rows_of(prediction, rows), y[rows])
        assert list(report(prediction, y))[-3] == "mean_confidence"  # before those without a direction
        assert stream.compute()["mean_confidence"] == pytest.approx(mean_confidence(prediction, y))
        assert report(prediction, y).better("mean_confidence") == "higher ↑"
    finally:
        del base.METRICS["mean_confidence"]
