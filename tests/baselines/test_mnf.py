"""Multiplicative normalising flows: the flow's determinant, draws against dense ones, the bound on the KL."""

import copy

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import pyro_vsd as vsd
from pyro_vsd.baselines.layers import linear_map
from pyro_vsd.baselines.mnf import MNF, Flow, MultiplicativeFlowLayer


def shake(module, scale=0.3):
    with torch.no_grad():
        for p in module.parameters():
            p += scale * torch.randn_like(p)
    return module


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("num_flows", [1, 2, 3])
def test_flow_density_has_the_jacobian_of_autograd(size, num_flows):
    flow = shake(Flow(size, num_flows, 8, torch.zeros(1)))
    base = dist.Normal(torch.randn(size), torch.rand(size) + 0.5).to_event(1)
    pushed = flow.push(base)

    def push(x):
        for step in getattr(pushed, "transforms", []):
            x = step(x)
        return x

    x = base.sample()
    y = push(x)
    log_det = torch.autograd.functional.jacobian(push, x).slogdet().logabsdet
    flow.forget()
    torch.testing.assert_close(pushed.log_prob(y.detach()), base.log_prob(x) - log_det)


def test_draw_and_density_agree():
    """The density of a fresh draw, from what the couplings remember, is that of the same number given anew."""
    flow = shake(Flow(5, 2, 8, torch.zeros(1)))
    pushed = flow.push(dist.Normal(torch.zeros(5), torch.ones(5)).to_event(1))
    z = pushed.rsample()
    remembered = pushed.log_prob(z)
    flow.forget()
    torch.testing.assert_close(remembered, pushed.log_prob(z.detach().clone()))


def test_flow_starts_as_the_identity():
    flow = Flow(4, 3, 8, torch.zeros(1))
    base = dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1)
    z = torch.randn(4)
    torch.testing.assert_close(flow.push(base).log_prob(z), base.log_prob(z.flip(0)))


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear, one input": (lambda: nn.Linear(1, 3, bias=False), (5, 1)),
    "conv": (lambda: nn.Conv2d(2, 3, 2), (5, 2, 2, 2)),
    "conv, groups": (lambda: nn.Conv2d(2, 4, 2, groups=2, bias=False), (5, 2, 2, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 4, 2, groups=2), (5, 2, 1)),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def layer_and_input(request):
    make, shape = request.param
    return shake(MultiplicativeFlowLayer(make(), 2, 6, 0.7, 0.3, 0.3), 0.2), torch.randn(shape)


def dense_weight(layer, z):
    """The mean of the weight given z: z along its axis."""
    shape = [1] * layer.mean.weight.dim()
    shape[layer.axis] = -1
    return z.reshape(shape) * layer.mean.weight


@torch.no_grad()
def test_draws_have_the_moments_of_dense_draws(layer_and_input):
    layer, x = layer_and_input
    scales = {name: (0.5 * value).exp() for name, value in layer.log_variance.items()}
    dense = []
    for z in layer.z_distribution().sample((4000,)):
        weight = dense_weight(layer, z) + scales["weight"] * torch.randn_like(scales["weight"])
        bias = layer.mean.bias
        bias = None if bias is None else bias + scales["bias"] * torch.randn_like(bias)
        dense.append(linear_map(layer.mean, x, weight, bias))
    dense, copies = torch.stack(dense), layer(x.expand(4000, *x.shape).flatten(0, 1))
    local = copies.reshape(dense.shape)  # examples have noise of their own
    error = 6 * (dense.var(0) / 2000).sqrt()
    assert ((dense.mean(0) - local.mean(0)).abs() < error).all()
    torch.testing.assert_close(local.var(0), dense.var(0), rtol=0.25, atol=0.0)


def test_kl_given_z_is_that_of_torch(layer_and_input):
    layer, _ = layer_and_input
    torch.manual_seed(5)
    bound = layer.kl()
    torch.manual_seed(5)
    pushed = layer.z_distribution()
    z = pushed.rsample()
    log_q = pushed.log_prob(z)
    means = {"weight": dense_weight(layer, z), "bias": layer.mean.bias}
    kl = sum(
        kl_divergence(Normal(m, (0.5 * layer.log_variance[n]).exp()), Normal(0.0, 0.7)).sum()
        for n, m in means.items()
        if m is not None
    )
    weight = means["weight"].movedim(layer.axis, 0).flatten(1)
    variance = layer.log_variance["weight"].exp().movedim(layer.axis, 0).flatten(1)
    seen = layer.direction @ weight
    seen = seen + (layer.direction**2 @ variance).sqrt() * torch.randn_like(seen)
    torch.testing.assert_close(bound, kl + log_q - layer.auxiliary_log_prob(z, seen))


def test_bound_is_above_the_kl_and_closes_as_r_learns():
    """One weight: z and W are jointly Gaussian, so the KL is known, and so is the best r."""
    layer = MultiplicativeFlowLayer(nn.Linear(1, 1, bias=False), 2, 6, 1.0, 0.3, 0.3)
    nn.init.constant_(layer.mean.weight, 0.8)
    exact = kl_divergence(Normal(0.8, (0.8**2 * 0.3**2 + 0.3**2) ** 0.5), Normal(0.0, 1.0)).item()

    def bound():
        with torch.no_grad():
            draws = torch.stack([layer.kl() for _ in range(2000)])
        return draws.mean().item(), draws.std().item() / 2000**0.5

    before, error = bound()
    assert before > exact + 3 * error
    optimizer = torch.optim.Adam([layer.direction, layer.r_loc, layer.r_log_scale], lr=0.02)
    for _ in range(500):
        optimizer.zero_grad()
        torch.stack([layer.kl() for _ in range(3)]).mean().backward()
        optimizer.step()
    after, error = bound()
    assert after > exact - 3 * error
    assert after - exact < 0.25 * (before - exact)


def test_keeps_no_graph_between_steps():
    method = MNF(vsd.nn.mlp([4, 8, 3]), num_data=10, hidden=5)
    method.step(torch.randn(5, 4), torch.arange(5) % 3)
    copy.deepcopy(method).step(torch.randn(5, 4), torch.arange(5) % 3)


@pytest.mark.parametrize("option", ["num_flows", "hidden"])
def test_wrong_options(option):
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        MNF(vsd.nn.mlp([3, 4, 2]), num_data=10, **{option: 0})
