"""Elsewhere the KL of many weights stops all learning (pyro#1777), a sampled one could not be fitted at all
(numpyro#746), a recurrent network pays hundreds of KL for one of fit (blitz#100), and the defaults fall behind a
plain network on MNIST (torch_blue#49). Here the KL is in closed form, counted per noise unit, and the defaults reach
the plain network.

More of it: ``tests/infer/test_elbo.py``, ``test_schedules.py``.
"""

import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from tests.infer import models


def test_the_defaults_reach_the_plain_network_on_digits(digits):
    """The same data, network, epochs and optimiser; one percent is less than four of the test images."""
    _, _, prediction, test = digits
    torch.manual_seed(0)
    train, _ = (part.to(torch.float32) for part in vsd.datasets.digits())
    net = vsd.nn.mlp([64, 50, 10]).to(torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(40):
        for x, y in train.batches(100, seed=epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    plain = vsd.metrics.accuracy(net(test.x).softmax(-1).detach(), test.y)
    assert plain > 0.95
    assert vsd.metrics.accuracy(prediction, test.y) > plain - 0.01


@pytest.mark.parametrize("width", [10, 1000])
def test_a_wide_network_learns_from_few_data(width):
    """pyro#1777: there more weights mean more KL, until nothing is learnt."""
    x, y = models.data(50)
    y = (y - y.mean()) / y.std()
    model = models.regressor(num_data=50, sizes=(3, width, 1), noise="learned")
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    assert vsd.metrics.rmse(vsd.predict(model, guide, x, num_samples=50, seed=0), y) < 0.4


@pytest.mark.parametrize("outputs", [1, 300])
def test_the_kl_does_not_grow_with_the_columns(outputs):
    """The KL of the noise itself: K units pay, not K × Q weights."""
    model, (x, y) = models.regressor(sizes=(3, outputs)), models.data()
    elbo = vsd.VSD_ELBO()
    guide = vsd.VSDGuide(model, num_reflections=0, init_alpha=0.5, init_alpha_spread=0.0)
    elbo.loss(model, guide, x, y if outputs == 1 else y.unsqueeze(-1).expand(-1, outputs))
    expected = 0.5 * 3 * torch.tensor((1 + 0.5) / 0.5).log()
    assert float(elbo.terms["kl"]["net.0.weight"]) == pytest.approx(float(expected))


def test_the_kl_is_not_sampled():
    model, (x, y) = models.regressor(prior=vsd.nn.HierarchicalPrior()), models.data()
    guide = vsd.VSDGuide(model)
    elbo = vsd.VSD_ELBO()
    seen = []
    for _ in range(3):
        elbo.loss(model, guide, x, y)
        seen.append({name: float(value) for name, value in elbo.terms["kl"].items()})
    assert seen[0] == seen[1] == seen[2]


def test_a_schedule_weighs_every_kl_and_nothing_else():
    model, (x, y) = models.regressor(noise="latent"), models.data()
    guide = vsd.VSDGuide(model)
    elbo = vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(4))
    for expected in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = elbo.loss_and_grads(model, guide, x, y)
        kl = float(sum(elbo.terms["kl"].values()))
        assert float(elbo.terms["kl_weight"]) == expected
        assert value == pytest.approx(expected * kl - float(elbo.terms["log_likelihood"]))
