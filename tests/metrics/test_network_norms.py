"""Norms of a weight against NumPy; the explicit regulariser against dense Hessians and the loss that noise adds."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.func import jacrev, vmap

from pyro_vsd import metrics
from pyro_vsd.metrics import explicit_regularizer


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 3, 2, 2), (1, 7), (7, 1)])
def test_against_numpy(shape):
    weight = torch.randn(shape)
    values = np.linalg.svd(weight.reshape(shape[0], -1).numpy(), compute_uv=False)
    assert metrics.spectral_norm(weight) == pytest.approx(values[0], rel=1e-10)
    assert metrics.stable_rank(weight) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-10)


def test_limits():
    assert metrics.spectral_norm(torch.eye(4)) == pytest.approx(1)
    assert metrics.stable_rank(torch.eye(4)) == pytest.approx(4)
    rank_one = torch.outer(torch.randn(5), torch.randn(3))
    assert metrics.stable_rank(rank_one) == pytest.approx(1)
    assert metrics.spectral_norm(torch.zeros(2, 3)) == 0
    assert metrics.stable_rank(torch.zeros(2, 3)) == 0


def test_scale_moves_the_norm_alone():
    weight = torch.randn(4, 6)
    assert metrics.spectral_norm(10 * weight) == pytest.approx(10 * metrics.spectral_norm(weight))
    assert metrics.stable_rank(1e-200 * weight) == pytest.approx(metrics.stable_rank(weight))


def test_takes_a_layer_an_array_and_single_precision():
    layer = torch.nn.Conv2d(3, 4, 2)
    expected = math.sqrt(torch.linalg.eigvalsh(layer.weight.flatten(1) @ layer.weight.flatten(1).mT)[-1].item())
    assert metrics.spectral_norm(layer) == pytest.approx(expected)
    assert metrics.spectral_norm(layer.weight.detach().numpy()) == pytest.approx(expected)
    value = metrics.spectral_norm(layer.weight.float())
    assert type(value) is float
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["spectral_norm", "stable_rank"])
@pytest.mark.parametrize(
    "weight", [torch.ones(3), torch.ones(0, 3), torch.tensor([[1.0, torch.nan]])], ids=["vector", "empty", "NaN"]
)
def test_wrong_weights(name, weight):
    with pytest.raises(ValueError, match=r"\bweight\b"):
        getattr(metrics, name)(weight)


# ---- the explicit regulariser


def hessian(function):
    """The dense matrix; ``torch.func.hessian`` warns of its own use of TorchScript."""
    return jacrev(jacrev(function))


def covariance(num_units):
    factor = 0.3 * torch.randn(num_units, num_units)
    return factor @ factor.mT


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def cross_entropy(y):
    return lambda out: nn.functional.cross_entropy(out, y, reduction="none")


def dense_value(hessians, h, sigma):
    """Half the mean of <H, diag(h) Sigma diag(h)>; all matrices formed."""
    return 0.5 * (hessians * (h.unsqueeze(-1) * sigma * h.unsqueeze(-2))).sum((-1, -2)).mean().item()


@pytest.mark.parametrize("index", [0, 2, 4])
def test_exact_value_against_dense_hessians(index):
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    h, rest = net[:index](x), net[index:]
    sigma = covariance(h.shape[-1])
    hessians = vmap(hessian(lambda one, label: nn.functional.cross_entropy(rest(one), label)))(h, y)
    found = explicit_regularizer(net, net[index], cross_entropy(y), x, noise=sigma)
    assert found.value == pytest.approx(dense_value(hessians, h.detach(), sigma), rel=1e-10)
    assert found.standard_error == 0


def conv_net():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.parametrize(("on", "num_units"), [("output", 3), ("input", 2), (None, 3)])
def test_convolution_against_dense_hessians_in_the_noise(on, num_units):
    net, x, y = conv_net(), torch.randn(5, 2, 3, 3), torch.arange(5) % 2
    conv, sigma = net[0], covariance(num_units)

    def loss(eta, image, label):
        scale = (1 + eta)[:, None, None]
        if on == "input":
            out = conv(image * scale)
        else:  # noise multiplies the product before the bias
            out = scale * nn.functional.conv2d(image, conv.weight) + conv.bias[:, None, None]
        return nn.functional.cross_entropy(net[1:](out.unsqueeze(0)).squeeze(0), label)

    hessians = vmap(hessian(loss), in_dims=(None, 0, 0))(torch.zeros(num_units), x, y)
    expected = 0.5 * (hessians * sigma).sum((-1, -2)).mean().item()
    assert explicit_regularizer(net, "0", cross_entropy(y), x, noise=sigma, on=on).value == pytest.approx(expected)


def test_tokens_of_an_example_share_their_noise():
    layer, x, sigma = nn.Linear(3, 2), torch.randn(4, 6, 3), covariance(3)

    def loss(out):
        return out.square().sum((-1, -2))

    hessians = vmap(hessian(lambda eta, one: loss(layer(one * (1 + eta)))), in_dims=(None, 0))(torch.zeros(3), x)
    expected = 0.5 * (hessians * sigma).sum((-1, -2)).mean().item()
    assert explicit_regularizer(layer, layer, loss, x, noise=sigma).value == pytest.approx(expected)


def test_monte_carlo_within_its_standard_error():
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    sigma = covariance(5)
    exact = explicit_regularizer(net, "2", cross_entropy(y), x, noise=sigma).value
    distribution = MultivariateNormal(torch.ones(5), sigma + 1e-12 * torch.eye(5))
    for noise in (sigma, distribution):
        found = explicit_regularizer(net, "2", cross_entropy(y), x, noise=noise, num_samples=400)
        assert 0 < found.standard_error < 0.2 * abs(exact)
        assert abs(found.value - exact) < 4 * found.standard_error


def test_is_what_noise_adds_to_a_quadratic_loss():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(5, 3)
    sigma, y = covariance(4), torch.randn(5)
    value = explicit_regularizer(net, "1", lambda out: (out.squeeze(-1) - y) ** 2, x, noise=sigma).value
    h = net[0](x).detach()
    xi = MultivariateNormal(torch.ones(4), sigma + 1e-12 * torch.eye(4)).sample((200_000, 5))
    with torch.no_grad():
        added = (net[1](h * xi).squeeze(-1) - y).square() - (net[1](h).squeeze(-1) - y).square()
    error = added.mean(-1).std() / len(added) ** 0.5
    assert abs(added.mean() - value) < 4 * error


def test_distribution_covariance_and_variances_agree():
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    alpha = torch.rand(5)
    distribution = MultivariateNormal(torch.ones(5), torch.diag(alpha))
    values = [explicit_regularizer(net, "2", cross_entropy(y), x, noise=noise).value for noise in (distribution, alpha)]
    assert values[0] == pytest.approx(values[1], rel=1e-10)


def test_semi_definite_and_single_precision_covariances():
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    v = torch.randn(5)
    rank_one = torch.outer(v, v)
    exact = explicit_regularizer(net, "2", cross_entropy(y), x, noise=rank_one).value
    single = explicit_regularizer(net, "2", cross_entropy(y), x, noise=rank_one.float()).value
    assert single == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_loss_linear_in_the_noise_costs_nothing(freeze):
    layer = nn.Linear(3, 1).requires_grad_(not freeze)
    found = explicit_regularizer(layer, layer, lambda out: out.squeeze(-1), torch.randn(4, 3), noise=torch.ones(3))
    assert found == (0, 0)


def test_leaves_nothing_behind():
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    before = net(x)
    with torch.no_grad():
        explicit_regularizer(net, "2", cross_entropy(y), x, noise=torch.ones(5))
    assert torch.equal(net(x), before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net[2]._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"layer": nn.Linear(5, 6)}, "layer"),
        ({"num_samples": 1}, "num_samples"),
        ({"on": "weight"}, "on"),
        ({"noise": torch.ones(4)}, "noise"),
        ({"noise": torch.ones(4, 5)}, "noise"),
        ({"noise": -torch.ones(5)}, "noise"),
        ({"loss": lambda out: out.mean()}, "loss"),
        ({"x": torch.randn(4)}, "inputs"),
    ],
)
def test_wrong_arguments(arguments, name):
    net = mlp()
    given = {"layer": "2", "loss": cross_entropy(torch.arange(7) % 3), "x": torch.randn(7, 4), "noise": torch.ones(5)}
    given |= arguments
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        explicit_regularizer(net, given.pop("layer"), given.pop("loss"), given.pop("x"), **given)


def test_a_layer_that_does_not_run():
    net = mlp()
    net.unused = nn.Identity()
    net.forward = lambda x: x
    with pytest.raises(ValueError, match=r"\blayer\b"):
        explicit_regularizer(net, "unused", lambda out: out.sum(-1), torch.randn(7, 4), noise=torch.ones(4))
