"""VSD behind the protocol is VSD by hand; its presets: low rank, the hierarchy, and ARD-VD without reflections."""

import pickle

import pyro
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines import METHODS, make_method
from pyro_vsd.baselines.vsd import ARDVD, VSD, ARDVDHierarchical, VSDHierarchical, VSDLowRank


@pytest.mark.parametrize("num_reflections", [0, 2])
def test_equals_a_loop_by_hand(num_reflections):
    net = vsd.nn.mlp([3, 5, 2])
    x, y = torch.randn(6, 3), torch.arange(6) % 2

    pyro.set_rng_seed(1)
    method = VSD(net, num_data=100, num_reflections=num_reflections, kl_weight=0.3, lr=0.01)
    losses = [method.step(x, y) for _ in range(4)]

    pyro.set_rng_seed(1)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=100)
    guide = vsd.VSDGuide(model, num_reflections=num_reflections)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01, "fused": True}), vsd.VSD_ELBO(kl_weight=0.3))
    torch.testing.assert_close([svi.step(x, y) for _ in range(4)], losses)

    here, there = (dict(g.named_parameters()) for g in (method.guide, guide))
    torch.testing.assert_close(here, there)
    prediction = vsd.predict(model, guide, x, num_samples=5, seed=3)
    torch.testing.assert_close(method.predict(x, num_samples=5, seed=3).samples, prediction.samples)


def test_schedule_goes_on_after_loading():
    schedule = vsd.infer.linear_warmup(10)
    methods = [VSD(vsd.nn.mlp([3, 4, 2]), num_data=10, kl_weight=schedule) for _ in range(2)]
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    for _ in range(4):
        methods[0].step(x, y)
    methods[1].load_state_dict(methods[0].state_dict())
    for method in methods:
        method.step(x, y)
    assert methods[0].elbo.terms["kl_weight"] == methods[1].elbo.terms["kl_weight"] == schedule(4)


def test_chosen_layers_are_bayesian():
    method = VSD(vsd.nn.lenet5(), num_data=10, include="fc*", exclude="fc3")
    assert list(method.guide.sites) == ["net.fc1.weight", "net.fc2.weight"]


# ---- presets

NOISE = {"kl_weight": 1.0, "init_alpha": 0.2, "conv_noise": "out"}
ROTATED = {**NOISE, "num_reflections": 2, "kl_scale": "unit"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vsd", ROTATED),
        ("vsd_low_rank", {**ROTATED, "rank": 5}),
        ("vsd_hierarchical", {**ROTATED, "prior": vsd.nn.HierarchicalPrior()}),
        ("ard_vd", NOISE),
        ("ard_vd_hierarchical", {**NOISE, "prior": vsd.nn.HierarchicalPrior()}),
    ],
)
def test_a_preset_has_its_own_options(name, options):
    assert METHODS[name].options() == options
    for absent in {"num_reflections", "kl_scale", "rank", "prior"} - set(options):
        with pytest.raises(TypeError, match=rf"\b{absent}\b"):
            make_method(name, nn.Linear(3, 2), num_data=10, **{absent: 1})
    method = pickle.loads(pickle.dumps(make_method(name, nn.Linear(3, 2), num_data=10)))
    assert type(method) is METHODS[name]


def test_vectors_come_from_networks_of_the_rank():
    method = VSDLowRank(vsd.nn.mlp([40, 30, 2]), num_data=10, rank=3, num_reflections=4)
    assert (method.guide.vector_kind, method.guide.rank) == ("low_rank", 3)
    assert method.guide.noise("net.0.weight").vectors.shape == (4, 40)
    shapes = {tuple(p.shape) for n, p in method.guide.named_parameters() if n.startswith("vectors.net.0.")}
    assert {(3, 40), (40, 3)} <= shapes


def test_folding_keeps_predictions():
    method = VSDLowRank(vsd.nn.mlp([4, 5, 2]), num_data=10)
    x = torch.randn(3, 4)
    before = method.predict(x, num_samples=5, seed=0).samples
    method.guide.fold()
    torch.testing.assert_close(method.predict(x, num_samples=5, seed=0).samples, before)


def test_has_the_sites_of_the_hierarchy():
    method = VSDHierarchical(vsd.nn.mlp([3, 4, 2]), num_data=10, prior=vsd.nn.HierarchicalPrior("half_cauchy"))
    assert list(method.guide.sites) == ["net.0.weight_z", "net.0.weight", "net.2.weight_z", "net.2.weight"]
    hyperprior = method.model.latent_sites()["net.0.weight_z"]["fn"]
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


# ---- ARD-VD: the same draws, 1/Q of the KL

# a network, its inputs, and Q of each site: outputs of a Linear, input channels times kernel of a convolution
ARD_CASES = [
    pytest.param(lambda: vsd.nn.mlp([3, 5, 2]), torch.ones(4, 3), [5, 2], id="mlp"),
    pytest.param(lambda: vsd.nn.lenet5(2), torch.ones(4, 1, 28, 28), [25, 150, 120, 84, 2], id="lenet5"),
]


def pair(make):
    torch.manual_seed(0)
    net = make()
    methods = []
    for cls, options in ((ARDVD, {}), (VSD, {"num_reflections": 0, "kl_scale": "weight"})):
        torch.manual_seed(1)
        methods.append(cls(net, num_data=100, **options))
    return methods


@pytest.mark.parametrize(("make", "x", "columns"), ARD_CASES)
def test_draws_equal_those_without_reflections(make, x, columns):
    ard, structured = pair(make)
    predictions = [method.predict(x, num_samples=5, seed=2).samples for method in (ard, structured)]
    assert torch.equal(*predictions)


@pytest.mark.parametrize(("make", "x", "columns"), ARD_CASES)
def test_kl_is_one_over_q_of_that_per_weight(make, x, columns):
    ard, structured = pair(make)
    losses = []
    for method in (ard, structured):
        pyro.set_rng_seed(3)
        losses.append(method.step(x, torch.zeros(4, dtype=torch.long)))
    kls = [list(method.elbo.terms["kl"].values()) for method in (ard, structured)]
    for one, other, q in zip(*kls, columns, strict=True):
        torch.testing.assert_close(other, q * one)
    assert losses[1] - losses[0] == pytest.approx((sum(kls[1]) - sum(kls[0])).item())


def test_kl_is_the_published_formula():
    method = ARDVD(nn.Linear(7, 3), num_data=10)
    alpha = method.guide.alpha("net.weight").detach()
    method.step(torch.randn(5, 7), torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(method.elbo.terms["kl"]["net.weight"], 0.5 * (1 + 1 / alpha).log().sum())


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
