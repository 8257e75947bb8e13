"""The hierarchical prior: its objective against brute force, and that it tells relevant inputs from irrelevant ones."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_vsd as vsd
from pyro_vsd.nn import HierarchicalPrior, Regressor, bayesianize, mlp
from tests import dense

K, Q, B, N, SIGMA = 3, 2, 4, 10, 0.7
HYPERPRIORS = {
    "inverse_gamma": (HierarchicalPrior("inverse_gamma", 2.0, 1.5, precision=2.0), dist.InverseGamma(2.0, 1.5)),
    "gamma": (HierarchicalPrior("gamma", 2.0, 1.5, precision=2.0), dist.Gamma(2.0, 1.5)),
    "half_cauchy": (HierarchicalPrior("half_cauchy", 0.8, precision=2.0), dist.HalfCauchy(0.8)),
}


class Parts:
    """The parameters of a one-layer model, for formulas written out with dense matrices."""

    def __init__(self, guide, site="net.weight"):
        law, z = guide.posterior(site), guide.scale_posterior(site).base_dist
        self.theta = law.theta.detach()  # (Q, K)
        self.z = dist.LogNormal(z.loc.detach(), z.scale.detach())
        self.Sigma = dense.covariance(law.alpha.detach(), law.vectors.detach())
        self.s = self.Sigma.diagonal()

    def beta(self, kind):
        beta_star = 1 / (self.theta.square() * (1 + self.s))
        return {"paper": beta_star, "full": beta_star / self.z.mean, "model": torch.full((Q, K), 2.0)}[kind]


def make(prior, T=2):
    model = Regressor(bayesianize(nn.Linear(K, Q), prior), num_data=N, noise=SIGMA)
    guide = vsd.VSDGuide(model, num_reflections=T, init_alpha=0.5, init_alpha_spread=1.0)
    with torch.no_grad():
        for parameter in guide.z_loc.parameters():
            parameter.copy_(0.4 * torch.randn(K))
        for parameter in guide.z_log_scale.parameters():
            parameter.copy_(torch.tensor([0.3, 0.6, 0.9]).log())
        model.net.bias.normal_()
    return model, guide


def sampled_kl(parts, hyperprior, beta, draws=400_000):
    """E log q*(W | z) q(z) / p(W | z) p(z) by plain sampling: mean and standard error."""
    z = parts.z.sample((draws,))  # (S, K)
    ratio = (parts.z.log_prob(z) - hyperprior.log_prob(z)).sum(-1)
    for j in range(Q):
        factor = z * parts.theta[j]  # W_:j = factor ⊙ ξ
        covariance = factor.unsqueeze(-1) * parts.Sigma * factor.unsqueeze(-2)
        law = MultivariateNormal(factor, covariance_matrix=covariance, validate_args=False)
        W = law.sample()
        prior = dist.Normal(0.0, (z / beta[j]).sqrt())
        ratio = ratio + law.log_prob(W) - prior.log_prob(W).sum(-1)
    return ratio.mean().item(), (ratio.std() / math.sqrt(draws)).item()


@pytest.mark.parametrize("name", HYPERPRIORS)
@pytest.mark.parametrize("beta", ["paper", "full", "model"])
@pytest.mark.parametrize("T", [0, 2])
def test_kl_equals_brute_force(name, beta, T):
    prior, hyperprior = HYPERPRIORS[name]
    if beta == "full":
        prior = HierarchicalPrior(prior.hyperprior, prior.a, prior.b, beta="full", precision=2.0)
    model, guide = make(prior, T)
    elbo = vsd.VSD_ELBO(kl_scale="weight", prior="model" if beta == "model" else "empirical_bayes")
    x, y = torch.randn(B, K), torch.randn(B, Q)
    elbo.loss(model, guide, x, y)
    first = sum(elbo.terms["kl"].values()).item()
    expected, error = sampled_kl(Parts(guide), hyperprior, Parts(guide).beta(beta))
    if beta == "model":  # given a draw of z there the closed form is conditional on it: average
        values = []
        for _ in range(1000):
            elbo.loss(model, guide, x, y)
            values.append(sum(elbo.terms["kl"].values()).item())
        values = torch.tensor(values)
        first, error = values.mean().item(), math.hypot(error, (values.std() / math.sqrt(len(values))).item())
    assert first == pytest.approx(expected, abs=5 * error)


@pytest.mark.parametrize("name", HYPERPRIORS)
def test_objective_equals_brute_force(name):
    """The whole of it: z once per batch, ξ once per example, the likelihood scaled to all data."""
    prior, hyperprior = HYPERPRIORS[name]
    model, guide = make(prior)
    parts = Parts(guide)
    x, y = torch.randn(B, K), torch.randn(B, Q)
    draws = 100_000
    z = parts.z.sample((draws, 1))  # (S, 1, K)
    xi = MultivariateNormal(torch.ones(K), covariance_matrix=parts.Sigma).sample((draws, B))
    mean = (x * z * xi) @ parts.theta.mT + model.net.bias.detach()
    likelihood = N / B * dist.Normal(mean, SIGMA).log_prob(y).sum((-1, -2))
    kl, kl_error = sampled_kl(parts, hyperprior, parts.beta("paper"))
    expected = kl - likelihood.mean().item()

    elbo = vsd.VSD_ELBO(kl_scale="weight")
    losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(1500)])
    errors = [kl_error, (likelihood.std() / math.sqrt(draws)).item(), (losses.std() / math.sqrt(len(losses))).item()]
    assert losses.mean().item() == pytest.approx(expected, abs=5 * math.hypot(*errors))


@pytest.mark.parametrize("name", HYPERPRIORS)
def test_unit_scale_divides_by_the_columns(name):
    model, guide = make(HYPERPRIORS[name][0])
    x, y = torch.randn(B, K), torch.randn(B, Q)
    terms = {}
    for scale in ("unit", "weight"):
        elbo = vsd.VSD_ELBO(kl_scale=scale)
        elbo.loss(model, guide, x, y)
        terms[scale] = elbo.terms["kl"]
    torch.testing.assert_close(terms["weight"]["net.weight"], Q * terms["unit"]["net.weight"])
    torch.testing.assert_close(terms["weight"]["net.weight_z"], terms["unit"]["net.weight_z"])


# ---- relevance


def half_relevant(seed, rows=300):
    """Ten inputs; the first five matter, equally, the others not at all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 10, generator=generator)
    slopes = torch.randn(5, generator=generator).sign()
    y = torch.sin(0.7 * x[:, :5] @ slopes) + 0.1 * torch.randn(rows, generator=generator)
    return x, (y - y.mean()) / y.std()


def trained(seed, kind, prior, T=2, steps=500):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    x, y = half_relevant(seed)
    model = Regressor(bayesianize(mlp([10, 30, 1]), HierarchicalPrior(kind)), num_data=len(x), noise=0.3)
    guide = vsd.VSDGuide(model, num_reflections=T)
    loss = vsd.VSD_ELBO(prior=prior)(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    return guide


def separates(score):
    return bool(score[:5].min() > score[5:].max())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", HYPERPRIORS)
def test_norm_of_scaled_weights_tells_relevance(kind, seed):
    guide = trained(seed, kind, "empirical_bayes")
    assert separates(guide.mean()["net.0.weight"].norm(dim=0))  # |E[z] Θ| of each input


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", HYPERPRIORS)
def test_scales_and_noise_tell_relevance_under_the_stated_prior(kind, seed):
    guide = trained(seed, kind, "model")
    means = guide.mean()
    assert separates(means["net.0.weight"].norm(dim=0))
    assert separates(means["net.0.weight_z"])  # E[z] itself
    assert separates(-guide.noise("net.0.weight").variance)


@pytest.mark.parametrize("seed", range(2))
def test_ard_variational_dropout_with_a_hierarchy(seed):
    """T = 0: there α is the noise of each input, and tells relevance too."""
    guide = trained(seed, "gamma", "model", T=0, steps=400)
    assert separates(-guide.alpha("net.0.weight").detach())
    assert separates(guide.mean()["net.0.weight_z"])
