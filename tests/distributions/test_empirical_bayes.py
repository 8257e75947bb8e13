"""The KL terms whose prior scale is at its optimum: dense twins and the properties that MATHS proves of them."""

import math

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence
from torch.testing import assert_close

from pyro_vsd.distributions import (
    ColumnProduct,
    ScaleMixtureNormal,
    StructuredDropout,
    beta_star,
    empirical_bayes_kl,
    hierarchical_kl,
)
from tests import dense

EXACT = {"rtol": 1e-8, "atol": 1e-8}
SIZES = pytest.mark.parametrize(("T", "K"), [(0, 4), (1, 1), (1, 4), (3, 5), (5, 5)])
BATCHES = pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)


@SIZES
@BATCHES
def test_empirical_bayes_kl_equals_the_dense_twin(batch, T, K):
    alpha = (torch.rand(batch + (K,)) + 0.1).requires_grad_()
    vectors = torch.randn(batch + (T, K), requires_grad=True)
    ours, twin = empirical_bayes_kl(alpha, vectors, 7), dense.empirical_bayes_kl(alpha, vectors, 7)
    assert ours.shape == batch
    assert_close(ours, twin, **EXACT)
    inputs = (alpha, vectors) if T else (alpha,)
    assert_close(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(twin.sum(), inputs), **EXACT)


@pytest.mark.parametrize("T", [0, 2])
def test_gradcheck(T):
    inputs = (torch.rand(2, 3) + 0.1).requires_grad_(), torch.randn(2, T, 3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, v: empirical_bayes_kl(a, v, 3), inputs)


def test_no_vectors_is_no_reflection():
    alpha = torch.rand(5) + 0.1
    assert_close(empirical_bayes_kl(alpha, None, 3), empirical_bayes_kl(alpha, torch.zeros(0, 5), 3))
    assert_close(empirical_bayes_kl(alpha, None, 3), empirical_bayes_kl(alpha, torch.zeros(2, 5), 3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)], ids=str)
def test_small_dtypes_lose_nothing_but_their_own_rounding(dtype, tolerance):
    alpha, vectors = (torch.rand(500) * 20).exp().to(dtype), torch.randn(3, 500).to(dtype)
    kl = empirical_bayes_kl(alpha, vectors, 10)
    assert kl.dtype == torch.float32
    assert_close(kl.double(), empirical_bayes_kl(alpha.double(), vectors.double(), 10), rtol=tolerance, atol=0)


@pytest.mark.parametrize("alpha", [1e-12, 1e12])
def test_limits(alpha):
    """It goes to zero as alpha grows, and as -½ Q log alpha where alpha vanishes."""
    kl = empirical_bayes_kl(torch.full((4,), alpha), torch.randn(2, 4), 3)
    assert_close(kl, torch.tensor(1.5 * 4 * math.log1p(1 / alpha)), rtol=1e-6, atol=1e-6)


def test_equal_alphas_make_the_vectors_useless():
    vectors = torch.randn(2, 5, requires_grad=True)
    empirical_bayes_kl(torch.full((5,), 0.3), vectors, 4).backward()
    assert vectors.grad.abs().max() < 1e-12


def test_the_terms_of_a_law_hold_the_same_sum():
    theta, alpha, vectors = torch.ones(4, 3), torch.rand(4) + 0.1, torch.randn(2, 4)
    law = StructuredDropout(theta, alpha, vectors)
    assert_close(1.5 * law.terms.log_ratio, empirical_bayes_kl(alpha, vectors, 3), **EXACT)
    assert_close(1.5 * law.expand((2,)).terms.log_ratio, empirical_bayes_kl(alpha, vectors, 3), **EXACT)


# Batch shape, event shape, noise axis.
WEIGHTS = [((), (4, 3), -2), ((), (3, 4), -1), ((2,), (4, 3), -2), ((), (4, 2, 3), 0), ((2, 3), (2, 4, 3, 1), 1)]


@pytest.mark.parametrize(("batch", "event", "noise_dim"), WEIGHTS)
@pytest.mark.parametrize("T", [0, 2])
def test_beta_star_equals_the_dense_twin(batch, event, noise_dim, T):
    K = event[noise_dim]
    theta, alpha, vectors = torch.randn(batch + event), torch.rand(batch + (K,)) + 0.1, torch.randn(batch + (T, K))
    s = dense.covariance(alpha, vectors).diagonal(dim1=-1, dim2=-2)
    axis = noise_dim if noise_dim < 0 else noise_dim - len(event)
    twin = 1 / (theta.square() * (1 + dense.unit_shaped(s, axis, len(event))))
    assert_close(beta_star(theta, alpha, vectors, noise_dim), twin, **EXACT)


@pytest.mark.parametrize(("batch", "event", "noise_dim"), WEIGHTS)
def test_the_closed_form_is_the_kl_at_beta_star(batch, event, noise_dim):
    K = event[noise_dim]
    theta, alpha, vectors = torch.randn(batch + event), torch.rand(batch + (K,)) + 0.1, torch.randn(batch + (2, K))
    law = ColumnProduct(theta, alpha, vectors, noise_dim)
    prior = dist.Normal(0.0, beta_star(theta, alpha, vectors, noise_dim).rsqrt()).to_event(len(event))
    assert_close(empirical_bayes_kl(alpha, vectors, law.num_columns), kl_divergence(law, prior), **EXACT)


@st.composite
def noises(draw, min_alpha=1e-6, max_alpha=1e6):
    """``alpha (K,)`` and ``vectors (T, K)``, zero and parallel vectors included."""
    K, T = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    logs = st.floats(math.log(min_alpha), math.log(max_alpha))
    alpha = torch.tensor(draw(st.lists(logs, min_size=K, max_size=K))).exp()
    entries = st.floats(-10, 10, allow_subnormal=False)
    rows = draw(st.lists(st.lists(entries, min_size=K, max_size=K), min_size=T, max_size=T))
    return alpha, torch.tensor(rows).reshape(T, K)


@given(noises(1e-3, 1e3), st.integers(1, 4), st.integers(0, 2**32))
def test_beta_star_is_the_best_of_all_precisions(noise, Q, seed):
    alpha, vectors = noise
    generator = torch.Generator().manual_seed(seed)
    theta = torch.rand(len(alpha), Q, generator=generator) + 0.1
    best = empirical_bayes_kl(alpha, vectors, Q)
    law = ColumnProduct(theta, alpha, vectors)
    beta = beta_star(theta, alpha, vectors)
    assert_close(kl_divergence(law, dist.Normal(0.0, beta.rsqrt()).to_event(2)), best, **EXACT)
    other = beta * torch.randn(len(alpha), Q, generator=generator).exp()
    assert kl_divergence(law, dist.Normal(0.0, other.rsqrt()).to_event(2)) >= best - 1e-8


@given(noises(), st.integers(1, 100))
def test_a_rotation_never_lowers_the_kl(noise, Q):
    alpha, vectors = noise
    identity = empirical_bayes_kl(alpha, None, Q)
    # s is exact to float64's eps times the largest alpha
    slack = 1e-9 + Q * 1e-15 * float(alpha.max()) * len(alpha)
    assert empirical_bayes_kl(alpha, vectors, Q) >= identity - slack
    assert identity > 0


@given(noises(), st.integers(1, 100), st.data())
def test_reflections_in_basis_vectors_give_ard_variational_dropout(noise, Q, data):
    alpha, _ = noise
    K = len(alpha)
    axes = data.draw(st.lists(st.integers(0, K - 1), max_size=4))
    vectors = torch.eye(K)[axes] * 3.0
    ard = 0.5 * (1 / alpha).log1p().sum()
    # α and s meet as a difference of numbers of the size of the largest α
    slack = 1e-10 + 1e-15 * float(alpha.max())
    assert_close(empirical_bayes_kl(alpha, vectors.reshape(-1, K), Q) / Q, ard, rtol=1e-10, atol=slack)


# ---- the hierarchy


@SIZES
@BATCHES
@pytest.mark.parametrize("beta", ["paper", "full"])
def test_hierarchical_kl_equals_its_formula(batch, T, K, beta):
    alpha, vectors = torch.rand(batch + (K,)) + 0.1, torch.randn(batch + (T, K))
    loc, scale = torch.randn(batch + (K,)), torch.rand(batch + (K,)) + 0.1
    delta = scale.square()
    per_unit = (loc + delta / 2).exp() - loc - 1 if beta == "paper" else delta / 2
    twin = dense.empirical_bayes_kl(alpha, vectors, 7) + 3.5 * per_unit.sum(-1)
    assert_close(hierarchical_kl(alpha, vectors, loc, scale, 7, beta), twin, **EXACT)


@pytest.mark.parametrize("beta", ["paper", "full"])
def test_gradcheck_of_hierarchical_kl(beta):
    inputs = torch.rand(2, 3) + 0.1, torch.randn(2, 2, 3), torch.randn(2, 3), torch.rand(2, 3) + 0.1
    function = lambda *tensors: hierarchical_kl(*tensors, 3, beta)  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(v.requires_grad_() for v in inputs))


def conditional_kl(theta, alpha, vectors, z, beta):
    """KL(q*(W | z) ‖ p(W | z)) for draws ``z (S, K)``."""
    posterior = StructuredDropout(theta, alpha, vectors, scale=z)
    return kl_divergence(posterior, ScaleMixtureNormal(z, -2, theta.shape, beta))


@given(noises(1e-2, 1e2), st.floats(-1, 1), st.floats(0.1, 0.8), st.integers(0, 2**32))
@settings(max_examples=30)
def test_the_expectation_agrees_with_monte_carlo_within_its_error(noise, gamma, scale, seed):
    alpha, vectors = noise
    K = len(alpha)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        theta = torch.rand(K, 2) + 0.2
        z_loc, z_scale = gamma + 0.1 * torch.randn(K), scale * torch.ones(K)
        z = (z_loc + z_scale * torch.randn(20_000, K)).exp()
    terms = conditional_kl(theta, alpha, vectors, z, beta_star(theta, alpha, vectors))
    # six standard errors: about one in 10⁹ for a Gaussian, with room for the log-normal's tail
    error = 6 * terms.std() / len(terms) ** 0.5
    assert (terms.mean() - hierarchical_kl(alpha, vectors, z_loc, z_scale, 2)).abs() < error
    mean_z = (z_loc + 0.5 * z_scale.square()).exp()
    best = beta_star(theta * mean_z.sqrt().unsqueeze(-1), alpha, vectors)
    terms = conditional_kl(theta, alpha, vectors, z, best)
    assert (terms.mean() - hierarchical_kl(alpha, vectors, z_loc, z_scale, 2, "full")).abs() < error


@given(noises(), st.floats(-3, 3), st.floats(0.05, 2))
def test_full_empirical_bayes_is_never_above_the_paper(noise, gamma, scale):
    alpha, vectors = noise
    K = len(alpha)
    z_loc, z_scale = torch.full((K,), gamma), torch.full((K,), scale)
    paper, full = (hierarchical_kl(alpha, vectors, z_loc, z_scale, 2, beta) for beta in ("paper", "full"))
    assert full <= paper + 1e-9 * paper.abs()


def test_given_z_the_formula_of_the_paper():
    theta, alpha, vectors, z = torch.rand(4, 3) + 0.1, torch.rand(4) + 0.1, torch.randn(2, 4), torch.rand(4) + 0.1
    formula = 1.5 * (z - z.log() - 1).sum() + empirical_bayes_kl(alpha, vectors, 3)
    kl = conditional_kl(theta, alpha, vectors, z, beta_star(theta, alpha, vectors))
    assert_close(kl, formula, **EXACT)
