"""ARD-VD is VSD without reflections: the same draws, 1/Q of the KL."""

import pyro
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines.ard_vd import ARDVD
from pyro_vsd.baselines.vsd import VSD

# a network, its inputs, and Q of each site: outputs of a Linear, input channels times kernel of a convolution
CASES = [
    pytest.param(lambda: vsd.nn.mlp([3, 5, 2]), torch.ones(4, 3), [5, 2], id="mlp"),
    pytest.param(lambda: vsd.nn.lenet5(2), torch.ones(4, 1, 28, 28), [25, 150, 120, 84, 2], id="lenet5"),
]


def pair(make):
    torch.manual_seed(0)
    net = make()
    methods = []
    for cls, options in ((ARDVD, {}), (VSD, {"num_reflections": 0, "kl_scale": "weight"})):
        torch.manual_seed(1)
        methods.append(cls(net, num_data=100, **options))
    return methods


@pytest.mark.parametrize(("make", "x", "columns"), CASES)
def test_draws_equal_those_without_reflections(make, x, columns):
    ard, structured = pair(make)
    predictions = [method.predict(x, num_samples=5, seed=2).samples for method in (ard, structured)]
    assert torch.equal(*predictions)


@pytest.mark.parametrize(("make", "x", "columns"), CASES)
def test_kl_is_one_over_q_of_that_per_weight(make, x, columns):
    ard, structured = pair(make)
    losses = []
    for method in (ard, structured):
        pyro.set_rng_seed(3)
        losses.append(method.step(x, torch.zeros(4, dtype=torch.long)))
    kls = [list(method.elbo.terms["kl"].values()) for method in (ard, structured)]
    for one, other, q in zip(*kls, columns, strict=True):
        torch.testing.assert_close(other, q * one)
    assert losses[1] - losses[0] == pytest.approx((sum(kls[1]) - sum(kls[0])).item())


def test_kl_is_the_published_formula():
    method = ARDVD(nn.Linear(7, 3), num_data=10)
    alpha = method.guide.alpha("net.weight").detach()
    method.step(torch.randn(5, 7), torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(method.elbo.terms["kl"]["net.weight"], 0.5 * (1 + 1 / alpha).log().sum())
