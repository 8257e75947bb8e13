"""Predictions from odd inputs and options, of all observation models, hierarchies and hand-written models."""

import math

import pyro
import pyro.distributions as dist
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyro_vsd as vsd
from tests.fuzz.outcomes import RAISED, answer, examples, finite, mostly, tensors

FEATURES = 3


def by_hand(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([FEATURES, 1]).to_event(2))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Poisson((0.1 * (x @ w).squeeze(-1) + b).clamp(-5, 5).exp()), obs=y)


def two_sites(x, y=None, z=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([FEATURES, 1]).to_event(2))
    mean = (x @ w).squeeze(-1)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(mean, 1.0), obs=z)
        return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def without_plate(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([FEATURES, 1]).to_event(2))
    return pyro.sample("y", dist.Normal((x @ w).sum(), 1.0), obs=y)


def net(outputs, prior=None):
    return vsd.nn.bayesianize(vsd.nn.mlp([FEATURES, 4, outputs]), prior or vsd.nn.GaussianPrior())


MODELS = {
    "classes": lambda: vsd.nn.Classifier(net(4), num_data=9),
    "hierarchy": lambda: vsd.nn.Classifier(net(2, vsd.nn.HierarchicalPrior()), num_data=9),
    "yes": lambda: vsd.nn.BinaryClassifier(net(1), num_data=9),
    "numbers": lambda: vsd.nn.Regressor(net(1), num_data=9),
    "latent": lambda: vsd.nn.Regressor(net(2), num_data=9, noise="latent"),
    "heteroscedastic": lambda: vsd.nn.Regressor(net(4), num_data=9, noise="heteroscedastic"),
    "images": lambda: vsd.nn.Classifier(
        vsd.nn.bayesianize(nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2))), num_data=9
    ),
    "float32": lambda: vsd.nn.Regressor(net(1).float(), num_data=9),
    "by hand": lambda: by_hand,
    "two sites": lambda: two_sites,
    "without a plate": lambda: without_plate,
}


@st.composite
def inputs(draw, dtype):
    rows = draw(st.integers(0, 5))
    odd = [(rows, 1, FEATURES), (rows, 2, FEATURES), (rows,), (rows, 2)]
    shape = draw(st.sampled_from([(rows, FEATURES)] * 6 + odd))
    x = draw(tensors(shape))
    return x.to(dtype) if dtype is torch.float32 and isinstance(x, torch.Tensor) and draw(st.booleans()) else x


def setup(model):
    guide = vsd.VSDGuide(model)
    return guide.setup(torch.ones(2, FEATURES), torch.ones(2)) if not isinstance(model, nn.Module) else guide


@given(st.data(), st.sampled_from(sorted(MODELS)))
@examples(400)
def test_predict(data, kind):
    model = MODELS[kind]()
    guide = answer(lambda: setup(model))
    if guide is RAISED:
        return
    x = data.draw(inputs(torch.float32 if kind == "float32" else torch.float64))
    options = {
        "num_samples": data.draw(mostly(1, 2, 3)),
        "batch_size": data.draw(mostly(None, 1, 2, 100)),
        "seed": data.draw(mostly(None, 0, -1, 2**62)),
        "coherent": data.draw(st.booleans()),
        "keep_samples": data.draw(st.booleans()),
        "site": data.draw(mostly(None, None, "y", "z", "w")),
        "progress": False,
    }
    more = data.draw(st.sampled_from([(), (), (), (), (None,), (torch.ones(3),)]))
    if not isinstance(model, nn.Module):
        more = ()  # what a function of the user's own makes of them is its own affair
    prediction = answer(lambda: vsd.predict(model, guide, x, *more, **options))
    if prediction is RAISED:
        return
    assert len(prediction) == len(x)
    assert finite(prediction.mean)
    assert finite(prediction.variance)
    assert (prediction.variance >= 0).all()
    if isinstance(prediction, vsd.ClassificationPrediction):
        torch.testing.assert_close(prediction.probs.sum(-1), torch.ones_like(prediction.probs[..., 0]))
    if options["keep_samples"]:
        assert len(prediction.samples) == options["num_samples"]
        y = data.draw(tensors(prediction.mean.shape))
        density = answer(lambda: prediction.log_prob(y))
        assert density is RAISED or not finite(y) or not density.isnan().any()
    if isinstance(prediction, vsd.RegressionPrediction):
        level = data.draw(mostly(0.5, 0.9))
        interval = answer(lambda: prediction.interval(level))
        assert interval is RAISED or bool((interval[0] <= interval[1]).all())


@given(st.data())
@examples(60)
def test_something_else(data):
    """Models and guides that are none, guides that saw no data, guides of a different model."""
    model = MODELS["classes"]()
    other = data.draw(mostly(vsd.VSDGuide(MODELS["numbers"]()), vsd.VSDGuide(by_hand), nn.Linear(3, 3)))
    answer(lambda: vsd.predict(model, other, torch.ones(2, FEATURES), num_samples=2, progress=False))
    guide = vsd.VSDGuide(model)
    wrong = data.draw(mostly(MODELS["images"](), by_hand))
    answer(lambda: vsd.predict(wrong, guide, torch.ones(2, FEATURES), num_samples=2, progress=False))


@given(st.data())
@examples(150)
def test_predictions_made_by_hand(data):
    S, N, C = (data.draw(st.integers(1, 3)) for _ in range(3))
    probs = data.draw(st.one_of(st.just(torch.full((S, N, C), 1 / C)), tensors((S, N, C), positive=True)))
    prediction = answer(lambda: vsd.ClassificationPrediction.from_samples(probs))
    labels = data.draw(mostly(torch.zeros(N, dtype=torch.long), torch.zeros(N), torch.full((N,), 9)))
    if prediction is not RAISED:
        answer(lambda: prediction.log_prob(labels))
    means, scales = data.draw(tensors((S, N))), data.draw(tensors((S, N), positive=True))
    prediction = answer(lambda: vsd.RegressionPrediction.from_samples(means, scales))
    if prediction is not RAISED:
        quantile = answer(lambda: prediction.quantile(data.draw(mostly(0.5, [0.1, 0.9], torch.tensor([0.2])))))
        sound = finite(prediction.samples) and finite(prediction.scales)
        assert quantile is RAISED or not sound or not math.isnan(float(quantile.sum()))
