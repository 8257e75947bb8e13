"""The curvature against formulas, and what a linear-Gaussian model finds with it."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.diagnosis import best_covariance, best_droprates, curvature, noise_objective


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
        likelihoods = {
            "classes": lambda: dist.Categorical(logits=out),
            "yes_no": lambda: dist.Bernoulli(logits=out[:, 0]),
            "poisson": lambda: dist.Poisson(out[:, 0].exp()),
        }
        with pyro.plate("data", len(x)):
            pyro.sample("y", likelihoods[kind](), obs=y)

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
    # of the Poisson 32 targets are drawn for each row
    tolerance = 0.1 if kind == "poisson" else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_curvature_of_predicted_noise_counts_its_log():
    """σ = e^(0.5 w₂ x): the Fisher information of log σ is 2."""
    model = vsd.nn.Regressor(vsd.nn.bayesianize(torch.nn.Linear(1, 2, bias=False)), num_data=1, noise="heteroscedastic")
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


def test_frozen_noise_has_a_curvature():
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
        posterior = vsd.distributions.StructuredDropout(torch.ones(4, 1), log_alpha.exp(), vectors)
        S = vsd.distributions.HouseholderNormal(1.0, log_alpha.exp(), vectors).covariance_matrix
        F = 0.5 * (S * A).sum() + 0.5 * posterior.terms.log_ratio
        F.backward()
        return F

    optimizer.step(closure)
    assert closure().item() == pytest.approx(noise_objective(best_covariance(A, 1.0), A, 1.0), rel=1e-6)


def test_training_a_linear_gaussian_model_finds_correlations():
    """Θ fixed, noise variances and vectors trained through the objective: well below the best independent noise."""
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
