"""Risk against coverage: by hand, against a loop over all orders of ties, and at the edges."""

import itertools

import pytest
import torch
from torch.distributions import Poisson

import pyro_vsd as vsd
from pyro_vsd import metrics
from pyro_vsd.metrics import RiskCoverage, aurc, risk_coverage
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

# Six rows of two classes, four distinct confidences, wrong at 0.8 and at one of the two 0.6.
PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.6, 0.4], [0.4, 0.6], [0.9, 0.1]])
Y = torch.tensor([0, 0, 1, 0, 0, 0])


def by_counting(sure, losses):
    """One point for each threshold, by counting rows at or above it."""
    thresholds = sorted(set(sure.tolist()), reverse=True)
    kept = [sure >= threshold for threshold in thresholds]
    return [float(k.double().mean()) for k in kept], [float(losses[k].mean()) for k in kept], thresholds


def assert_curve(curve, sure, losses):
    for found, expected in zip(curve, by_counting(sure, losses), strict=True):
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def area_over_orders(sure, losses):
    """Mean over every order that the scores admit of the mean over k of the mean loss of the first k rows."""
    groups = [torch.nonzero(sure == s).flatten().tolist() for s in sorted(set(sure.tolist()), reverse=True)]
    areas = []
    for order in itertools.product(*(itertools.permutations(group) for group in groups)):
        ordered = losses[list(itertools.chain(*order))]
        areas.append(sum(float(ordered[:k].mean()) for k in range(1, len(ordered) + 1)) / len(ordered))
    return sum(areas) / len(areas)


def gaussians(*shape):
    prediction = RegressionPrediction.from_samples(torch.randn(6, *shape), torch.rand(6, *shape) + 0.2)
    return prediction, torch.randn(shape)


def test_curve_by_hand():
    curve = risk_coverage(PROBS, Y)
    torch.testing.assert_close(curve.threshold, torch.tensor([0.9, 0.8, 0.7, 0.6]))
    torch.testing.assert_close(curve.coverage, torch.tensor([2, 3, 4, 6]) / 6.0)
    torch.testing.assert_close(curve.risk, torch.tensor([0, 1 / 3, 1 / 4, 2 / 6]))


def test_area_by_hand():
    # risks of the 1 to 6 most certain rows; of the two at 0.6 each counts with their mean loss, 1/2
    assert aurc(PROBS, Y) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4 + 1.5 / 5 + 2 / 6) / 6, rel=1e-12)


@pytest.mark.parametrize("score", ["max_probability", "entropy", "mutual_information"])
@pytest.mark.parametrize("seed", range(3))
def test_classes_against_counting(score, seed):
    torch.manual_seed(seed)
    prediction = ClassificationPrediction.from_samples(torch.randn(5, 40, 3).softmax(-1))
    y = torch.randint(3, (40,))
    sure = metrics.ood_score(prediction, score)
    losses = (prediction.labels != y).double()
    curve = risk_coverage(prediction, y, score=score)
    assert_curve(curve, sure, losses)
    assert aurc(prediction, y, score=score) == pytest.approx(area_over_orders(sure, losses), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_ties_against_all_their_orders(seed):
    generator = torch.Generator().manual_seed(seed)
    sure = torch.randint(3, (7,), generator=generator).double()
    probs = torch.tensor([[0.75, 0.25]]).expand(7, 2)
    losses = torch.rand(7, generator=generator)
    area = aurc(probs, torch.zeros(7, dtype=torch.long), score=sure, loss=lambda prediction, y: losses)
    assert area == pytest.approx(area_over_orders(sure, losses), rel=1e-12)


@pytest.mark.parametrize("metric", [aurc, lambda *a, **k: risk_coverage(*a, **k).risk.tolist()], ids=["aurc", "risk"])
def test_order_of_rows_does_not_matter(metric):
    rows = torch.tensor([4, 1, 5, 3, 0, 2])
    assert metric(PROBS[rows], Y[rows]) == pytest.approx(metric(PROBS, Y), rel=1e-12)


@pytest.mark.parametrize("shape", [(30,), (20, 3)])
@pytest.mark.parametrize("score", ["stddev", "epistemic"])
def test_regression_against_counting(shape, score):
    prediction, y = gaussians(*shape)
    variance = prediction.variance if score == "stddev" else prediction.epistemic
    sure = -variance.reshape(shape[0], -1).mean(-1).sqrt()
    losses = (prediction.mean - y).square().reshape(shape[0], -1).mean(-1)
    curve = risk_coverage(prediction, y, score=score)
    assert_curve(curve, sure, losses)
    assert aurc(prediction, y, score=score) == pytest.approx(area_over_orders(sure, losses), rel=1e-12)


def test_own_loss_and_score():
    prediction, y = gaussians(25)
    sure = torch.randn(25)
    curve = risk_coverage(prediction, y, score=sure, loss=lambda p, t: (p.mean - t).abs())
    assert_curve(curve, sure, (prediction.mean - y).abs())


def test_any_other_prediction_is_ranked_by_its_variance():
    rates = torch.tensor([[1.0, 2.0, 4.0], [3.0, 2.0, 5.0]])
    prediction = Prediction(rates.mean(0), rates.mean(0) + rates.var(0, correction=0), 2, components=Poisson(rates))
    curve = risk_coverage(prediction, torch.tensor([2.0, 1.0, 4.5]))
    torch.testing.assert_close(curve.risk, torch.tensor([1.0, 0.5, 1 / 3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_arrays_and_dtypes_agree(dtype):
    assert aurc(PROBS.to(dtype).numpy(), Y.numpy()) == pytest.approx(aurc(PROBS, Y), rel=1e-6)


@pytest.mark.parametrize(("label", "risk"), [(0, 0.0), (1, 1.0)])
def test_one_row(label, risk):
    curve = risk_coverage(PROBS[:1], torch.tensor([label]))
    assert [part.tolist() for part in curve] == [[1.0], [risk], [0.9]]
    assert aurc(PROBS[:1], torch.tensor([label])) == risk


@pytest.mark.parametrize(("y", "risk"), [(PROBS.argmax(-1), 0.0), (1 - PROBS.argmax(-1), 1.0)], ids=["right", "wrong"])
def test_all_right_and_all_wrong(y, risk):
    assert risk_coverage(PROBS, y).risk.tolist() == [risk] * 4
    assert aurc(PROBS, y) == risk


def test_equal_scores_leave_one_point_and_the_mean_loss():
    curve = risk_coverage(PROBS, Y, score=torch.zeros(6))
    assert curve.coverage.tolist() == [1.0]
    assert aurc(PROBS, Y, score=torch.zeros(6)) == pytest.approx(metrics.error_rate(PROBS, Y))


def test_the_last_point_is_the_error_rate():
    assert risk_coverage(PROBS, Y).risk[-1].item() == pytest.approx(metrics.error_rate(PROBS, Y))


@pytest.mark.parametrize(("coverage", "reached"), [(0.01, 2 / 6), (2 / 6, 2 / 6), (0.5, 0.5), (0.51, 4 / 6), (1, 1)])
def test_point_at_a_coverage(coverage, reached):
    assert risk_coverage(PROBS, Y).at(coverage)[0] == pytest.approx(reached)


@pytest.mark.parametrize(("risk", "coverage"), [(0.0, 2 / 6), (0.25, 4 / 6), (0.3, 4 / 6), (0.34, 1.0)])
def test_point_within_a_risk(risk, coverage):
    found, kept, threshold = risk_coverage(PROBS, Y).within(risk)
    assert found == pytest.approx(coverage)
    assert kept <= risk
    assert float((PROBS.amax(-1) >= threshold).double().mean()) == pytest.approx(coverage)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"score": "stddev"}, "score"),
        ({"score": torch.zeros(5)}, "score"),
        ({"score": torch.full((6,), torch.nan)}, "score"),
        ({"loss": lambda p, y: torch.zeros(2)}, "loss"),
        ({"loss": lambda p, y: torch.zeros(())}, "loss"),
    ],
)
def test_wrong_arguments_for_classes(arguments, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        risk_coverage(PROBS, Y, **arguments)


@pytest.mark.parametrize("loss", ["nll", 0.5, torch.zeros(6)])
@pytest.mark.parametrize("metric", [aurc, risk_coverage])
def test_a_loss_that_is_no_function(metric, loss):
    with pytest.raises(TypeError, match=r"\bloss\b"):
        metric(PROBS, Y, loss=loss)


def test_the_loss_that_the_error_suggests():
    prediction = ClassificationPrediction.from_samples(PROBS.unsqueeze(0))
    curve = risk_coverage(prediction, Y, loss=lambda prediction, y: -prediction.log_prob(y))
    assert curve.risk[-1].item() == pytest.approx(metrics.nll(PROBS, Y))


def test_wrong_score_for_a_regression():
    with pytest.raises(ValueError, match=r"\bscore\b"):
        aurc(*gaussians(4), score="entropy")


@pytest.mark.parametrize("coverage", [0, 1.1])
def test_impossible_coverage(coverage):
    with pytest.raises(ValueError, match=r"\bcoverage\b"):
        risk_coverage(PROBS, Y).at(coverage)


def test_impossible_risk():
    with pytest.raises(ValueError, match=r"\brisk\b"):
        RiskCoverage(torch.ones(1), torch.tensor([0.5]), torch.zeros(1)).within(0.1)


def test_rejecting_the_uncertain_half_leaves_less_error():
    """blitz#52: how to reject a prediction. The error on the more certain half, against the error on all rows."""
    train, test = (part.to(torch.float32) for part in vsd.datasets.digits())
    net = vsd.nn.bayesianize(vsd.nn.mlp([64, 50, 10]).to(torch.float32))
    model = vsd.nn.Classifier(net, num_data=len(train))
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    for epoch in range(40):
        for x, y in train.batches(100, seed=epoch):
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
    prediction = vsd.predict(model, guide, test.x, num_samples=50, seed=0)
    curve = risk_coverage(prediction, test.y)
    _, all_rows, _ = curve.at(1.0)
    kept, half, threshold = curve.at(0.5)
    certain = prediction.confidence >= threshold
    assert float((prediction.labels[certain] != test.y[certain]).double().mean()) == pytest.approx(half)
    assert kept == pytest.approx(0.5, abs=0.02)
    assert all_rows > 0.01
    assert half <= 0.25 * all_rows
