"""Sites that are no weights: a Normal on the unconstrained space, for every support."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import init_to_value
from torch.distributions import kl_divergence
from torch.testing import assert_close

import pyro_vsd as vsd
from pyro_vsd.infer.mean_field import (
    mean_field_posterior,
    mean_field_transform,
    support_from_plain,
    support_to_plain,
)
from tests.infer import models

PRIORS = {
    "real": dist.Normal(0.0, 1.0),
    "real_vector": dist.Normal(0.0, 1.0).expand([4]).to_event(1),
    "correlated_vector": dist.MultivariateNormal(torch.ones(3), torch.eye(3) + 0.5),
    "positive": dist.LogNormal(0.0, 1.0),
    "positive_vector": dist.Gamma(2.0, 2.0).expand([3]).to_event(1),
    "positive_matrix": dist.Exponential(torch.ones(2, 3)).to_event(2),
    "half_normal": dist.HalfNormal(1.0),
    "unit_interval": dist.Beta(2.0, 3.0),
    "interval": dist.Uniform(-1.0, 3.0),
    "own_intervals": dist.Uniform(torch.zeros(3), torch.arange(1.0, 4.0)).to_event(1),
    "greater_than": dist.Pareto(torch.tensor(1.5), torch.tensor(3.0)),
    "simplex": dist.Dirichlet(torch.ones(4)),
    "corr_cholesky": dist.LKJCholesky(3, torch.tensor(2.0)),
    "lower_cholesky": dist.ImproperUniform(constraints.lower_cholesky, (), (3, 3)),
    "positive_definite": dist.ImproperUniform(constraints.positive_definite, (), (3, 3)),
    "circle": dist.VonMises(0.0, 2.0),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)


def setup(prior, **options):
    if isinstance(prior, dist.ImproperUniform):
        options["init_loc_fn"] = init_to_value(values={"s": torch.eye(3) * 2})
    return vsd.VSDGuide(models.extra_site(prior), **options).setup(*models.data())


@every_prior
def test_draws_lie_in_the_support(prior):
    guide = setup(prior, init_scale=1.0)
    law = guide.posterior("s")
    assert (law.batch_shape, law.event_shape) == (prior.batch_shape, prior.event_shape)
    draws = law.rsample((50,))
    assert draws.shape == (50, *prior.event_shape)
    assert bool(prior.support.check(draws).all())
    assert draws.requires_grad
    assert guide.sites["s"].kind == "mean_field"


@every_prior
def test_density_is_that_of_the_transformed_normal(prior):
    guide = setup(prior)
    law, transform = guide.posterior("s"), mean_field_transform(prior.support)
    value = law.rsample()
    raw = transform.inv(value)
    inner = torch.distributions.Normal(guide.loc.s, guide.log_scale.s.exp()).log_prob(raw)
    jacobian = transform.log_abs_det_jacobian(raw, value)
    assert_close(law.log_prob(value), inner.sum() - jacobian.sum())


@every_prior
def test_training_moves_both_parameters(prior):
    model, (x, y) = models.extra_site(prior), models.data()
    guide = setup(prior)
    before = models.snapshot(guide)
    losses = models.train(model, guide, x, y)
    assert all(map(math.isfinite, losses))
    assert models.moved(before, guide) == set(before)


@every_prior
def test_the_median_starts_inside_the_support(prior):
    median = setup(prior).median()["s"]
    assert median.shape == prior.event_shape
    assert bool(prior.support.check(median).all())


@pytest.mark.parametrize("name", ["lower_cholesky", "positive_definite"])
def test_matrix_transforms_against_autograd(name):
    transform = mean_field_transform(getattr(constraints, name))
    raw = torch.randn(6)
    value = transform(raw)
    assert_close(transform.inv(value), raw)
    rows, columns = torch.tril_indices(3, 3)
    jacobian = torch.autograd.functional.jacobian(lambda v: transform(v)[rows, columns], raw)
    assert_close(transform.log_abs_det_jacobian(raw, value), torch.linalg.slogdet(jacobian).logabsdet)


def test_a_discrete_site_is_refused():
    with pytest.raises(ValueError, match=r"\bs\b"):
        setup(dist.Bernoulli(0.5))


KNOWN = ["real", "real_vector", "positive", "positive_vector"]


@pytest.mark.parametrize("name", KNOWN)
def test_known_kls_are_used(name):
    """A closed form leaves no noise in the KL, and it is the one that Monte Carlo gives."""
    prior, (x, y) = PRIORS[name], models.data()
    model, guide, elbo = models.extra_site(prior), setup(prior, init_scale=0.4), vsd.VSD_ELBO()
    kls = []
    for _ in range(2):
        elbo.loss(model, guide, x, y)
        kls.append(elbo.terms["kl"]["s"])
    assert torch.equal(*kls)
    assert_close(kls[0], kl_divergence(guide.posterior("s"), prior))
    with torch.no_grad():
        draws = guide.posterior("s").sample((20_000,))
        estimates = guide.posterior("s").log_prob(draws) - prior.log_prob(draws)
    assert float((estimates.mean() - kls[0]).abs()) < 4.5 * float(estimates.std()) / math.sqrt(20_000)


@pytest.mark.parametrize("name", ["unit_interval", "interval", "simplex", "corr_cholesky", "greater_than"])
def test_other_kls_are_sampled_without_bias(name):
    prior, (x, y) = PRIORS[name], models.data()
    model, guide = models.extra_site(prior), setup(prior, init_scale=0.4)
    elbo, n = vsd.VSD_ELBO(), 200
    sampled = []
    for _ in range(n):
        elbo.loss(model, guide, x, y)
        sampled.append(elbo.terms["kl"]["s"])
    sampled = torch.stack(sampled)
    with torch.no_grad():
        draws = [guide.posterior("s").sample() for _ in range(2000)]
        exact = torch.stack([guide.posterior("s").log_prob(d) - prior.log_prob(d) for d in draws])
    error = math.sqrt(float(sampled.var()) / n + float(exact.var()) / 2000)
    assert float((sampled.mean() - exact.mean()).abs()) < 4.5 * error


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_sites_in_plates(shape):
    def model(x, y):
        with pyro.plate("rows", 3, dim=-1), pyro.plate("cols", 4, dim=-2):
            pyro.sample("s", dist.Gamma(torch.full(shape, 2.0), 1.0).to_event(len(shape)))
        models.one_weight(x, y)

    x, y = models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    assert guide.posterior("s").batch_shape == (4, 3)
    assert guide.posterior("s").event_shape == shape
    assert guide.median()["s"].shape == (4, 3, *shape)
    assert all(map(math.isfinite, models.train(model, guide, x, y)))
    assert math.isfinite(Trace_ELBO().loss(model, guide, x, y))


def test_real_matrices_in_plates_are_weights():
    def model(x, y):
        with pyro.plate("rows", 3, dim=-1):
            pyro.sample("s", dist.Normal(torch.zeros(2, 5), 1.0).to_event(2))
        models.one_weight(x, y)

    guide = vsd.VSDGuide(model).setup(*models.data())
    assert guide.sites["s"].kind == "weight"
    assert guide.posterior("s").batch_shape == (3,)


SUPPORTS = {
    "real": constraints.real,
    "positive": constraints.positive,
    "nonnegative": constraints.nonnegative,
    "unit_interval": constraints.unit_interval,
    "simplex": constraints.simplex,
    "lower_cholesky": constraints.lower_cholesky,
    "corr_cholesky": constraints.corr_cholesky,
    "positive_definite": constraints.positive_definite,
    "interval": constraints.interval(-1.0, torch.tensor(2.0)),
    "half_open": constraints.half_open_interval(0.0, 2.0),
    "greater_than": constraints.greater_than(1.0),
    "greater_than_eq": constraints.greater_than_eq(1.0),
    "less_than": constraints.less_than(1.0),
    "independent": constraints.independent(constraints.greater_than(2.0), 2),
    "real_vector": constraints.real_vector,
}


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_supports_survive_plain_types(support):
    plain = support_to_plain(support)
    again = support_from_plain(plain)
    assert type(again) is type(support)
    assert again.event_dim == support.event_dim
    for bound in ("lower_bound", "upper_bound"):
        assert float(getattr(again, bound, 0)) == float(getattr(support, bound, 0))
    assert support_to_plain(again) == plain


@pytest.mark.parametrize(
    "support",
    [constraints.interval(torch.zeros(2), torch.ones(2)), constraints.sphere, constraints.greater_than(torch.ones(3))],
    ids=["bounds_of_their_own", "sphere", "greater_than_tensor"],
)
def test_supports_that_plain_types_cannot_hold(support):
    assert support_to_plain(support) is None
    assert support_to_plain(constraints.independent(support, 1)) is None


@pytest.mark.parametrize(
    ("support", "kind"),
    [
        (constraints.real, dist.Normal),
        (constraints.positive, dist.LogNormal),
        (constraints.nonnegative, dist.LogNormal),
        (constraints.greater_than(1.0), dist.TransformedDistribution),
    ],
)
def test_kinds_of_laws(support, kind):
    assert type(mean_field_posterior(torch.zeros(2), torch.ones(2), support, 0)) is kind
