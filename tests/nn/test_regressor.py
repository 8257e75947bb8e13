"""Gaussian observations: the four kinds of noise, several outputs, and the checks of shapes."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_vsd.nn import Regressor, bayesianize, mlp


def observed(model, x, y):
    """The observed site, and the network's output under the same draw."""
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    values = {name: site["value"] for name, site in trace.nodes.items() if name in model.latent_sites()}
    with model._pyro_context:
        output = poutine.condition(model.net, values)(x)
    return trace, output


X = torch.randn(5, 4)


def test_fixed_noise():
    y = torch.randn(5)
    trace, output = observed(Regressor(bayesianize(mlp([4, 6, 1])), 20, noise=0.3), X, y)
    expected = dist.Normal(output.squeeze(-1), 0.3).log_prob(y)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"] / 4, expected)


@pytest.mark.parametrize("num_outputs", [None, 2])
def test_learned_noise(num_outputs):
    model = Regressor(bayesianize(mlp([4, 6, 2])), 20, noise="learned", num_outputs=num_outputs)
    assert torch.equal(model.log_sigma, torch.full((num_outputs or 1,), -1.0))
    model.log_sigma.data.normal_()
    y = torch.randn(5, 2)
    trace, output = observed(model, X, y)
    expected = dist.Normal(output, model.log_sigma.exp()).log_prob(y).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"] / 4, expected)
    trace.nodes["y"]["log_prob_sum"].backward()
    assert model.log_sigma.grad.abs().min() > 0


@pytest.mark.parametrize("num_outputs", [None, 2])
def test_latent_noise(num_outputs):
    model = Regressor(bayesianize(mlp([4, 6, 2])), 20, noise="latent", num_outputs=num_outputs)
    y = torch.randn(5, 2)
    trace, output = observed(model, X, y)
    prior, sigma = trace.nodes["sigma"]["fn"], trace.nodes["sigma"]["value"]
    shape = () if num_outputs is None else (2,)
    assert (prior.batch_shape, prior.event_shape) == ((), shape)
    torch.testing.assert_close(prior.log_prob(sigma), dist.LogNormal(-1.0, 1.0).log_prob(sigma).sum())
    expected = dist.Normal(output, sigma).log_prob(y).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"] / 4, expected)


@pytest.mark.parametrize("D", [1, 3])
def test_heteroscedastic_noise(D):
    y = torch.randn(5) if D == 1 else torch.randn(5, D)
    trace, output = observed(Regressor(bayesianize(mlp([4, 6, 2 * D])), 20, noise="heteroscedastic"), X, y)
    mean, rho = output[:, :D], output[:, D:]
    variance = (10 * torch.tanh(rho / 10)).exp()
    expected = dist.Normal(mean, variance.sqrt()).log_prob(y.reshape(5, D)).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"] / 4, expected)


def test_heteroscedastic_noise_is_bounded():
    model = Regressor(bayesianize(nn.Linear(1, 2, bias=False)), 20, noise="heteroscedastic")
    x = torch.tensor([[-1e6], [1e6]])
    fixed = poutine.condition(model, {"net.weight": torch.tensor([[0.0], [1.0]])})
    law = poutine.trace(fixed).get_trace(x).nodes["y"]["fn"]
    torch.testing.assert_close(law.scale, torch.tensor([math.exp(-5.0), math.exp(5.0)]))


@pytest.mark.parametrize("noise", [0.3, "learned", "latent"])
def test_outputs_without_a_last_dimension(noise):
    net = bayesianize(nn.Sequential(mlp([4, 6, 1]), nn.Flatten(0)))
    model = Regressor(net, 20, noise=noise)
    assert model(X).shape == (5,)
    assert model(X, torch.randn(5)).shape == (5,)


@pytest.mark.parametrize(
    ("outputs", "shape"),
    [(1, (5, 2)), (1, (4,)), (2, (5,)), (2, (5, 3))],
)
def test_targets_of_the_wrong_shape(outputs, shape):
    with pytest.raises(ValueError, match=r"\by\b"):
        Regressor(bayesianize(mlp([4, 6, outputs])), 20)(X, torch.randn(shape))


def test_targets_take_the_dtype_of_the_outputs():
    model = Regressor(bayesianize(mlp([4, 6, 1])), 20)
    assert model(X, torch.randn(5, dtype=torch.float32)).dtype == torch.float64
    assert model(X, torch.arange(5)).dtype == torch.float64


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf, None])
def test_bad_noise(noise):
    with pytest.raises(ValueError, match=r"\bnoise\b"):
        Regressor(bayesianize(mlp([4, 1])), 20, noise=noise)


def test_unknown_noise():
    with pytest.raises(ValueError, match=r"\bnoise\b"):
        Regressor(bayesianize(mlp([4, 1])), 20, noise="lerned")


@pytest.mark.parametrize(("noise", "num_outputs"), [(0.1, 2), ("heteroscedastic", 2), ("learned", 0)])
def test_bad_num_outputs(noise, num_outputs):
    with pytest.raises(ValueError, match=r"\bnum_outputs\b"):
        Regressor(bayesianize(mlp([4, 1])), 20, noise=noise, num_outputs=num_outputs)


def test_num_outputs_against_the_network():
    model = Regressor(bayesianize(mlp([4, 3])), 20, noise="learned", num_outputs=2)
    with pytest.raises(ValueError, match=r"\bnum_outputs\b"):
        model(X)


def test_an_odd_number_of_heteroscedastic_outputs():
    model = Regressor(bayesianize(mlp([4, 3])), 20, noise="heteroscedastic")
    with pytest.raises(ValueError, match=r"\bnet\b"):
        model(X)


def test_dtype_follows_the_network():
    model = Regressor(bayesianize(mlp([4, 1]).to(torch.float32)), 20, noise="latent")
    assert model.latent_sites()["sigma"]["fn"].loc.dtype == torch.float32
    assert model.to(torch.float64)(X).dtype == torch.float64


@pytest.mark.parametrize("noise", ["learned", "latent"])
def test_targets_far_from_unit_scale(noise):
    model = Regressor(bayesianize(mlp([3, 4, 1])), num_data=40, noise=noise)
    x, y = torch.randn(20, 3), torch.randn(20)
    model(x, y)
    with pytest.warns(UserWarning, match=r"^y\b.*\brescaled\b"):
        model(x, 150 + 80 * y)
    model(x, 150 + 80 * y)  # once


def test_a_given_noise_suits_any_targets():
    model = Regressor(bayesianize(mlp([3, 4, 1])), num_data=40, noise=50.0)
    model(torch.randn(20, 3), 150 + 80 * torch.randn(20))
