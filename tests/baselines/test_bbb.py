"""Bayes by Backprop: its prior, its objective, the moments and the KL of the local reparameterisation, and what the
posterior of a linear model must be."""

import copy
import math

import pyro
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.bbb import BBB, BBBLocal, LocalLayer, TwoScaleNormal
from pyro_vsd.baselines.layers import linear_map


def mixture(pi, sigma1, sigma2):
    return MixtureSameFamily(Categorical(torch.tensor([pi, 1 - pi])), Normal(0.0, torch.tensor([sigma1, sigma2])))


PRIORS = [(0.5, 1.0, math.exp(-6)), (0.25, 0.3, 0.2), (0.75, 0.1, 2.0)]


@pytest.mark.parametrize("prior", PRIORS)
def test_prior_is_the_mixture(prior):
    value = (torch.linspace(-2, 2, 12).reshape(3, 4) ** 3).requires_grad_()
    stated, dense = TwoScaleNormal(*prior, torch.zeros(3, 4)), mixture(*prior)
    torch.testing.assert_close(stated.log_prob(value), dense.log_prob(value).sum())
    gradients = [torch.autograd.grad(f, value)[0] for f in (stated.log_prob(value), dense.log_prob(value).sum())]
    torch.testing.assert_close(*gradients)


def test_prior_draws_have_its_variance():
    draws = TwoScaleNormal(0.25, 2.0, 1.0, torch.zeros(2)).sample((20_000, 3))
    assert draws.shape == (20_000, 3, 2)
    torch.testing.assert_close(draws.var(0), torch.full((3, 2), 0.25 * 4 + 0.75), rtol=0.05, atol=0.0)


def test_sites_are_weights_and_biases_of_chosen_layers():
    method = BBB(vsd.nn.lenet5(image_size=12), num_data=10, include="fc*")
    names = [f"net.fc{i}.{name}" for i in (1, 2, 3) for name in ("weight", "bias")]
    with method.own_store():
        assert sorted(method.guide()) == sorted(names)
    assert {name.removeprefix("net._plain.") for name, _ in method.model.named_parameters()} == {
        f"conv{i}.{name}" for i in (1, 2) for name in ("weight", "bias")
    }


def test_a_layer_used_twice_is_drawn_once():
    shared = nn.Linear(3, 3)
    method = BBB(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 2)), num_data=10)
    with method.own_store():
        assert sorted(method.guide()) == ["net.0.bias", "net.0.weight", "net.4.bias", "net.4.weight"]
    method.step(torch.randn(4, 3), torch.arange(4) % 2)
    values = {"net.0.weight": 2 * torch.eye(3), "net.0.bias": torch.zeros(3)}
    network = pyro.poutine.condition(method.model.net, data=values)
    found = pyro.poutine.trace(network).get_trace(torch.ones(1, 3))
    W, b = (found.nodes[f"net.4.{name}"]["value"] for name in ("weight", "bias"))
    torch.testing.assert_close(found.nodes["_RETURN"]["value"], (2 * (2 * torch.ones(1, 3)).tanh()).tanh() @ W.mT + b)


def test_frozen_layers_stay_as_they_are():
    net = vsd.nn.mlp([3, 4, 2])
    net[0].requires_grad_(False)
    method = BBB(net, num_data=10)
    method.step(torch.randn(4, 3), torch.arange(4) % 2)
    plain = method.model.net._modules["_plain"]
    assert not plain[0].weight.requires_grad
    assert torch.equal(plain[0].weight, net[0].weight)


@pytest.mark.parametrize("kl_weight", [1.0, 0.3, lambda step: 0.0])
def test_loss_is_the_average_over_draws(kl_weight):
    """Two draws by hand from the same seed: scaled log-likelihood, and the densities at the draws."""
    net = nn.Linear(3, 2)
    method = BBB(net, num_data=50, kl_weight=kl_weight, sigma2=0.1)
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    pyro.set_rng_seed(3)
    loss = method.loss(x, y)
    pyro.set_rng_seed(3)
    weight = kl_weight(0) if callable(kl_weight) else kl_weight
    expected = torch.zeros(())
    for _ in range(2):
        draws = []
        kl = torch.zeros(())
        for p in (net.weight, net.bias):
            q = Normal(p.detach(), 0.05)
            w = q.sample()
            draws.append(w)
            kl += (q.log_prob(w) - mixture(0.5, 1.0, 0.1).log_prob(w)).sum()
        W, b = draws
        log_likelihood = Categorical(logits=x @ W.mT + b).log_prob(y).sum() * 50 / 10
        expected += (weight * kl - log_likelihood) / 2
    torch.testing.assert_close(loss.detach(), expected)


def regression():
    """Data, the exact mean, and the exact precision: the best factorised posterior has its diagonal."""
    torch.manual_seed(2)
    x = torch.randn(40, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]])
    y = x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(40)
    precision = x.mT @ x / 0.25 + torch.eye(2)
    return x, y, torch.linalg.solve(precision, x.mT @ y / 0.25), precision


def test_linear_regression_reaches_the_mean_field_optimum():
    """With both scales equal the prior is Gaussian, and the optimum known."""
    x, y, mean, precision = regression()
    method = BBB(nn.Linear(2, 1, bias=False), num_data=40, task="regression", noise=0.5, sigma2=1.0, lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.995)
    for _ in range(900):
        method.step(x, y)
        scheduler.step()
    loc, scale = method.guide._get_loc_and_scale("net.weight")
    torch.testing.assert_close(loc.detach().flatten(), mean, rtol=0.0, atol=0.02)
    torch.testing.assert_close(scale.detach().flatten(), precision.diagonal().rsqrt(), rtol=0.1, atol=0.0)


@pytest.mark.parametrize(("option", "value"), [("pi", 1.0), ("sigma1", 0.0), ("sigma2", -1.0), ("include", "conv*")])
def test_wrong_options(option, value):
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        BBB(vsd.nn.mlp([3, 4, 2]), num_data=10, **{option: value})


# ---- the local reparameterisation

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear, tokens": (lambda: nn.Linear(4, 3, bias=False), (5, 2, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (5, 2, 4, 4)),
    "conv, groups": (lambda: nn.Conv1d(4, 4, 2, groups=2, stride=2, bias=False), (5, 4, 6)),
    "conv, reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (5, 2, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2, output_padding=1), (5, 2, 3, 3)),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def layer_and_input(request):
    make, shape = request.param
    layer = LocalLayer(make(), prior_scale=0.7, init_scale=0.3)
    for value in layer.log_variance.values():
        value.data += 0.5 * torch.randn_like(value)
    return layer, torch.randn(shape)


def dense_draws(layer, x, num_samples):
    outputs = []
    for _ in range(num_samples):
        scales = {name: (0.5 * value).exp() for name, value in layer.log_variance.items()}
        draw = {name: p + scales[name] * torch.randn_like(p) for name, p in layer.mean.named_parameters()}
        outputs.append(linear_map(layer.mean, x, draw["weight"], draw.get("bias")))
    return torch.stack(outputs)


@torch.no_grad()
def test_moments_are_those_of_dense_draws(layer_and_input):
    layer, x = layer_and_input
    mean, variance = layer.mean(x), layer.variance(x)
    draws = dense_draws(layer, x, 4000)
    error = 6 * (variance / 4000).sqrt()
    assert ((draws.mean(0) - mean).abs() < error).all()
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=1e-9)


@torch.no_grad()
def test_draws_have_these_moments(layer_and_input):
    layer, x = layer_and_input
    mean, variance = layer.mean(x), layer.variance(x)
    copies = layer(x.expand(4000, *x.shape).flatten(0, 1))  # examples have noise of their own
    draws = copies.reshape(4000, len(x), *copies.shape[1:])
    assert ((draws.mean(0) - mean).abs() < 6 * (variance / 4000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=1e-9)


def test_linear_map_is_the_layer(layer_and_input):
    layer, x = layer_and_input
    mean = layer.mean
    torch.testing.assert_close(linear_map(mean, x, mean.weight, mean.bias), mean(x))


def test_kl_is_that_of_torch(layer_and_input):
    layer, _ = layer_and_input
    expected = sum(
        kl_divergence(Normal(p, (0.5 * layer.log_variance[name]).exp()), Normal(0.0, 0.7)).sum()
        for name, p in layer.mean.named_parameters()
    )
    torch.testing.assert_close(layer.kl(), expected)


def test_gradients_are_finite_where_inputs_are_zero():
    layer = LocalLayer(nn.Linear(3, 2, bias=False), 1.0, 0.1)
    layer(torch.zeros(4, 3)).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("kl_weight", [0.3, lambda step: 0.1 * (step + 3)])
def test_loss_pays_the_kl_once(kl_weight):
    method = BBBLocal(vsd.nn.mlp([3, 4, 2]), num_data=50, kl_weight=kl_weight)
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    torch.manual_seed(1)
    output = method.net(x)
    expected = method.negative_log_likelihood(output, y) + 0.3 * method.kl()
    torch.manual_seed(1)
    torch.testing.assert_close(method.loss(x, y), expected)


def test_local_linear_regression_reaches_the_mean_field_optimum():
    x, y, mean, precision = regression()
    method = BBBLocal(nn.Linear(2, 1, bias=False), num_data=40, task="regression", noise=0.5, lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.995)
    for _ in range(1000):
        method.step(x, y)
        scheduler.step()
    layer = method.layers[0]
    torch.testing.assert_close(layer.mean.weight.detach().flatten(), mean, rtol=0.0, atol=0.02)
    found = (-layer.log_variance["weight"].detach().flatten()).exp()
    torch.testing.assert_close(found, precision.diagonal(), rtol=0.1, atol=0.0)


def test_chosen_layers_alone_are_random():
    net = vsd.nn.lenet5(image_size=12)
    method = BBBLocal(net, num_data=10, exclude=nn.Conv2d)
    assert [type(method.net.conv1), type(method.net.fc3)] == [nn.Conv2d, LocalLayer]
    assert len(method.layers) == 3
    net.fc1.requires_grad_(False)
    assert len(BBBLocal(net, num_data=10, exclude=nn.Conv2d).layers) == 2


def test_a_layer_used_twice_stays_one():
    shared = nn.Linear(3, 3)
    method = BBBLocal(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 2)), num_data=10)
    assert method.net[0] is method.net[2]
    assert len(method.layers) == 2
    copy.deepcopy(method).step(torch.randn(4, 3), torch.arange(4) % 2)


def test_attention_keeps_its_own_projection():
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    method = BBBLocal(nn.Sequential(net, nn.Flatten(), nn.Linear(12, 2)), num_data=10)
    assert len(method.layers) == 3
    method.step(torch.randn(4, 3, 4), torch.arange(4) % 2)
