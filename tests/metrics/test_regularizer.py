"""The explicit regulariser against dense Hessians, and against the loss that noise really adds."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.func import jacrev, vmap

from pyro_vsd.metrics import explicit_regularizer


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
        else:  # noise meets the product before the bias
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
    law = MultivariateNormal(torch.ones(5), sigma + 1e-12 * torch.eye(5))
    for noise in (sigma, law):
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


def test_law_covariance_and_variances_agree():
    net, x, y = mlp(), torch.randn(7, 4), torch.arange(7) % 3
    alpha = torch.rand(5)
    law = MultivariateNormal(torch.ones(5), torch.diag(alpha))
    values = [explicit_regularizer(net, "2", cross_entropy(y), x, noise=noise).value for noise in (law, alpha)]
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
    ("arguments", "match"),
    [
        ({"layer": nn.Linear(5, 6)}, "expected a layer of the network, got Linear"),
        ({"num_samples": 1}, "expected num_samples of at least 2, for a standard error, got 1"),
        ({"on": "weight"}, "expected on='input' or 'output', got 'weight'"),
        ({"noise": torch.ones(4)}, "expected noise of 5 units, as many as what it multiplies, got 4"),
        ({"noise": torch.ones(4, 5)}, r"expected a covariance of shape \(K, K\) or variances \(K,\), got \(4, 5\)"),
        ({"noise": -torch.ones(5)}, "expected a positive semi-definite covariance, got an eigenvalue of -1"),
        ({"loss": lambda out: out.mean()}, r"expected one loss for each example, of shape \(7,\), got \(\).*'none'"),
        ({"x": torch.randn(4)}, r"expected a batch of shape \(B, ..., K\) in the layer, got \(5,\)"),
    ],
)
def test_refuses(arguments, match):
    net = mlp()
    given = {"layer": "2", "loss": cross_entropy(torch.arange(7) % 3), "x": torch.randn(7, 4), "noise": torch.ones(5)}
    given |= arguments
    with pytest.raises(ValueError, match=match):
        explicit_regularizer(net, given.pop("layer"), given.pop("loss"), given.pop("x"), **given)


def test_refuses_a_layer_that_does_not_run():
    net = mlp()
    net.unused = nn.Identity()
    net.forward = lambda x: x
    with pytest.raises(ValueError, match="expected the layer to run when the network does, got no call"):
        explicit_regularizer(net, "unused", lambda out: out.sum(-1), torch.randn(7, 4), noise=torch.ones(4))
