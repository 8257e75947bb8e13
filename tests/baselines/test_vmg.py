"""The matrix Gaussian against its dense twin: a Gaussian over the flattened matrix with covariance U ⊗ V."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.vmg import VMG, MatrixGaussianLayer

CASES = [(0, True), (2, True), (3, False), (7, True)]


@pytest.fixture(params=CASES, ids=[f"{m} pseudo, bias {b}" for m, b in CASES])
def layer(request):
    num_pseudo, bias = request.param
    layer = MatrixGaussianLayer(nn.Linear(3, 2, bias=bias), num_pseudo, 0.4)
    with torch.no_grad():
        layer.log_rows += 0.5 * torch.randn_like(layer.log_rows)
        layer.log_columns += 0.5 * torch.randn_like(layer.log_columns)
        layer.pseudo *= 3
    return layer


def dense(layer):
    """M ``(R, C)``, U ``(R, R)`` and V ``(C, C)``."""
    parts = [layer.mean.weight.mT] + ([layer.mean.bias.unsqueeze(0)] if layer.mean.bias is not None else [])
    precision = (-layer.log_rows).exp().diag() + layer.pseudo.mT @ layer.pseudo
    return torch.cat(parts), torch.linalg.inv(precision), layer.log_columns.exp().diag()


def kronecker(A, B):
    """As ``torch.kron``, whose older versions take no matrix in transposed memory, as an inverse is."""
    return torch.einsum("ij,kl->ikjl", A, B).reshape(len(A) * len(B), -1)


def dense_posterior(layer):
    M, U, V = dense(layer)
    return MultivariateNormal(M.flatten(), covariance_matrix=kronecker(U, V))


def rows(layer, x):
    return x if layer.mean.bias is None else torch.cat([x, torch.ones_like(x[..., :1])], -1)


def draws_of(layer, x, num_samples):
    """Draws ``(S, B, ...)``: examples have noise of their own, so copies of a row are draws."""
    out = layer(x.expand(num_samples, *x.shape).flatten(0, 1))
    return out.reshape(num_samples, len(x), *out.shape[1:])


def test_kl_is_that_of_the_dense_gaussian(layer):
    posterior = dense_posterior(layer)
    size = posterior.event_shape[0]
    expected = kl_divergence(posterior, MultivariateNormal(torch.zeros(size), covariance_matrix=torch.eye(size)))
    torch.testing.assert_close(layer.kl(), expected)
    parameters = [p for p in layer.parameters() if p.numel()]
    gradients = [torch.autograd.grad(f, parameters) for f in (layer.kl(), expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_moments_are_those_of_the_dense_gaussian(layer):
    """The map from W to x W is linear: its covariance comes from the Kronecker product."""
    x = torch.randn(5, 3)
    M, U, V = dense(layer)
    mean, variance = layer.moments(x)
    torch.testing.assert_close(mean, rows(layer, x) @ M)
    for n, row in enumerate(rows(layer, x)):
        J = kronecker(row.unsqueeze(0), torch.eye(2))  # (C, RC)
        covariance = J @ kronecker(U, V) @ J.mT
        torch.testing.assert_close(variance[n].diag(), covariance)  # outputs of an example are uncorrelated


@torch.no_grad()
def test_draws_have_these_moments(layer):
    x = torch.randn(4, 3)
    mean, variance = layer.moments(x)
    draws = draws_of(layer, x, 8000)
    assert ((draws.mean(0) - mean).abs() < 6 * (variance / 8000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), variance, rtol=0.1, atol=0.0)
    dense_draws = rows(layer, x) @ dense_posterior(layer).sample((8000,)).reshape(8000, -1, 2)
    torch.testing.assert_close(dense_draws.var(0), variance, rtol=0.1, atol=0.0)


def test_sequences_are_rows(layer):
    x = torch.randn(2, 4, 3)
    mean, variance = layer.moments(x)
    flat = layer.moments(x.flatten(0, 1))
    torch.testing.assert_close(mean.flatten(0, 1), flat[0])
    torch.testing.assert_close(variance.flatten(0, 1), flat[1])


def test_pseudo_observations_correlate_weights():
    _, U, _ = dense(MatrixGaussianLayer(nn.Linear(3, 2), 2, 0.05))
    assert (U - U.diagonal().diag()).abs().amax() > 0.01 * U.amax()


def test_linear_regression_finds_a_correlation():
    """Inputs that nearly agree: the exact posterior's weights are anti-correlated, and so are the learned ones."""
    torch.manual_seed(2)
    x = torch.randn(40, 1) + 0.3 * torch.randn(40, 2)
    y = x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(40)
    precision = x.mT @ x / 0.25 + torch.eye(2)
    mean, covariance = torch.linalg.solve(precision, x.mT @ y / 0.25), torch.linalg.inv(precision)
    net = nn.Linear(2, 1, bias=False)
    method = VMG(net, num_data=40, task="regression", noise=0.5, lr=0.03, num_pseudo=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.997)
    for _ in range(1500):
        method.step(x, y)
        scheduler.step()
    _, U, V = dense(method.layers[0])
    torch.testing.assert_close(method.layers[0].mean.weight.detach().flatten(), mean, rtol=0.0, atol=0.05)
    torch.testing.assert_close((U * V).detach(), covariance, rtol=0.15, atol=0.0)
    assert covariance[0, 1] < -0.5 * math.sqrt(covariance[0, 0] * covariance[1, 1])


def test_convolution_raises_unless_left_out():
    with pytest.raises(ValueError, match=r"\bnet\b.*'conv1'"):
        VMG(vsd.nn.lenet5(), num_data=10)
    assert len(VMG(vsd.nn.lenet5(), num_data=10, exclude=nn.Conv2d).layers) == 3


def test_wrong_number_of_pseudo_observations():
    with pytest.raises(ValueError, match=r"\bnum_pseudo\b"):
        VMG(vsd.nn.mlp([3, 4, 2]), num_data=10, num_pseudo=-1)
