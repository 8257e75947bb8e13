"""The best noise in closed form: stationary, below its rivals, and what a linear-Gaussian model has."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.diagnosis import best_covariance, best_droprates, best_scales, curvature, noise_objective


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
    ("call", "message"),
    [
        (lambda: best_covariance(torch.ones(3), 1.0), r"expected A of shape \(K, K\), got \(3,\)"),
        (lambda: best_covariance(torch.eye(3), 0.0), "expected strength > 0, got 0.0. Without a KL"),
        (lambda: best_covariance(-torch.eye(3), 1.0), "expected a finite A with a non-negative diagonal"),
        (lambda: noise_objective(torch.ones(2), torch.eye(3), 1.0), r"shape \(3, 3\) or \(3,\), got \(2,\)"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The curvature, against formulas.


def linear_regression(N=200, K=6, noise=0.5, num_data=None, num_reflections=2):
    x = torch.randn(N, K) @ torch.randn(K, K)
    net = torch.nn.Linear(K, 1, bias=False)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=num_data or N, noise=noise)
    guide = vsd.VSDGuide(model, num_reflections=num_reflections)
    theta = guide.mean()["net.weight"].squeeze(0)
    return model, guide, x, x @ theta + noise * torch.randn(N), theta


def test_curvature_of_a_linear_gaussian_model():
    """The noise multiplies x, so A = diag(θ) Xᵀ X diag(θ) / σ², whatever the draw."""
    model, guide, x, y, theta = linear_regression()
    h = x * theta
    torch.testing.assert_close(curvature(model, guide, x, y)["net.weight"], h.mT @ h / 0.25)


def test_curvature_is_scaled_to_the_data():
    model, guide, x, y, theta = linear_regression(num_data=1000)
    h = x * theta
    torch.testing.assert_close(curvature(model, guide, x, y)["net.weight"], 5 * h.mT @ h / 0.25)


@pytest.mark.parametrize("kind", ["classes", "yes_no", "poisson"])
def test_curvature_of_a_linear_model_is_its_fisher_matrix(kind):
    """At next to no noise, against the formula Σ_n diag(x_n) Θ H_n Θᵀ diag(x_n)."""
    N, K = 3000, 4
    x = torch.randn(N, K)
    weight = torch.randn(K, 3 if kind == "classes" else 1) * 0.5
    logits = x @ weight

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros_like(weight), 1.0).to_event(2))
        out = x @ w
        laws = {
            "classes": lambda: dist.Categorical(logits=out),
            "yes_no": lambda: dist.Bernoulli(logits=out[:, 0]),
            "poisson": lambda: dist.Poisson(out[:, 0].exp()),
        }
        with pyro.plate("data", len(x)):
            pyro.sample("y", laws[kind](), obs=y)

    y = torch.zeros(N)
    guide = vsd.VSDGuide(model, init_alpha=1e-8, init_loc_fn=lambda site: weight).setup(x, y)
    probs = {"classes": logits.softmax(-1), "yes_no": logits.sigmoid(), "poisson": logits.exp()}[kind]
    hessians = {
        "classes": lambda p: p.diag() - p.outer(p), "yes_no": lambda p: (p * (1 - p)).diag(), "poisson": torch.diag
    }  # fmt: skip
    expected = sum(
        (xi.unsqueeze(-1) * weight) @ hessians[kind](p) @ (xi.unsqueeze(-1) * weight).mT
        for xi, p in zip(x, probs, strict=True)
    )
    found = curvature(model, guide, x, y)["w"]
    # labels of the Poisson are drawn: 32 for each row
    tolerance = 0.1 if kind == "poisson" else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_curvature_of_predicted_noise_counts_its_log():
    """σ = e^(0.5 w₂ x): the Fisher information of log σ is 2."""
    model = vsd.nn.Regressor(
        vsd.nn.bayesianize(torch.nn.Linear(1, 2, bias=False)), num_data=1, noise="heteroscedastic"
    )
    guide = vsd.VSDGuide(model, init_alpha=1e-12)
    w1, w2 = guide.mean()["net.weight"].flatten().tolist()
    log_sigma, slope = 5 * math.tanh(w2 / 10), 0.5 * w2 * (1 - math.tanh(w2 / 10) ** 2)
    expected = w1**2 * math.exp(-2 * log_sigma) + 2 * slope**2
    found = curvature(model, guide, torch.ones(1, 1), torch.zeros(1))["net.weight"]
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_hierarchical_weights_count_their_scale():
    net = vsd.nn.bayesianize(torch.nn.Linear(3, 1, bias=False), vsd.nn.HierarchicalPrior())
    model = vsd.nn.Regressor(net, num_data=50, noise=1.0)
    guide = vsd.VSDGuide(model, init_scale=1e-9)
    with torch.no_grad():
        guide.z_loc.net.weight.copy_(torch.tensor([0.0, 1.0, -1.0]))
    x = torch.randn(50, 3)
    h = x * guide.mean()["net.weight"].squeeze(0)
    torch.testing.assert_close(curvature(model, guide, x, torch.zeros(50))["net.weight"], h.mT @ h)


@pytest.mark.parametrize(
    ("max_units", "left"), [(8, {"net.0.weight", "net.2.weight"}), (5, {"net.0.weight"}), (0, set())]
)
def test_wide_weights_are_left_out(max_units, left):
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=20)
    found = curvature(model, vsd.VSDGuide(model), torch.randn(20, 4), torch.zeros(20).long(), max_units=max_units)
    assert set(found) == left


def test_noise_of_frozen_droprates_has_a_curvature():
    model, guide, x, y, theta = linear_regression()
    guide.requires_grad_(False)
    h = x * theta
    torch.testing.assert_close(curvature(model, guide, x, y)["net.weight"], h.mT @ h / 0.25)


@pytest.mark.parametrize("seed", range(3))
def test_enough_reflections_reach_the_closed_form(seed):
    """K - 1 of them turn anywhere. For a linear-Gaussian model F is the objective itself, but for a constant."""
    torch.manual_seed(seed)
    model, guide, x, y, _ = linear_regression(N=300, K=4)
    A = curvature(model, guide, x, y)["net.weight"]
    log_alpha, vectors = torch.randn(4).requires_grad_(), torch.randn(3, 4).requires_grad_()
    optimizer = torch.optim.LBFGS([log_alpha, vectors], max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        law = vsd.distributions.StructuredDropout(torch.ones(4, 1), log_alpha.exp(), vectors)
        S = vsd.distributions.HouseholderNormal(1.0, log_alpha.exp(), vectors).covariance_matrix
        F = 0.5 * (S * A).sum() + 0.5 * law.terms.log_ratio
        F.backward()
        return F

    optimizer.step(closure)
    assert closure().item() == pytest.approx(noise_objective(best_covariance(A, 1.0), A, 1.0), rel=1e-6)


def test_training_a_linear_gaussian_model_finds_correlations():
    """Θ fixed, droprates and vectors trained through the objective: well below the best independent noise."""
    model, guide, x, y, _ = linear_regression(N=300, K=4, num_reflections=3)
    elbo = vsd.VSD_ELBO()
    parameters = [p for name, p in guide.named_parameters() if not name.startswith("theta")]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    for _ in range(500):
        optimizer.zero_grad()
        elbo.differentiable_loss(model, guide, x, y).backward()
        optimizer.step()
        scheduler.step()
    A = curvature(model, guide, x, y)["net.weight"]
    S = guide.noise("net.weight").covariance_matrix
    best, independent = (noise_objective(S_, A, 1.0) for S_ in (best_covariance(A, 1.0), best_droprates(A, 1.0)))
    now = noise_objective(S, A, 1.0)
    assert best - 1e-6 <= now
    assert now - best < 0.5 * (independent - best)
