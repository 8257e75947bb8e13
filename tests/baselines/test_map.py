"""The point estimate: its loss is the full data's, and on a linear-Gaussian problem it is ridge regression."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import pyro_vsd as vsd
from pyro_vsd.baselines.map import MAP


@pytest.mark.parametrize("prior_scale", [0.5, None])
def test_loss_is_the_negative_log_joint_of_the_full_data(prior_scale):
    net = vsd.nn.mlp([3, 4, 2])
    method = MAP(net, num_data=50, prior_scale=prior_scale)
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    expected = 50 * nn.functional.cross_entropy(net(x), y)
    if prior_scale is not None:
        weights = torch.cat([net[0].weight.flatten(), net[2].weight.flatten()])
        log_prior = Normal(0.0, prior_scale).log_prob(weights) - Normal(0.0, prior_scale).log_prob(torch.zeros(()))
        expected = expected - log_prior.sum()
    assert method.step(x, y) == pytest.approx(expected.item())


def test_linear_gaussian_is_ridge_regression():
    x = torch.randn(30, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.3 * torch.randn(30)
    expected = torch.linalg.solve(x.mT @ x / 0.5**2 + torch.eye(2) / 0.7**2, x.mT @ y / 0.5**2)
    net = nn.Linear(2, 1, bias=False)
    net.weight.data[:] = expected
    method = MAP(net, num_data=30, task="regression", noise=0.5, prior_scale=0.7)
    method.loss(x, y).backward()
    torch.testing.assert_close(method.net.weight.grad, torch.zeros(1, 2), rtol=0, atol=1e-10)


def test_learned_noise_finds_the_residuals():
    x, y = torch.zeros(200, 1), 0.6 * torch.randn(200)
    method = MAP(nn.Linear(1, 1), num_data=200, task="regression", lr=0.05)
    for _ in range(400):
        method.step(x, y)
    prediction = method.predict(x[:3])
    torch.testing.assert_close(prediction.aleatoric, y.var(correction=0).expand(3), rtol=1e-2, atol=0)
    assert (prediction.epistemic == 0).all()
