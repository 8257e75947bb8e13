"""ARD-VD with the hierarchy is hierarchical VSD without reflections, per unit."""

import pyro
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.baselines.ard_vd_hierarchical import ARDVDHierarchical
from pyro_vsd.baselines.vsd_hierarchical import VSDHierarchical

PRIORS = [vsd.nn.HierarchicalPrior(), vsd.nn.HierarchicalPrior("gamma", 2.0, 3.0, beta="full")]


@pytest.mark.parametrize("prior", PRIORS)
def test_equals_hierarchical_vsd_without_reflections(prior):
    net = vsd.nn.mlp([3, 5, 2])
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    results = []
    for cls, options in ((ARDVDHierarchical, {}), (VSDHierarchical, {"num_reflections": 0})):
        pyro.set_rng_seed(1)
        method = cls(net, num_data=100, prior=prior, **options)
        losses = [method.step(x, y) for _ in range(3)]
        results.append((losses, method.predict(x, num_samples=3, seed=2).samples))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_kl_at_the_start_in_closed_form():
    """At γ = 0 with δ = 0.01: the noise's part, then exp(γ + δ/2) - γ - 1 per unit, halved."""
    method = ARDVDHierarchical(vsd.nn.mlp([3, 2]), num_data=10)
    alpha = method.guide.alpha("net.0.weight").detach()
    method.step(torch.randn(4, 3), torch.arange(4) % 2)
    expected = 0.5 * ((1 + 1 / alpha).log() + torch.tensor(0.01 / 2).exp() - 1).sum()
    torch.testing.assert_close(method.elbo.terms["kl"]["net.0.weight"], expected)
    assert set(method.elbo.terms["kl"]) == {"net.0.weight", "net.0.weight_z"}
