"""VSD with the hierarchy: sites for z, the prior asked for, W = diag(z ⊙ ξ) Θ in prediction."""

import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines.vsd_hierarchical import VSDHierarchical


def test_has_the_sites_of_the_hierarchy():
    method = VSDHierarchical(vsd.nn.mlp([3, 4, 2]), num_data=10, prior=vsd.nn.HierarchicalPrior("half_cauchy"))
    assert list(method.guide.sites) == ["net.0.weight_z", "net.0.weight", "net.2.weight_z", "net.2.weight"]
    hyperprior = method.model.latent_sites()["net.0.weight_z"]
    assert type(hyperprior.base_dist).__name__ == "HalfCauchy"


def test_variance_of_predictions_is_that_of_both_levels():
    """Var(z ξ) = E z² (1 + s) - (E z)², with independent z and, at T = 0, independent ξ."""
    net = nn.Linear(4, 1, bias=False)
    x = torch.randn(3, 4)
    method = VSDHierarchical(net, num_data=10, task="regression", noise=0.1, num_reflections=0)
    with torch.no_grad():
        method.guide.z_log_scale.net.weight.fill_(0.5).log_()
    drawn = method.predict(x, num_samples=40_000, seed=0).samples
    alpha, delta = method.guide.alpha("net.weight").detach(), torch.tensor(0.25)
    variance = (2 * delta).exp() * (1 + alpha) - delta.exp()
    terms = x * net.weight.detach()
    torch.testing.assert_close(drawn.mean(0), (delta / 2).exp() * terms.sum(-1), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.var(0), (variance * terms.square()).sum(-1), rtol=0.08, atol=0)
