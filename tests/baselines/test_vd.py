"""Variational Gaussian dropout: the KL's polynomial against quadrature, the bound on α, the noise itself."""

import math

import pytest
import torch
from scipy import integrate
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines.vd import VD, log_uniform_kl, noise_kl


def kl_by_quadrature(alpha):
    """-½ log α + E log|ξ|, the KL without its constant, split where the integrand has its singularity."""
    std = math.sqrt(alpha)

    def integrand(xi):
        return math.log(abs(xi)) * math.exp(-0.5 * ((xi - 1) / std) ** 2) / (std * math.sqrt(2 * math.pi))

    ends = (min(1 - 12 * std, -0.1), 1 + 12 * std)
    parts = [(ends[0], 0.0), (0.0, 1.0), (1.0, ends[1])]
    return -0.5 * math.log(alpha) + sum(integrate.quad(integrand, a, b, limit=200)[0] for a, b in parts)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 0.9])
def test_kl_agrees_with_quadrature_up_to_its_constant(alpha):
    here = log_uniform_kl(torch.tensor([alpha, 1.0]))
    expected = kl_by_quadrature(alpha) - kl_by_quadrature(1.0)
    assert (here[0] - here[1]).item() == pytest.approx(expected, abs=0.03)


def test_alpha_is_held_at_one():
    # nothing to lose by noise: targets of pure noise, so that the KL alone pulls α up
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    method = VD(vsd.nn.mlp([3, 4, 2]), num_data=20, lr=0.2, init_alpha=0.9, kl_weight=20.0)
    site = "net.0.weight"
    assert method.guide.alpha(site).max() <= 1
    for _ in range(20):
        method.step(x, y)
        assert method.guide.alpha(site).max() <= 1
    assert method.guide.alpha(site).max() == 1


def test_loss_pays_one_kl_per_unit():
    method = VD(vsd.nn.mlp([3, 4, 2]), num_data=20, kl_weight=0.5)
    alphas = [method.guide.alpha(f"net.{i}.weight").detach() for i in (0, 2)]
    expected = [log_uniform_kl(alpha).sum() for alpha in alphas]
    method.step(torch.randn(5, 3), torch.arange(5) % 2)
    terms = method.elbo.terms
    torch.testing.assert_close(list(terms["kl"].values()), expected)
    assert terms["loss"].item() == pytest.approx(0.5 * sum(expected).item() - terms["log_likelihood"].item())


def test_kl_of_the_hook_is_scaled_as_the_default_one():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 2])), num_data=20)
    guide = vsd.VSDGuide(model, num_reflections=0)
    kls = []
    for kl_scale in ("unit", "weight"):
        elbo = vsd.VSD_ELBO(unit_kl=noise_kl, kl_scale=kl_scale)
        elbo.differentiable_loss(model, guide, torch.randn(5, 3), torch.arange(5) % 2)
        kls.append(elbo.terms["kl"]["net.0.weight"])
    torch.testing.assert_close(kls, [q * log_uniform_kl(guide.alpha("net.0.weight")).sum().detach() for q in (1, 2)])


def test_noise_is_gaussian_with_variance_alpha():
    net = nn.Linear(6, 1, bias=False)
    x = torch.randn(3, 6)
    method = VD(net, num_data=10, task="regression", noise=0.1)
    drawn = method.predict(x, num_samples=20_000, seed=0).samples
    terms = x * net.weight.detach()
    torch.testing.assert_close(drawn.mean(0), terms.sum(-1), rtol=0, atol=0.03)
    expected = (method.guide.alpha("net.weight").detach() * terms.square()).sum(-1)
    torch.testing.assert_close(drawn.var(0), expected, rtol=0.05, atol=0)
