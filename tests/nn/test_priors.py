"""Priors of weights: their laws, their checks, and that they are cheap to ask for."""

import copy
import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_vsd.distributions import ScaleMixtureNormal
from pyro_vsd.nn import GaussianPrior, HierarchicalPrior, bayesianize

INIT = torch.randn(4, 3)


def test_gaussian_is_a_normal():
    law = GaussianPrior(0.3).weight(INIT, noise_dim=-1)
    torch.testing.assert_close(law.stddev, torch.full((4, 3), 0.3))
    value = torch.randn(4, 3)
    torch.testing.assert_close(law.log_prob(value), dist.Normal(0.0, 0.3).expand([4, 3]).to_event(2).log_prob(value))


def test_gaussian_has_no_scales():
    assert GaussianPrior().scales(INIT, -1) is None


@pytest.mark.parametrize(
    ("prior", "law"),
    [
        (HierarchicalPrior("inverse_gamma", 3.0, 2.0), dist.InverseGamma(3.0, 2.0)),
        (HierarchicalPrior("gamma", 3.0, 2.0), dist.Gamma(3.0, 2.0)),
        (HierarchicalPrior("half_cauchy", 3.0), dist.HalfCauchy(3.0)),
        (HierarchicalPrior(), dist.InverseGamma(1.0, 1.0)),
    ],
    ids=["inverse_gamma", "gamma", "half_cauchy", "default"],
)
@pytest.mark.parametrize("noise_dim", [-1, -2])
def test_hyperprior_has_one_scale_per_unit(prior, law, noise_dim):
    found = prior.scales(INIT, noise_dim)
    assert found.event_shape == (INIT.shape[noise_dim],)
    assert found.batch_shape == ()
    z = torch.rand(INIT.shape[noise_dim]) + 0.1
    torch.testing.assert_close(found.log_prob(z), law.log_prob(z).sum())


@pytest.mark.parametrize("beta", ["paper", "full"])
def test_hierarchical_weight_given_z(beta):
    z = torch.tensor([1.0, 2.0, 4.0])
    law = HierarchicalPrior(beta=beta, precision=2.0).weight(INIT, -1, z)
    assert isinstance(law, ScaleMixtureNormal)
    assert (law.beta, law.noise_dim) == (beta, -1)
    torch.testing.assert_close(law.variance, (z / 2).expand(4, 3))


def test_hierarchical_weight_wants_z():
    with pytest.raises(ValueError, match=r"\bz\b"):
        HierarchicalPrior().weight(INIT, -1)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: GaussianPrior(0.0), "scale"),
        (lambda: GaussianPrior(float("inf")), "scale"),
        (lambda: GaussianPrior("1"), "scale"),
        (lambda: HierarchicalPrior("cauchy"), "hyperprior"),
        (lambda: HierarchicalPrior(dist.Normal(0.0, 1.0)), "hyperprior"),
        (lambda: HierarchicalPrior(dist.Uniform(0.0, 1.0)), "hyperprior"),
        (lambda: HierarchicalPrior(dist.Poisson(1.0)), "hyperprior"),
        (lambda: HierarchicalPrior(dist.Gamma(1.0, 1.0), a=3.0), "a"),
        (lambda: HierarchicalPrior(channels="all"), "channels"),
        (lambda: HierarchicalPrior(beta="half"), "beta"),
        (lambda: HierarchicalPrior(a=-1.0), "a"),
        (lambda: HierarchicalPrior(b=float("nan")), "b"),
        (lambda: HierarchicalPrior("half_cauchy", 1.0, 1.0), "b"),
        (lambda: HierarchicalPrior(precision=0.0), "precision"),
    ],
)
def test_bad_numbers(make, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        make()


@pytest.mark.parametrize("prior", [GaussianPrior(2.0), HierarchicalPrior("gamma", 2.0)])
def test_priors_are_values(prior):
    assert pickle.loads(pickle.dumps(prior)) == prior == copy.deepcopy(prior)
    with pytest.raises(AttributeError):
        prior.scale = 3.0


def test_a_prior_is_made_once_and_again_after_a_move():
    net = bayesianize(torch.nn.Linear(3, 2), GaussianPrior(0.5))

    def prior(dtype):
        return poutine.trace(net).get_trace(torch.ones(1, 3, dtype=dtype)).nodes["weight"]["fn"]

    first = prior(torch.float64)
    assert prior(torch.float64) is first
    net.to(torch.float32)
    assert prior(torch.float32).base_dist.scale.dtype == torch.float32
