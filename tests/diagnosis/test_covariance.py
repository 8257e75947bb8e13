"""The best noise in closed form is stationary and better than its alternatives."""

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.diagnosis import (
    best_covariance,
    best_droprates,
    best_scales,
    best_variances,
    leading_reflections,
    noise_objective,
)
from pyro_vsd.ops.householder import compact_wy, dense


def low_rank(K=50, rank=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(K, rank, generator=generator)
    return 5 * factor @ factor.mT + torch.rand(K, generator=generator).diag()


def decaying(K=50, seed=0):
    basis, _ = torch.linalg.qr(torch.randn(K, K, generator=torch.Generator().manual_seed(seed)))
    return (basis * (100 * torch.arange(1.0, K + 1) ** -2)) @ basis.mT


def relu_layer(K=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = (torch.randn(500, 8, generator=generator) @ torch.randn(8, K, generator=generator)).relu()
    h = h * torch.randn(K, generator=generator)
    return h.mT @ h / 50


CASES = [
    pytest.param(make, c, id=f"{make.__name__}-{c}") for make in (low_rank, decaying, relu_layer) for c in (0.1, 1.0)
]


def gradient(covariance, A, c):
    """Of F in Σ."""
    S = covariance.clone().requires_grad_()
    F = 0.5 * (S * A).sum() + 0.5 * c * ((1 + S.diagonal()).log().sum() - torch.logdet(S))
    return torch.autograd.grad(F, S)[0]


@pytest.mark.parametrize(("make", "c"), CASES)
def test_best_covariance_is_stationary(make, c):
    A = make()
    S = best_covariance(A, c, tolerance=1e-13)
    assert float(gradient(S, A, c).norm()) < 1e-4 * float(A.norm())


@pytest.mark.parametrize(("make", "c"), CASES)
def test_best_covariance_is_the_fixed_point(make, c):
    A = make()
    S = best_covariance(A, c, tolerance=1e-13)
    torch.testing.assert_close(torch.linalg.inv(S), A / c + (1 / (1 + S.diagonal())).diag(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "c"), CASES[1::2])
def test_best_covariance_is_no_worse_than_a_search(make, c):
    """Against gradient descent in a Cholesky factor, from the best independent noise."""
    A = make()
    factor = best_droprates(A, c).sqrt().diag().requires_grad_()
    optimizer = torch.optim.LBFGS([factor], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        L = factor.tril()
        S = L @ L.mT
        F = 0.5 * (S * A).sum() + 0.5 * c * (S.diagonal().log1p().sum() - 2 * L.diagonal().abs().log().sum())
        F.backward()
        return F

    optimizer.step(closure)
    searched = closure().item()
    assert noise_objective(best_covariance(A, c), A, c) <= searched + 1e-4 * abs(searched)


@pytest.mark.parametrize(("make", "c"), CASES)
def test_full_beats_rescaled_beats_given(make, c):
    A = make()
    given = vsd.distributions.HouseholderNormal(1.0, torch.rand(50) + 0.1, torch.randn(2, 50)).covariance_matrix
    rescaled = best_scales(given, A, c)
    values = [noise_objective(S, A, c) for S in (best_covariance(A, c), rescaled, given)]
    assert values == sorted(values)


@pytest.mark.parametrize(("make", "c"), CASES)
def test_best_scales_keep_the_correlations_and_are_stationary(make, c):
    A = make()
    given = vsd.distributions.HouseholderNormal(1.0, torch.rand(50) + 0.1, torch.randn(2, 50)).covariance_matrix
    S = best_scales(given, A, c)
    torch.testing.assert_close(_correlations(S), _correlations(given))
    # along a change of one unit's scale, F does not change: (∂F/∂Σ · Σ)_ii = 0
    assert float((gradient(S, A, c) @ S).diagonal().abs().max()) < 1e-3 * c


def _correlations(S):
    scale = S.diagonal().sqrt()
    return S / scale / scale.unsqueeze(-1)


def test_best_droprates_solve_their_equation():
    a, c = torch.tensor([0.01, 1.0, 300.0]), 2.0
    alpha = best_droprates(a, c)
    # ½ a + (c/2) (1/(1+α) − 1/α) = 0
    torch.testing.assert_close(a, c * (1 / alpha - 1 / (1 + alpha)), rtol=1e-5, atol=1e-6)


def test_best_covariance_of_a_diagonal_is_the_best_droprates():
    A = torch.tensor([0.5, 3.0, 40.0]).diag()
    found = best_covariance(A, 1.0, tolerance=1e-12).diagonal()
    torch.testing.assert_close(found, best_droprates(A, 1.0), rtol=1e-5, atol=0)


def test_objective_of_variances_is_that_of_their_diagonal_matrix():
    A, alpha = low_rank(8), torch.rand(8)
    assert noise_objective(alpha, A, 0.7) == pytest.approx(noise_objective(alpha.diag(), A, 0.7))


def test_a_unit_without_curvature_gets_the_largest_noise():
    alpha = best_droprates(torch.tensor([0.0, 1.0]), 1.0)
    assert 5e3 < alpha[0] <= 1e4
    assert best_covariance(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), 1.0).isfinite().all()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("A", lambda: best_covariance(torch.ones(3), 1.0)),
        ("A", lambda: best_covariance(-torch.eye(3), 1.0)),
        ("A", lambda: best_droprates(torch.full((3,), torch.nan), 1.0)),
        ("strength", lambda: best_covariance(torch.eye(3), 0.0)),
        ("covariance", lambda: noise_objective(torch.ones(2), torch.eye(3), 1.0)),
    ],
)
def test_wrong_arguments(name, call):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call()


def curved(K=8):
    J = torch.randn(40, K) * torch.logspace(1, -2, K)
    return J.mT @ J


@pytest.mark.parametrize("T", [0, 1, 3, 7, 9])
def test_leading_reflections_turn_units_into_eigenvectors(T):
    A = curved()
    vectors = leading_reflections(A, T)
    assert vectors.shape == (T, 8)
    U, rank = dense(compact_wy(vectors)), min(T, 7)
    leading = torch.linalg.eigh(A)[1][:, 8 - rank :]
    overlap = (leading.mT @ U).abs()  # one column of U is each direction
    torch.testing.assert_close(overlap.amax(-1), torch.ones(rank))


def test_best_variances_are_a_minimum():
    A, T = curved(), 3
    vectors = leading_reflections(A, T)
    U = dense(compact_wy(vectors))
    alpha = best_variances(A, vectors, 2.0)

    def value(log_change):
        return noise_objective(U @ (alpha * log_change.exp()).diag() @ U.mT, A, 2.0)

    lowest = value(torch.zeros(8))
    assert all(value(0.05 * torch.randn(8)) > lowest for _ in range(50))


@pytest.mark.parametrize("seed", range(5))
def test_best_variances_of_a_curvature_from_few_rows(seed):
    """It has rank 5, and in float32 eigenvalues below zero."""
    factor = torch.randn(16, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    A = factor @ factor.mT / 5
    assert bool(best_variances(A, leading_reflections(A, 15), 1e-3).isfinite().all())


def test_all_reflections_are_nearly_as_good_as_any_covariance():
    A = curved()
    values = []
    for T in (0, 3, 7):
        vectors = leading_reflections(A, T)
        U = dense(compact_wy(vectors))
        values.append(noise_objective(U @ best_variances(A, vectors, 1.0).diag() @ U.mT, A, 1.0))
    best = noise_objective(best_covariance(A, 1.0), A, 1.0)
    assert best <= values[2] < values[1] < values[0]
    assert values[2] - best < 0.1 * (values[0] - best)
