"""VSD behind the protocol is VSD by hand."""

import pyro
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.baselines.vsd import VSD


@pytest.mark.parametrize("num_reflections", [0, 2])
def test_equals_a_loop_by_hand(num_reflections):
    net = vsd.nn.mlp([3, 5, 2])
    x, y = torch.randn(6, 3), torch.arange(6) % 2

    pyro.set_rng_seed(1)
    method = VSD(net, num_data=100, num_reflections=num_reflections, kl_weight=0.3, lr=0.01)
    losses = [method.step(x, y) for _ in range(4)]

    pyro.set_rng_seed(1)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=100)
    guide = vsd.VSDGuide(model, num_reflections=num_reflections)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01, "fused": True}), vsd.VSD_ELBO(kl_weight=0.3))
    torch.testing.assert_close([svi.step(x, y) for _ in range(4)], losses)

    here, there = (dict(g.named_parameters()) for g in (method.guide, guide))
    torch.testing.assert_close(here, there)
    prediction = vsd.predict(model, guide, x, num_samples=5, seed=3)
    torch.testing.assert_close(method.predict(x, num_samples=5, seed=3).samples, prediction.samples)


def test_schedule_goes_on_after_loading():
    schedule = vsd.infer.linear_warmup(10)
    methods = [VSD(vsd.nn.mlp([3, 4, 2]), num_data=10, kl_weight=schedule) for _ in range(2)]
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    for _ in range(4):
        methods[0].step(x, y)
    methods[1].load_state_dict(methods[0].state_dict())
    for method in methods:
        method.step(x, y)
    assert methods[0].elbo.terms["kl_weight"] == methods[1].elbo.terms["kl_weight"] == schedule(4)


def test_chosen_layers_are_bayesian():
    method = VSD(vsd.nn.lenet5(), num_data=10, include="fc*", exclude="fc3")
    assert list(method.guide.sites) == ["net.fc1.weight", "net.fc2.weight"]
