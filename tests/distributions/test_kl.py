"""Every registered KL against dense Gaussians, quadrature or Monte Carlo; and its type in plates."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from scipy.integrate import quad
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence
from torch.testing import assert_close

from pyro_vsd.distributions import (
    ColumnProduct,
    HouseholderNormal,
    ScaleMixtureNormal,
    StructuredDropout,
)
from tests import dense
from tests.distributions.cases import CASES, COLUMN_CASES, dense_draw

EXACT = {"rtol": 1e-8, "atol": 1e-8}

def weight_normal(scale, shape):
    """The usual prior of a weight."""
    scale = torch.as_tensor(scale).expand(shape)
    return Independent(Normal(torch.zeros_like(scale), scale), len(shape))


NOISE_CASES = [case for case in CASES if case.law is HouseholderNormal]

on_noise_cases = pytest.mark.parametrize("case", NOISE_CASES, ids=str)
on_column_cases = pytest.mark.parametrize("case", COLUMN_CASES, ids=str)


def positive(*shape):
    return torch.rand(shape) + 0.3


def same_gradients(ours, twin, inputs):
    inputs = [p for p in inputs if p.numel()]
    weight = torch.randn_like(ours)
    assert_close(
        torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((twin * weight).sum(), inputs), **EXACT
    )


@on_noise_cases
@pytest.mark.parametrize("T", [0, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_noise_to_noise(case, T, batched):
    params = case.leaves()
    batch, K = case.batch_shape if batched else (), case.event_shape[0]
    other = {"loc": torch.randn(batch + (K,)), "alpha": positive(*batch, K), "vectors": torch.randn(batch + (T, K))}
    other = {name: value.requires_grad_() for name, value in other.items()}
    ours = kl_divergence(case.build(params), HouseholderNormal(**other))
    twin = kl_divergence(case.twin(params).law, dense.noise(other["alpha"], other["vectors"], other["loc"]))
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, [*params.values(), *other.values()])


@on_noise_cases
def test_noise_to_itself_is_zero(case):
    law = case.build()
    assert_close(kl_divergence(law, law), torch.zeros(case.batch_shape), **EXACT)


@on_noise_cases
@pytest.mark.parametrize("batched", [False, True])
def test_noise_to_an_independent_normal(case, batched):
    params, K = case.leaves(), case.event_shape[0]
    shape = (case.batch_shape if batched else ()) + (K,)
    loc, scale = torch.randn(shape, requires_grad=True), positive(*shape).requires_grad_()
    ours = kl_divergence(case.build(params), dist.Normal(loc, scale).to_event(1))
    twin = kl_divergence(case.twin(params).law, MultivariateNormal(loc, torch.diag_embed(scale.square())))
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, [*params.values(), loc, scale])


@on_noise_cases
@pytest.mark.parametrize("batched", [False, True])
def test_noise_to_a_multivariate_normal(case, batched):
    params, K = case.leaves(), case.event_shape[0]
    batch = case.batch_shape if batched else ()
    A = torch.randn(batch + (K, K))
    loc, cov = torch.randn(batch + (K,)), A @ A.mT + torch.eye(K)
    ours = kl_divergence(case.build(params), dist.MultivariateNormal(loc, cov))
    twin = kl_divergence(case.twin(params).law, MultivariateNormal(loc, cov))
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, params.values())


def column_twin(case, params, mean, scale):
    shape = case.batch_shape + case.event_shape
    twin = case.twin(params)
    mean, scale = (torch.as_tensor(v).expand(shape) for v in (mean, scale))
    return dense.column_kl(twin.columns, mean, scale, twin.noise_dim, case.event_dim)


@on_column_cases
@pytest.mark.parametrize("batched", [False, True])
def test_columns_to_independent_normals(case, batched):
    params = case.leaves()
    shape = (case.batch_shape if batched else ()) + case.event_shape
    mean, scale = torch.randn(shape, requires_grad=True), positive(*shape).requires_grad_()
    ours = kl_divergence(case.build(params), dist.Normal(mean, scale).to_event(case.event_dim))
    twin = column_twin(case, params, mean, scale)
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, [*params.values(), mean, scale])


@on_column_cases
def test_columns_to_one_normal_expanded(case):
    """``Normal(0, σ).expand(shape).to_event()``, and an event of two steps: how models write it."""
    prior = dist.Normal(0.0, 0.7).expand(case.event_shape).to_event(1).to_event(case.event_dim - 1)
    assert_close(kl_divergence(case.build(), prior), column_twin(case, case.params, 0.0, 0.7), **EXACT)


@on_column_cases
@pytest.mark.parametrize("per_entry", [False, True])
def test_columns_to_a_weight_normal(case, per_entry):
    params = case.leaves()
    scale = (positive(*case.event_shape) if per_entry else torch.tensor(0.7)).requires_grad_()
    ours, twin = kl_divergence(case.build(params), weight_normal(scale, case.event_shape)), None
    twin = column_twin(case, params, 0.0, scale)
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, [*params.values(), scale])


@on_column_cases
@pytest.mark.parametrize("batched", [False, True])
def test_columns_to_a_scale_mixture_given_z(case, batched):
    params = case.leaves()
    noise_dim = case.twin(params).noise_dim
    batch = case.batch_shape if batched else ()
    z, beta = positive(*batch, case.event_shape[noise_dim]).requires_grad_(), positive(*case.event_shape)
    ours = kl_divergence(case.build(params), ScaleMixtureNormal(z, noise_dim, case.event_shape, beta))
    twin = column_twin(case, params, 0.0, (dense.unit_shaped(z, noise_dim, case.event_dim) / beta).sqrt())
    assert ours.shape == case.batch_shape
    assert_close(ours, twin, **EXACT)
    same_gradients(ours, twin, [*params.values(), z])


@on_column_cases
def test_closed_form_is_the_mean_of_sampled_terms(case):
    """Draws of q_t scored under q* and the prior: unbiased for KL(q* ‖ p)."""
    law, prior = case.build(), weight_normal(0.7, case.event_shape)
    draws = dense_draw(law, (20_000,))
    terms = law.log_prob(draws) - prior.log_prob(draws)
    error = terms.std(0) / len(terms) ** 0.5
    assert ((terms.mean(0) - kl_divergence(law, prior)).abs() < 5 * error).all()


def test_formula_of_the_paper():
    theta, alpha, vectors = torch.randn(4, 3), positive(4), torch.randn(2, 4)
    s = dense.covariance(alpha, vectors).diagonal().unsqueeze(-1)
    sigma = 0.7
    formula = 0.5 * (
        math.log(sigma**2) - 1 - (alpha.unsqueeze(-1) * theta.square()).log() + theta.square() * (1 + s) / sigma**2
    )
    assert_close(
        kl_divergence(ColumnProduct(theta, alpha, vectors), weight_normal(sigma, (4, 3))), formula.sum(), **EXACT
    )


@pytest.mark.parametrize("law", [ColumnProduct, StructuredDropout])
def test_a_zero_weight_has_an_infinite_kl(law):
    theta = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert kl_divergence(law(theta, torch.ones(2)), weight_normal(1.0, (2, 2))) == math.inf


def test_a_weight_whose_square_underflows_has_a_finite_kl():
    theta = torch.full((2, 2), 1e-30, dtype=torch.float32)
    kl = kl_divergence(ColumnProduct(theta, torch.ones(2, dtype=torch.float32)), weight_normal(1.0, (2, 2)))
    assert_close(kl.double(), torch.tensor(4 * 0.5 * (-1 + 60 * math.log(10))), rtol=1e-5, atol=0)


PRIORS = {
    "Normal of a weight": lambda case, noise_dim: weight_normal(0.7, case.event_shape),
    "ScaleMixtureNormal": lambda case, noise_dim: ScaleMixtureNormal(
        positive(case.event_shape[noise_dim]), noise_dim, case.event_shape
    ),
    "Normal": lambda case, noise_dim: dist.Normal(0.0, 0.7).expand(case.event_shape).to_event(case.event_dim),
}


@on_column_cases
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_kl_survives_expand(case, prior):
    law = case.build()
    prior = prior(case, law.noise_dim)
    batch = (5,) + case.batch_shape
    kl = kl_divergence(law.expand(list(batch)), prior.expand(list(batch)))
    assert kl.shape == batch
    assert_close(kl, kl_divergence(law, prior).expand(batch))


@on_noise_cases
def test_kl_of_the_noise_survives_expand(case):
    law, prior = case.build(), dist.Normal(1.0, 2.0).expand(case.event_shape).to_event(1)
    batch = (5,) + case.batch_shape
    kl = kl_divergence(law.expand(list(batch)), prior.expand(list(batch)))
    assert_close(kl, kl_divergence(law, prior).expand(batch))


@on_column_cases
def test_trace_mean_field_elbo_uses_the_closed_form_in_a_plate(case):
    """Pyro samples the KL, silently, of laws whose type ``expand`` loses."""
    law, prior = case.build(), weight_normal(0.7, case.event_shape)
    plate = pyro.plate("p", 3, dim=-1 - len(case.batch_shape))

    def model():
        with plate:
            pyro.sample("w", prior.expand(case.batch_shape))

    def guide():
        with plate:
            pyro.sample("w", law)

    loss = TraceMeanField_ELBO().loss(model, guide)
    assert loss == pytest.approx(3 * kl_divergence(law, prior).sum().item(), rel=1e-10)


@pytest.mark.parametrize("case", [c for c in COLUMN_CASES if not c.batch_shape], ids=str)
def test_scaled_and_masked_plates_weigh_the_closed_form(case):
    law, prior = case.build(), weight_normal(0.7, case.event_shape)

    def model():
        with pyro.plate("p", 4), poutine.scale(scale=0.5), poutine.mask(mask=torch.tensor([True, False, True, False])):
            pyro.sample("w", prior)

    def guide():
        with pyro.plate("p", 4), poutine.scale(scale=0.5), poutine.mask(mask=torch.tensor([True, False, True, False])):
            pyro.sample("w", law)

    assert TraceMeanField_ELBO().loss(model, guide) == pytest.approx(kl_divergence(law, prior).item(), rel=1e-10)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (HouseholderNormal(1.0, torch.ones(3)), HouseholderNormal(1.0, torch.ones(1))),
        (HouseholderNormal(1.0, torch.ones(3)), dist.Normal(torch.zeros(1), 1.0).to_event(1)),
        (HouseholderNormal(1.0, torch.ones(3)), dist.MultivariateNormal(torch.zeros(2), torch.eye(2))),
        (ColumnProduct(torch.ones(3, 2), torch.ones(3)), dist.Normal(torch.zeros(3, 1), 1.0).to_event(2)),
        (ColumnProduct(torch.ones(3, 2), torch.ones(3)), weight_normal(1.0, (2, 3))),
        (StructuredDropout(torch.ones(3, 2), torch.ones(3)), ScaleMixtureNormal(torch.ones(3), -2, (3, 1))),
    ],
    ids=lambda law: type(law).__name__,
)
def test_event_shapes_must_agree(p, q):
    with pytest.raises(ValueError, match=r"\bkl_divergence\b"):
        kl_divergence(p, q)


@pytest.mark.parametrize(
    "prior",
    [
        dist.Laplace(torch.zeros(3, 2), 1.0).to_event(2),
        dist.Normal(torch.zeros(3, 2), 1.0).to_event(1),
        dist.MultivariateNormal(torch.zeros(3, 2), torch.eye(2)).to_event(1),
    ],
    ids=["Laplace", "rank 1", "MultivariateNormal"],
)
def test_other_priors_have_no_closed_form(prior):
    with pytest.raises(NotImplementedError):
        kl_divergence(ColumnProduct(torch.ones(3, 2), torch.ones(3)), prior)


# ---- the KL of q(z)

Z_PRIORS = {
    "InverseGamma": dist.InverseGamma(2.0, 1.5),
    "InverseGamma, small": dist.InverseGamma(0.5, 0.2),
    "Gamma": dist.Gamma(2.0, 1.5),
    "Gamma, small": dist.Gamma(0.5, 3.0),
    "HalfCauchy": dist.HalfCauchy(0.5),
    "HalfCauchy, wide": dist.HalfCauchy(3.0),
}


def quadrature_kl(loc, scale, prior):
    """∫ q(u) [log q(u) − log p(u)] du over u = log z."""

    def integrand(x):
        u = torch.tensor(loc + scale * x)
        log_p = prior.log_prob(u.exp()) + u
        log_q = -0.5 * x * x - math.log(scale) - 0.5 * math.log(2 * math.pi)
        return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) * (log_q - log_p).item()

    edges = [-12.0, -6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0, 12.0]
    return sum(quad(integrand, a, b, epsabs=1e-11, epsrel=1e-10)[0] for a, b in zip(edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize("prior", Z_PRIORS.values(), ids=Z_PRIORS.keys())
@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (-1.5, 0.3), (0.7, 0.6)])
def test_kl_of_z_equals_quadrature(prior, loc, scale):
    ours = kl_divergence(dist.LogNormal(loc, scale), prior)
    assert_close(ours, torch.tensor(quadrature_kl(loc, scale, prior)), **EXACT)


# The errors that the comment in kl.py states, at variances of log z of 1, 2, 4, 8.
@pytest.mark.parametrize(("delta", "stated"), [(1.0, 1.3e-11), (2.0, 1.1e-8), (4.0, 1.5e-6), (8.0, 5.1e-5)])
@pytest.mark.parametrize("loc", [-4.0, -1.0, -0.5, 0.0, 1.5, 4.0])
def test_half_cauchy_quadrature_keeps_its_stated_error(delta, stated, loc):
    prior = dist.HalfCauchy(1.0)
    ours = kl_divergence(dist.LogNormal(loc, delta**0.5), prior).item()
    assert abs(ours - quadrature_kl(loc, delta**0.5, prior)) < stated + 1e-10


@pytest.mark.parametrize("prior", Z_PRIORS.values(), ids=Z_PRIORS.keys())
def test_kl_of_z_equals_monte_carlo(prior):
    q = dist.LogNormal(torch.tensor([0.3, -0.5]), torch.tensor([0.5, 0.8]))
    z = q.sample((50_000,))
    terms = q.log_prob(z) - prior.log_prob(z)
    assert ((terms.mean(0) - kl_divergence(q, prior)).abs() < 5 * terms.std(0) / len(terms) ** 0.5).all()


@pytest.mark.parametrize("make", [dist.InverseGamma, dist.Gamma, lambda a, b: dist.HalfCauchy(a * b)])
def test_kl_of_z_broadcasts_and_sums_over_events(make):
    loc, scale = torch.randn(4, 3), positive(4, 3)
    a, b = positive(3), positive(3)
    each = torch.stack(
        [
            torch.stack([kl_divergence(dist.LogNormal(loc[i, k], scale[i, k]), make(a[k], b[k])) for k in range(3)])
            for i in range(4)
        ]
    )
    assert_close(kl_divergence(dist.LogNormal(loc, scale), make(a, b)), each, **EXACT)
    summed = kl_divergence(dist.LogNormal(loc, scale).to_event(1), make(a, b).expand((4, 3)).to_event(1))
    assert_close(summed, each.sum(-1), **EXACT)


@pytest.mark.parametrize("make", [dist.InverseGamma, dist.Gamma, lambda a, b: dist.HalfCauchy(a * b)])
def test_gradcheck_of_the_kl_of_z(make):
    def function(loc, scale, a, b):
        return kl_divergence(dist.LogNormal(loc, scale), make(a, b))

    inputs = torch.randn(3), positive(3), positive(3), positive(3)
    assert torch.autograd.gradcheck(function, tuple(v.requires_grad_() for v in inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [dist.InverseGamma, dist.Gamma, lambda a, b: dist.HalfCauchy(a)])
def test_kl_of_z_keeps_the_dtype(dtype, prior):
    one = torch.ones(2, dtype=dtype)
    assert kl_divergence(dist.LogNormal(0 * one, one), prior(one, one)).dtype == dtype
