"""SLANG: its low-rank algebra against dense matrices, and the posterior of a linear-Gaussian problem."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.slang import SLANG, Outer, SLANGOptimizer, stack


def outer(batch=5, out=3, inputs=2):
    return Outer(torch.randn(batch, out), torch.randn(batch, inputs))


def matrices(o):
    return o.left.unsqueeze(-1) * o.right.unsqueeze(-2)  # (B, out, in)


def test_outer_products():
    o = outer()
    dense, others, weights = matrices(o), torch.randn(4, 3, 2), torch.randn(4, 5)
    torch.testing.assert_close(o.gram(), dense.flatten(1) @ dense.flatten(1).mT)
    torch.testing.assert_close(o.against(others), others.flatten(1) @ dense.flatten(1).mT)
    torch.testing.assert_close(o.combine(weights), torch.tensordot(weights, dense, 1))
    torch.testing.assert_close(o.square(), dense.square().sum(0))
    torch.testing.assert_close(matrices(stack([o, o])), torch.cat([dense, dense]))


@pytest.fixture(params=[1, 3, 9])
def optimizer(request):
    """Nine numbers in two parameters, with a precision in full swing."""
    means = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))]
    optimizer = SLANGOptimizer(means, 0.1, request.param, 2.0, 0.02, 0.9, 0.05)
    state = optimizer.state[optimizer._means()[0]]
    state["factor"], state["diagonal"] = torch.randn(request.param, 9), torch.rand(9) + 0.5
    return optimizer


def dense_precision(optimizer):
    U, d = optimizer.precision()
    return U.mT @ U + d.diag()


def test_solve_and_kl_are_dense(optimizer):
    P, v = dense_precision(optimizer), torch.randn(9)
    torch.testing.assert_close(optimizer.solve(v), torch.linalg.solve(P, v))
    posterior = MultivariateNormal(optimizer.mean(), precision_matrix=P)
    prior = MultivariateNormal(torch.zeros(9), precision_matrix=2.0 * torch.eye(9))
    torch.testing.assert_close(optimizer.kl(), kl_divergence(posterior, prior))


def test_draws_have_the_dense_covariance(optimizer):
    draws = torch.stack([torch.cat([p.flatten() for p in optimizer.sample()]) for _ in range(8000)])
    covariance = torch.linalg.inv(dense_precision(optimizer))
    error = 6 * covariance.diagonal().amax().item() / 8000**0.5
    torch.testing.assert_close(draws.mT.cov(), covariance, rtol=0.0, atol=1.5 * error)
    torch.testing.assert_close(draws.mean(0), optimizer.mean(), rtol=0.0, atol=error**0.5)


def test_update_of_the_precision_is_dense(optimizer):
    """The leading eigenvectors of the mixed matrix stay, the diagonal of the rest goes to d: P keeps its diagonal."""
    parts = [outer(), Outer(torch.randn(5, 3), torch.ones(5, 1))]
    G = torch.cat([matrices(o).flatten(1) for o in parts], 1)  # (B, D)
    U, d = (v.clone() for v in optimizer.precision())
    mixed = 0.7 * U.mT @ U + 0.3 * G.mT @ G
    optimizer._update_precision(parts, 0.3, 2.0)
    new, diagonal = optimizer.precision()
    values, vectors = torch.linalg.eigh(mixed)
    kept = vectors[:, -len(U) :] * values[-len(U) :]
    torch.testing.assert_close(new.mT @ new, kept @ vectors[:, -len(U) :].mT)
    torch.testing.assert_close(diagonal + new.square().sum(0), mixed.diagonal() + 0.7 * d + 0.3 * 2.0)


def test_per_example_gradients_are_those_of_a_loop():
    net, x, y = vsd.nn.mlp([3, 4, 2], nn.Tanh), torch.randn(6, 3), torch.arange(6) % 2
    method = SLANG(net, num_data=60, init_scale=1e-9)
    found = {p: [] for p in method.random.values()}
    for p in found:
        p.grad = torch.zeros_like(p)
    method.particle(x, y, found)
    G = torch.cat([matrices(stack(parts)).flatten(1) for parts in found.values()], 1)
    for n in range(6):
        loss = nn.functional.cross_entropy(net(x[n : n + 1]), y[n : n + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
        torch.testing.assert_close(G[n], 10**0.5 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [40, 10])
def test_linear_regression_reaches_the_exact_posterior(batch_size):
    """With L = D the family holds the exact posterior. Tolerances: 0.02 of the mean, a fifth of its standard deviation;
    of the precision, in the scale of its diagonal, 1 % with full batches (the curvature is exact) and 10 % without."""
    torch.manual_seed(2)
    x = torch.randn(40, 3) @ torch.tensor([[1.0, 0.6, 0.2], [0.0, 0.8, 0.3], [0.0, 0.0, 0.7]])
    y = x @ torch.tensor([1.0, -0.5, 0.3]) + 0.2 + 0.5 * torch.randn(40)
    rows = torch.cat([x, torch.ones(40, 1)], 1)
    precision = rows.mT @ rows / 0.25 + 2 * torch.eye(4)
    mean = torch.linalg.solve(precision, rows.mT @ y / 0.25)
    method = SLANG(
        nn.Linear(3, 1), num_data=40, task="regression", noise=0.5, lr=0.1, rank=4, prior_precision=2.0,
        curvature="fisher",
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.994)
    for step in range(900):
        index = torch.arange(step * batch_size, (step + 1) * batch_size) % 40
        method.step(x[index], y[index])
        scheduler.step()
    scale = precision.diagonal().sqrt()
    found = dense_precision(method.optimizer) / (scale.unsqueeze(-1) * scale)
    tolerance = 0.01 if batch_size == 40 else 0.1
    torch.testing.assert_close(method.optimizer.mean(), mean, rtol=0.0, atol=0.02)
    torch.testing.assert_close(found, precision / (scale.unsqueeze(-1) * scale), rtol=0.0, atol=tolerance)


def test_several_draws_per_step_are_averaged():
    method = SLANG(vsd.nn.mlp([3, 4, 2]), num_data=20, num_particles=3, rank=2)
    assert method.step(torch.randn(20, 3), torch.arange(20) % 2) > 0


def test_convolution_raises_unless_left_out():
    with pytest.raises(ValueError, match=r"\bnet\b.*'conv1'"):
        SLANG(vsd.nn.lenet5(), num_data=10)
    method = SLANG(vsd.nn.lenet5(2, image_size=12), num_data=10, exclude=nn.Conv2d, rank=1)
    before = method.net.conv1.weight.detach().clone()
    method.step(torch.randn(4, 1, 12, 12), torch.arange(4) % 2)
    assert (method.net.conv1.weight != before).any()


def test_positions_raise():
    method = SLANG(nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 2)), num_data=10)
    with pytest.raises(ValueError, match=r"\bnet\b.*\(5, 2, 3\)"):
        method.step(torch.randn(5, 2, 3), torch.arange(5) % 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [("curvature", "batch"), ("rank", 0), ("num_particles", 0), ("init_scale", 0.0), ("beta", 0.0), ("momentum", 1.0)],
)
def test_wrong_options(option, value):
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        SLANG(vsd.nn.mlp([3, 4, 2]), num_data=10, **{option: value})
