"""VOGN: gradients per example against a loop, the update by hand, and the posterior of a linear-Gaussian problem."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.layers import recorded
from pyro_vsd.baselines.vogn import VOGN, VOGNOptimizer, squared_gradients

SHARED = nn.Linear(4, 4)
NETS = {
    "linear": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)), (5, 4)),
    "tokens": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)), (5, 2, 4)),
    "conv": (nn.Sequential(nn.Conv2d(1, 2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (5, 1, 4, 4)),
    "groups": (nn.Sequential(nn.Conv1d(2, 4, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(8, 2)), (5, 2, 3)),
    "transposed": (nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)), (5, 2, 3)),
    "used twice": (nn.Sequential(SHARED, nn.Tanh(), SHARED, nn.Linear(4, 2)), (5, 4)),
}


def layers_of(net):
    return [m for m in net.modules() if hasattr(m, "weight")]


@pytest.mark.parametrize(("net", "shape"), NETS.values(), ids=NETS.keys())
def test_squared_gradients_are_those_of_a_loop(net, shape):
    x, y = torch.randn(shape), torch.arange(5) % 2
    with recorded(layers_of(net)) as passes:
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
    outputs = [out for uses in passes.values() for _, out in uses]
    found = iter(torch.autograd.grad(loss, outputs))
    mine = [s for layer, uses in passes.items() for s in squared_gradients(layer, [(a, next(found)) for a, _ in uses])]
    expected = [torch.zeros_like(p) for layer in passes for p in layer.parameters()]
    for row, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(net(row.unsqueeze(0)), label.unsqueeze(0))
        gradients = torch.autograd.grad(loss, [p for layer in passes for p in layer.parameters()])
        expected = [e + g.square() for e, g in zip(expected, gradients, strict=True)]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_squared_gradients_come_in_blocks(monkeypatch):
    layer, x = nn.Conv2d(1, 2, 2), torch.randn(5, 1, 3, 3)
    gradient = torch.randn(5, 2, 2, 2)
    whole = squared_gradients(layer, [(x, gradient)])
    monkeypatch.setattr("pyro_vsd.baselines.vogn._BLOCK", 16)  # two examples at once
    for one, other in zip(squared_gradients(layer, [(x, gradient)]), whole, strict=True):
        torch.testing.assert_close(one, other)


def regression(bias=False):
    """Data, noise, and the exact posterior of the weights under a prior precision of 2."""
    torch.manual_seed(2)
    x = torch.randn(40, 3) @ torch.tensor([[1.0, 0.6, 0.2], [0.0, 0.8, 0.3], [0.0, 0.0, 0.7]])
    y = x @ torch.tensor([1.0, -0.5, 0.3]) + 0.5 * torch.randn(40)
    rows = torch.cat([x, torch.ones(40, 1)], 1) if bias else x
    precision = rows.mT @ rows / 0.25 + 2 * torch.eye(rows.shape[1])
    return x, y, torch.linalg.solve(precision, rows.mT @ y / 0.25), precision


@pytest.mark.parametrize("batch_size", [40, 10])
def test_linear_regression_reaches_the_known_posterior(batch_size):
    """The best diagonal Gaussian has the exact mean and the diagonal of the exact precision. Tolerances: 0.02 of the
    mean, a fifth of its standard deviation; 1 % (full batches: the curvature is exact) or 5 % of the precision."""
    x, y, mean, precision = regression(bias=True)
    method = VOGN(
        nn.Linear(3, 1), num_data=40, task="regression", noise=0.5, lr=0.3, prior_precision=2.0, damping=0.0,
        curvature="fisher",
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.99)
    for step in range(900):
        index = torch.arange(step * batch_size, (step + 1) * batch_size) % 40
        method.step(x[index], y[index])
        scheduler.step()
    found = torch.cat([p.detach().flatten() for p in method.random.values()])
    scale = torch.cat([method.optimizer.scale(p).flatten() for p in method.random.values()])
    torch.testing.assert_close(found, mean, rtol=0.0, atol=0.02)
    torch.testing.assert_close(scale**-2, precision.diagonal(), rtol=0.01 if batch_size == 40 else 0.05, atol=0.0)


def test_draws_have_the_optimizer_s_scale():
    method = VOGN(nn.Linear(3, 2), num_data=40, init_scale=0.2, damping=0.0)
    draws = torch.stack([method.sample()["weight"] for _ in range(4000)])
    torch.testing.assert_close(draws.std(0), torch.full((2, 3), 0.2), rtol=0.1, atol=0.0)
    torch.testing.assert_close(method.optimizer.scale(method.net.weight), torch.full((2, 3), 0.2))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_update_and_kl_by_hand(temperature):
    p = nn.Parameter(torch.randn(2, 3))
    optimizer = VOGNOptimizer(
        [p], lr=0.1, num_data=20, betas=(0.8, 0.9), prior_precision=3.0, damping=0.01, temperature=temperature,
        init_scale=0.1,
    )  # fmt: skip
    mu, shrinkage, m = p.detach().clone(), temperature * 3.0 / 20, torch.zeros(2, 3)
    s = torch.full((2, 3), temperature / (20 * 0.01) - shrinkage - 0.01)
    for step in (1, 2, 3):
        gradient, square = torch.randn(2, 3), torch.rand(2, 3)
        posterior = Normal(mu, (20 / temperature * (s + shrinkage + 0.01)).rsqrt())
        expected = temperature * kl_divergence(posterior, Normal(0.0, 3.0**-0.5)).sum()
        p.grad = gradient.clone()
        assert optimizer.step({p: square}) == pytest.approx(expected.item())
        m = 0.8 * m + 0.2 * (gradient + shrinkage * mu)
        s = 0.9 * s + 0.1 * square
        mu = mu - 0.1 * m / (1 - 0.8**step) / (s + shrinkage + 0.01)
        torch.testing.assert_close(p.detach(), mu)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_fisher_is_the_gauss_newton_matrix_on_average(task):
    """Its diagonal, from the Jacobian of the outputs and the curvature of the loss in them."""
    net, x = nn.Linear(2, 3), torch.randn(6, 2)
    y = torch.arange(6) % 3 if task == "classification" else torch.randn(6, 3)
    method = VOGN(net, num_data=6, task=task, noise=0.5, curvature="fisher", init_scale=1e-6)
    curvature = {p: torch.zeros_like(p) for p in method.random.values()}
    for _ in range(1500):
        for p in method.random.values():
            p.grad = torch.zeros_like(p)
        method.particle(x, y, curvature)
    probs = net(x).softmax(-1)
    inner = probs * (1 - probs) if task == "classification" else torch.full((6, 3), 4.0)
    expected = (inner.mT @ x.square() / 6).detach()
    torch.testing.assert_close(curvature[method.net.weight] / 1500, expected, rtol=0.1, atol=0.0)


def test_batch_curvature_is_the_square_of_the_mean_gradient():
    net, x, y = nn.Linear(2, 3), torch.randn(6, 2), torch.arange(6) % 3
    method = VOGN(net, num_data=60, curvature="batch", init_scale=1e-9, betas=(0.0, 0.0))
    gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), net.weight)[0]
    method.step(x, y)
    found = method.optimizer.state[method.net.weight]["curvature"]
    torch.testing.assert_close(found, gradient.square(), rtol=1e-4, atol=1e-6)


def test_other_parameters_are_trained_as_points():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    method = VOGN(net, num_data=20, task="regression", exclude="3")
    assert sorted(method.random) == ["0.bias", "0.weight"]
    assert len(method.others) == 5  # scale and shift of the norm, the last layer, the noise
    before = [p.detach().clone() for p in method.others]
    method.step(torch.randn(20, 3), torch.randn(20))
    assert all((p != old).any() for p, old in zip(method.others, before, strict=True))


def test_several_draws_per_step_are_averaged():
    method = VOGN(vsd.nn.mlp([3, 4, 2]), num_data=20, num_particles=3)
    assert method.step(torch.randn(20, 3), torch.arange(20) % 2) > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("curvature", "hessian"), ("num_particles", 0), ("prior_precision", 0.0), ("betas", (1.0, 0.9))],
)
def test_wrong_options(option, value):
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        VOGN(vsd.nn.mlp([3, 4, 2]), num_data=10, **{option: value})
