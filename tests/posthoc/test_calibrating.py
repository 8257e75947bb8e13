"""Factors that held-out rows of a known distribution should give, and what uses them."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import pyro_vsd as vsd


def classifier(num_rows=1000):
    """A model, its guide, and inputs whose predictions are neither sure nor flat."""
    net = vsd.nn.mlp([4, 8, 3])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3.0)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=num_rows)
    return model, vsd.VSDGuide(model, init_alpha=0.1), torch.randn(num_rows, 4)


def regressor(num_rows=1000):
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([4, 20, 1])), num_data=num_rows, noise=0.1)
    return model, vsd.VSDGuide(model, init_alpha=0.05), torch.randn(num_rows, 4)


def drawn(prediction):
    """Targets of which the prediction is exactly right: a sample for each row, then a draw from it."""
    rows = torch.arange(len(prediction))
    chosen = prediction.samples[torch.randint(prediction.num_samples, rows.shape), rows]
    if isinstance(prediction, vsd.ClassificationPrediction):
        return torch.distributions.Categorical(probs=chosen).sample()
    return torch.distributions.Normal(chosen, prediction.scales[0, rows]).sample()


@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize("num_rows", [50, 1000])
def test_what_is_calibrated_hardly_moves(make, num_rows):
    model, guide, x = make(num_rows)
    y = drawn(vsd.predict(model, guide, x, num_samples=300))
    found = vsd.calibrate(model, guide, (x, y))
    assert abs(math.log(found.temperature)) < 0.2
    assert abs(math.log(found.scale)) < 0.2
    assert abs(math.log(found.noise)) < math.log(4.0)
    assert 0 <= found.scores["after"] - found.scores["before"] < 0.02


def test_temperature_is_found():
    model, guide, x = classifier()
    y = drawn(vsd.predict(model, guide, x, calibration=vsd.Calibration(temperature=2.0)))
    found = vsd.calibrate(model, guide, (x, y), noise=False)
    assert found.noise == 1
    assert 1.6 < found.temperature < 2.4


def test_scale_is_found():
    model, guide, x = regressor()
    y = drawn(vsd.predict(model, guide, x, calibration=vsd.Calibration(scale=2.0)))
    assert 1.8 < vsd.calibrate(model, guide, (x, y), noise=False).scale < 2.2


def test_noise_is_found():
    model, guide, x = regressor()
    y = drawn(vsd.predict(model, guide, x, num_samples=300, calibration=vsd.Calibration(noise=8.0)))
    found = vsd.calibrate(model, guide, (x, y), num_samples=200)
    assert 3 < found.noise < 20
    assert found.scores["noise"] > found.scores["before"]
    assert found.scores["after"] > found.scores["before"]


def test_other_likelihoods_have_the_noise_alone():
    class Counts(torch.nn.Module):
        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Poisson((x @ w).squeeze(-1).exp()), obs=y)

    model, x = Counts(), torch.randn(60, 3)
    guide = vsd.VSDGuide(model).setup(x, torch.ones(60))
    found = vsd.calibrate(model, guide, (x, torch.ones(60)), num_samples=20)
    assert (found.temperature, found.scale) == (1, 1)
    assert set(found.scores) == {"before", "noise", "after"}


def test_predict_uses_temperature_and_noise():
    model, guide, x = classifier(40)
    calibration = vsd.Calibration(noise=4.0, temperature=2.0)
    found = vsd.predict(model, guide, x, seed=3, calibration=calibration)
    with guide.noise_times(4.0):
        expected = calibration.apply(vsd.predict(model, guide, x, seed=3))
    torch.testing.assert_close(found.probs, expected.probs)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information)


@pytest.mark.parametrize("keep", [True, False])
def test_samples_need_not_be_kept(keep):
    model, guide, x = classifier(40)
    options = {"seed": 3, "calibration": vsd.Calibration(temperature=2.0)}
    found = vsd.predict(model, guide, x, keep_samples=keep, **options)
    torch.testing.assert_close(found.probs, vsd.predict(model, guide, x, **options).probs)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 7.0])
def test_noise_is_back_afterwards(factor):
    _, guide, _ = classifier()
    before = {name: value.clone() for name, value in guide.state_dict().items() if name != "_extra_state"}
    with guide.noise_times(factor):
        torch.testing.assert_close(guide.alpha("net.0.weight"), factor * before["log_alpha.net.0.weight"].exp())
    assert all(torch.equal(guide.state_dict()[name], value) for name, value in before.items())


def test_nothing_else_changes_and_seeds_repeat():
    model, guide, x = classifier(60)
    y = torch.randint(3, (60,))
    before = {name: value.clone() for name, value in guide.state_dict().items() if name != "_extra_state"}
    generator = torch.get_rng_state()
    found = vsd.calibrate(model, guide, (x, y), num_samples=10)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(guide.state_dict()[name], value) for name, value in before.items())
    assert found == vsd.calibrate(model, guide, (x, y), num_samples=10)


def test_a_loader_gives_the_same():
    model, guide, x = classifier(60)
    data = torch.utils.data.TensorDataset(x, torch.randint(3, (60,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    found = vsd.calibrate(model, guide, loader, num_samples=10)
    assert found == vsd.calibrate(model, guide, data.tensors, num_samples=10)


def test_training_goes_on_without_the_calibration():
    x, y = torch.randn(40, 3), torch.randn(40)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 1])), num_data=40)
    guide = vsd.VSDGuide(model)
    vsd.calibrate(model, guide, (x, y), num_samples=2)
    assert guide.calibration is not None
    vsd.fit(model, guide, (x, y), epochs=1, progress=False)
    assert guide.calibration is None


def test_calibration_is_saved_with_the_guide():
    model, guide, x = classifier(60)
    found = vsd.calibrate(model, guide, (x, torch.randint(3, (60,))), num_samples=10)
    assert guide.calibration is found
    new = vsd.VSDGuide(model)
    new.load_state_dict(guide.state_dict())
    assert new.calibration == found
    new.load_state_dict(vsd.VSDGuide(model).state_dict())
    assert new.calibration is None


def test_guides_of_pyro_have_a_temperature_alone():
    model, _, x = classifier(60)
    guide = AutoNormal(model)
    y = torch.randint(3, (60,))
    guide(x, y)
    with pytest.raises(TypeError, match=r"\bguide\b"):
        vsd.calibrate(model, guide, (x, y))
    found = vsd.calibrate(model, guide, (x, y), num_samples=5, noise=False)
    assert found.noise == 1
    assert "temperature" in found.scores
    with pytest.raises(ValueError, match=r"\bcalibration\b"):
        vsd.predict(model, guide, x, calibration=vsd.Calibration(noise=2.0))


@pytest.mark.parametrize(
    ("name", "error", "change"),
    [
        ("validation", ValueError, {"validation": lambda x, y: (x[:29], y[:29])}),
        ("validation", TypeError, {"validation": lambda x, y: (x,)}),
        ("y", ValueError, {"validation": lambda x, y: (x, y + 1)}),
        ("num_samples", ValueError, {"num_samples": 0}),
        ("seed", ValueError, {"seed": 0.5}),
    ],
)
def test_wrong_arguments(name, error, change):
    model, guide, x = classifier(40)
    y = torch.arange(40) % 3
    cut, options = change.get("validation", lambda *data: data), {k: v for k, v in change.items() if k != "validation"}
    with pytest.raises(error, match=rf"\b{name}\b"):
        vsd.calibrate(model, guide, cut(x, y), **options)


def test_calibration_is_not_a_number():
    model, guide, x = classifier(40)
    with pytest.raises(TypeError, match=r"\bcalibration\b"):
        vsd.predict(model, guide, x, calibration=2.0)


def test_a_score_that_is_not_finite():
    model, guide, x = regressor()
    with pytest.raises(ValueError, match="validation"):
        vsd.calibrate(model, guide, (x, torch.full((len(x),), math.nan)))
