"""The low-rank Gaussian against its dense twin."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.elrg import ELRG, LowRankLayer
from pyro_vsd.baselines.layers import linear_map

LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "linear, no bias": (lambda: nn.Linear(3, 2, bias=False), (4, 3)),
    "conv": (lambda: nn.Conv2d(1, 2, 2), (4, 1, 2, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 2, groups=2), (4, 2, 1)),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def layer_and_input(request):
    """Inputs with one position each: there a draw at the outputs has the posterior's distribution."""
    make, shape = request.param
    layer = LowRankLayer(make(), 2, prior_scale=0.7, init_scale=0.4)
    with torch.no_grad():
        for value in [*layer.log_variance.values(), *layer.factors.values()]:
            value += 0.3 * torch.randn_like(value)
    return layer, torch.randn(shape)


def dense(layer):
    """Mean ``(D,)`` and covariance ``(D, D)`` of all weights."""
    names = [name for name, _ in layer.mean.named_parameters()]
    mean = torch.cat([layer.mean.get_parameter(name).flatten() for name in names])
    variance = torch.cat([layer.log_variance[name].exp().flatten() for name in names])
    V = torch.cat([layer.factors[name].flatten(1) for name in names], -1)
    return mean, variance.diag() + V.mT @ V


def jacobian(layer, x):
    """Of the outputs of each example in all weights: (B, outputs, D)."""
    shapes = {name: p.shape for name, p in layer.mean.named_parameters()}

    def outputs(flat):
        parts = dict(zip(shapes, flat.split([s.numel() for s in shapes.values()]), strict=True))
        parts = {name: part.reshape(shapes[name]) for name, part in parts.items()}
        return linear_map(layer.mean, x, parts["weight"], parts.get("bias")).flatten(1)

    return torch.autograd.functional.jacobian(outputs, dense(layer)[0].detach())


def test_kl_is_that_of_the_dense_gaussian(layer_and_input):
    layer, _ = layer_and_input
    mean, covariance = dense(layer)
    prior = MultivariateNormal(torch.zeros_like(mean), covariance_matrix=0.49 * torch.eye(len(mean)))
    expected = kl_divergence(MultivariateNormal(mean, covariance_matrix=covariance), prior)
    torch.testing.assert_close(layer.kl(), expected)
    gradients = [torch.autograd.grad(f, list(layer.parameters())) for f in (layer.kl(), expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_draws_have_the_posterior_s_covariance(layer_and_input):
    """The full covariance of an example's outputs, where each output has weights of its own or shares them."""
    layer, x = layer_and_input
    copies = x.expand(20_000, *x.shape).flatten(0, 1)  # examples have noise of their own: copies of a row are draws
    draws = layer(copies).reshape(20_000, len(x), -1).movedim(0, 1)  # (B, S, outputs)
    mean, covariance = dense(layer)
    for example, J in zip(draws, jacobian(layer, x), strict=True):
        expected = J @ covariance @ J.mT
        if isinstance(layer.mean, nn.ConvTranspose1d):
            # two positions share a bias: their noise, but for the factors', is drawn independently
            V = torch.cat([layer.factors[name].flatten(1) for name, _ in layer.mean.named_parameters()], -1)
            low_rank = J @ V.mT @ V @ J.mT
            expected = low_rank + (expected - low_rank).diagonal().diag()
        error = 6 * expected.diagonal().amax() / 20_000**0.5
        torch.testing.assert_close(example.mT.cov(), expected, rtol=0.0, atol=2 * error.item())
        torch.testing.assert_close(example.mean(0), J @ mean, rtol=0.0, atol=error.sqrt().item())


@torch.no_grad()
def test_examples_are_independent():
    layer = LowRankLayer(nn.Linear(3, 1), 2, 1.0, 0.5)
    draws = torch.stack([layer(torch.ones(2, 3)) for _ in range(4000)]).squeeze(-1)
    assert draws.mT.corrcoef()[0, 1].abs() < 0.1


def test_linear_regression_reaches_the_exact_posterior():
    """Two weights, one factor: the family holds the exact posterior."""
    torch.manual_seed(2)
    x = torch.randn(40, 1) + 0.3 * torch.randn(40, 2)
    y = x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(40)
    precision = x.mT @ x / 0.25 + torch.eye(2)
    mean, covariance = torch.linalg.solve(precision, x.mT @ y / 0.25), torch.linalg.inv(precision)
    net = nn.Linear(2, 1, bias=False)
    method = ELRG(net, num_data=40, task="regression", noise=0.5, lr=0.02, rank=1, init_scale=0.2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.997)
    for _ in range(1500):
        method.step(x, y)
        scheduler.step()
    found_mean, found = dense(method.layers[0])
    torch.testing.assert_close(found_mean.detach(), mean, rtol=0.0, atol=0.05)
    torch.testing.assert_close(found.detach(), covariance, rtol=0.15, atol=0.0)


@pytest.mark.parametrize("rank", [0, 1.5])
def test_wrong_rank(rank):
    with pytest.raises(ValueError, match=r"\brank\b"):
        ELRG(vsd.nn.mlp([3, 4, 2]), num_data=10, rank=rank)
