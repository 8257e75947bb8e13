"""Vectors that start in proportion to what the noise of each unit multiplies."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd

LEVELS = torch.tensor([0.0, 0.1, 1.0, 5.0])


def rows(n=50):
    torch.manual_seed(0)
    return torch.randn(n, 4) * LEVELS, torch.randint(3, (n,))


def classifier():
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 3])), num_data=50)


def start(guide, site="net.0.weight"):
    return guide.vectors.get_parameter(site).detach().clone()


def scaled(before, x):
    size = x.square().mean(0).sqrt()
    size = size / size.square().mean().sqrt()
    return before * torch.where(size < 0.3, 0.0, size)


def test_setup_scales_once_and_leaves_generators_alone():
    x, y = rows()
    guide = vsd.VSDGuide(classifier())
    before, state = start(guide), torch.get_rng_state()
    assert guide.needs_setup
    guide.setup(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(start(guide), scaled(before, x))
    assert not guide.needs_setup
    after = start(guide)
    guide.setup(2 * x.flip(-1), y)
    assert torch.equal(start(guide), after)


@pytest.mark.parametrize("way", ["svi", "module", "fit", "compiled"])
def test_the_first_batch_scales(way):
    x, y = rows()
    model = classifier()
    guide = vsd.VSDGuide(model)
    expected = scaled(start(guide), x)
    if way == "svi":
        SVI(model, guide, Adam({"lr": 1e-9}), vsd.VSD_ELBO()).step(x, y)
    elif way == "module":
        vsd.VSD_ELBO()(model, guide)(x, y)
    elif way == "fit":
        vsd.fit(model, guide, (x, y), epochs=1, lr=1e-9, batch_size=50)
    else:
        optimizer = torch.optim.SGD(guide.parameters(), lr=1e-9)
        vsd.compile_step(vsd.VSD_ELBO()(model, guide), optimizer, mode="capture")(x, y)
    torch.testing.assert_close(start(guide), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["svi", "fit", "compiled", "ensemble"])
def test_quiet_units_stay_left_out(way):
    x, y = rows()
    model = classifier()
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    if way == "svi":
        svi = SVI(model, guide, Adam({"lr": 0.1}), vsd.VSD_ELBO())
        for _ in range(20):
            svi.step(x, y)
    elif way == "fit":
        vsd.fit(model, guide, (x, y), epochs=20, lr=0.1)
    elif way == "compiled":
        guide.setup(x, y)
        step = vsd.compile_step(loss, torch.optim.Adam(guide.parameters(), lr=0.1), mode="capture")
        for _ in range(20):
            step(x, y)
    else:
        ensemble = vsd.Ensemble(model, members=2).fit((x, y), epochs=20, lr=0.1, validation=None)
        guide = ensemble.members[1][1]
    found = start(guide)
    assert bool((found[:, :2] == 0).all())
    assert bool((found[:, 2:] != 0).all())
    alpha = guide.alpha("net.0.weight")
    torch.testing.assert_close(guide.noise("net.0.weight").variance[:2], alpha[:2])


def test_predictions_do_not():
    x, _ = rows()
    model = classifier()
    guide = vsd.VSDGuide(model)
    before = start(guide)
    vsd.predict(model, guide, x, num_samples=2)
    assert torch.equal(start(guide), before)
    assert guide.needs_setup


def test_nor_does_a_loaded_state_or_a_copy_of_a_scaled_guide():
    x, y = rows()
    model = classifier()
    guide = vsd.VSDGuide(model).setup(x, y)
    other = vsd.VSDGuide(model)
    other.load_state_dict(guide.state_dict())
    assert not other.needs_setup
    assert not copy.deepcopy(guide).needs_setup


def test_without():
    x, y = rows()
    guide = vsd.VSDGuide(classifier(), scale_vectors=False)
    before = start(guide)
    guide.setup(x, y)
    assert torch.equal(start(guide), before)
    assert not vsd.VSDGuide(classifier(), vectors="fc").needs_setup


def test_hand_written_models_and_zeros():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 1]).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 1.0), obs=y)

    x, y = rows()
    found = start(vsd.VSDGuide(model).setup(x, y.float()), "w")
    assert bool((found[:, :2] == 0).all())
    assert bool((found[:, 2:] != 0).all())
    nothing = start(vsd.VSDGuide(model).setup(0 * x, y.float()), "w")
    assert bool((nothing != 0).all())


@pytest.mark.parametrize(("noise", "groups"), [("in", 1), ("out", 1), ("in", 2)])
def test_convolutions(noise, groups):
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=groups, bias=False), nn.Flatten(), nn.Linear(6 * 4, 3))
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=50)
    guide = vsd.VSDGuide(model, conv_noise=noise, init_alpha=1e-20)
    x, y = rows(200)
    x = x.reshape(50, 2, 2, 4).permute(0, 3, 1, 2).repeat(1, 1, 2, 2)
    before = start(guide)
    guide.setup(x, y[:50])
    units = x if noise == "in" else net[0](x).detach()
    units = units.movedim(1, -1).reshape(-1, before.shape[-1])
    torch.testing.assert_close(start(guide), scaled(before, units))


def test_reflections_by_layer():
    x, y = rows()
    model = classifier()
    guide = vsd.VSDGuide(model, num_reflections={"net.0.*": 0, "net.2.weight": 3})
    assert [start(guide, f"net.{n}.weight").shape[0] for n in (0, 2)] == [0, 3]
    assert start(vsd.VSDGuide(model, num_reflections={"net.0.*": 1}), "net.2.weight").shape[0] == 2
    vsd.fit(model, guide, (x, y), epochs=2)
    other = vsd.VSDGuide(model)
    other.load_state_dict(guide.state_dict())
    first, second = (vsd.predict(model, g, x, num_samples=5, seed=0).probs for g in (guide, other))
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="num_reflections"):
        vsd.VSDGuide(model, num_reflections={"net.0.*": -1})
