"""The guide as an autoguide: draws, moments, starts, plates, Pyro's handlers, other guides beside it."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal, init_to_mean, init_to_sample, init_to_value
from torch.testing import assert_close

import pyro_vsd as vsd
from pyro_vsd.distributions import LazyWeight, StructuredDropout
from tests import dense
from tests.infer import models

MODELS = {
    "function": lambda: models.by_hand,
    "module": models.HandWritten,
    "regressor": models.regressor,
    "latent": lambda: models.regressor(noise="latent"),
    "hierarchical": lambda: models.hierarchical,
    "hierarchical_prior": lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


# ---- draws


@every_model
def test_forward_returns_a_draw_of_every_latent_site(make):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model)
    draws = guide(x, y)
    trace = poutine.util.prune_subsample_sites(poutine.trace(model).get_trace(x, y))
    shapes = {name: site["value"].shape for name, site in trace.iter_stochastic_nodes()}
    assert isinstance(draws, dict)
    assert {name: draw.shape for name, draw in draws.items()} == shapes


@every_model
def test_sites_are_sampled_directly(make):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model)
    trace = poutine.trace(guide).get_trace(x, y)
    laws = {name: site["fn"] for name, site in trace.iter_stochastic_nodes()}
    assert set(laws) == set(guide.sites)
    assert not any(site["infer"].get("is_auxiliary") for _, site in trace.iter_stochastic_nodes())
    for name, law in laws.items():
        base = law
        while isinstance(base, torch.distributions.Independent):
            base = base.base_dist
        expected = {"weight": StructuredDropout, "scale": dist.LogNormal}.get(guide.sites[name].kind)
        if expected is None:
            expected = dist.Normal if guide.supports[name] is dist.constraints.real else dist.LogNormal
        assert type(base) is expected


def test_a_weight_draw_is_lazy_and_named():
    model = models.regressor()
    draw = vsd.VSDGuide(model, example_dim=1)(*models.data())["net.0.weight"]
    assert isinstance(draw, LazyWeight)
    assert (draw.draw.source.name, draw.draw.source.example_dim) == ("net.0.weight", 1)


@pytest.mark.parametrize("T", [0, 1, 3])
def test_posterior_and_noise_are_those_of_the_parameters(T):
    guide = vsd.VSDGuide(models.regressor(), num_reflections=T)
    params = dict(guide.named_parameters())
    alpha, vectors = params["log_alpha.net.0.weight"].exp(), params["vectors.net.0.weight"]
    noise, law = guide.noise("net.0.weight"), guide.posterior("net.0.weight")
    Sigma = dense.covariance(alpha, vectors)
    assert vectors.shape == (T, 3)
    assert_close(noise.covariance_matrix, Sigma)
    assert_close(noise.mean, torch.ones(3))
    assert_close(guide.alpha("net.0.weight"), alpha)
    theta = params["theta.net.0.weight"]
    assert_close(law.mean, theta)
    assert_close(law.variance, theta**2 * Sigma.diagonal())
    assert guide.noise_dim("net.0.weight") == law.noise_dim == -1


def test_dense_draws_have_the_moments_of_the_posterior():
    model, (x, y) = models.HandWritten(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    draws = torch.stack([guide(x)["first.weight"].dense() for _ in range(1500)]).detach()
    law = guide.posterior("first.weight")
    mean, variance = law.mean.detach(), law.variance.detach()
    assert float(((draws.mean(0) - mean) / (variance / 1500).sqrt()).abs().max()) < 4.5
    assert float((draws.var(0) / variance - 1).abs().max()) < 4.5 * math.sqrt(2 / 1500)


# ---- median and quantiles

LEVELS = [0.05, 0.3, 0.5, 0.9]


@pytest.mark.parametrize("T", [0, 2])
def test_quantiles_of_weights_are_exact(T):
    guide = vsd.VSDGuide(models.HandWritten(), num_reflections=T).setup(*models.data())
    s = guide.noise("first.weight").covariance_matrix.diagonal()
    theta = guide.theta.first.weight
    assert bool((theta < 0).any())
    phi = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(LEVELS)).reshape(-1, 1, 1)
    found = guide.quantiles(LEVELS)["first.weight"]
    assert_close(found, theta + theta.abs() * s.sqrt() * phi)
    assert_close(guide.median()["first.weight"], theta.detach())


def test_quantiles_of_mean_field_sites_are_those_of_their_laws():
    guide = vsd.VSDGuide(models.by_hand).setup(*models.data())
    found = guide.quantiles(torch.tensor(LEVELS))
    for name in ("b", "sigma"):
        assert_close(found[name], guide.posterior(name).icdf(torch.tensor(LEVELS)))


@pytest.mark.parametrize("make", [MODELS["hierarchical"], MODELS["hierarchical_prior"]], ids=["by_hand", "prior"])
def test_quantiles_under_a_hierarchy_against_monte_carlo(make):
    guide = vsd.VSDGuide(make(), init_scale=0.7).setup(*models.data())
    name = "w" if "w" in guide.sites else "net.0.weight"
    z_law, noise, theta = guide.scale_posterior(name), guide.noise(name), guide.posterior(name).theta
    n = 100_000
    with torch.no_grad():
        factor = z_law.sample((n,)) * noise.sample((n,))  # (n, K)
        w = theta * (factor.unsqueeze(-1) if guide.noise_dim(name) == -2 else factor.unsqueeze(-2))
    for level, q in zip(LEVELS, guide.quantiles(LEVELS)[name], strict=True):
        share = (w <= q).double().mean(0)
        assert float((share - level).abs().max()) < 4.5 * math.sqrt(level * (1 - level) / n)


@every_model
def test_quantiles_rise_and_have_the_shape_of_the_site(make):
    guide = vsd.VSDGuide(make()).setup(*models.data())
    draws = guide(*models.data())
    for name, q in guide.quantiles(LEVELS).items():
        assert q.shape == (len(LEVELS), *draws[name].shape)
        assert bool((q.diff(dim=0) >= 0).all())
    assert {k: v.shape for k, v in guide.median().items()} == {k: v.shape for k, v in draws.items()}


def test_mean_is_theta_times_the_mean_of_z():
    guide = vsd.VSDGuide(models.hierarchical, init_scale=0.5).setup(*models.data())
    mean = guide.mean()
    assert_close(mean["z"], torch.full((3,), math.exp(0.125)))
    assert_close(mean["w"], guide.theta.w.detach() * math.exp(0.125))
    assert_close(guide.median()["z"], torch.ones(3))


# ---- where it starts


# pyro#2047, pyro#2081, pyro#2156: there weights start at the median of a wide prior.
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_theta_starts_at_the_networks_own_weights(scale):
    net = vsd.nn.mlp([3, 5, 1])
    guide = vsd.VSDGuide(vsd.nn.Regressor(vsd.nn.bayesianize(net, vsd.nn.GaussianPrior(scale)), num_data=10))
    assert_close(guide.posterior("net.0.weight").theta, net[0].weight)
    assert_close(guide.posterior("net.2.weight").theta, net[2].weight)
    assert guide.posterior("net.0.weight").theta.data_ptr() != net[0].weight.data_ptr()


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_theta_of_a_hand_written_model_is_a_xavier_draw(scale):
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, scale).expand([200, 100]).to_event(2))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(2), obs=torch.zeros(2, 100))

    theta = vsd.VSDGuide(model).setup(torch.ones(2, 200)).posterior("w").theta.detach()
    bound = math.sqrt(6 / 300)
    assert float(theta.abs().max()) <= bound
    assert_close(theta.std(), torch.tensor(bound / math.sqrt(3)), rtol=0.02, atol=0)
    assert bool((theta != 0).all())


def test_each_weight_of_a_plate_starts_elsewhere():
    def model():
        with pyro.plate("copies", 3, dim=-1):
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.0))

    theta = vsd.VSDGuide(model).setup().posterior("w").theta
    assert theta.shape == (3, 4, 2)
    assert bool((theta[0] != theta[1]).all())


@pytest.mark.parametrize(
    ("init_loc_fn", "expected"),
    [
        (init_to_value(values={"w": torch.full((3, 1), 0.3), "b": torch.tensor(2.0)}), {"w": 0.3, "b": 2.0}),
        (init_to_mean, {"b": 0.0, "sigma": math.exp(-0.5)}),
        (lambda site: torch.full(site["fn"].shape(), 0.7), {"w": 0.7, "b": 0.7, "sigma": 0.7}),
    ],
    ids=["init_to_value", "init_to_mean", "function"],
)
def test_init_loc_fn_says_where_sites_start(init_loc_fn, expected):
    median = vsd.VSDGuide(models.by_hand, init_loc_fn=init_loc_fn).setup(*models.data()).median()
    for name, value in expected.items():
        assert_close(median[name], torch.full_like(median[name], value))


def test_init_loc_fn_acts_on_models_that_list_their_sites():
    start = torch.full((5, 3), 0.3)
    guide = vsd.VSDGuide(models.regressor(), init_loc_fn=init_to_value(values={"net.0.weight": start}))
    assert_close(guide.posterior("net.0.weight").theta, start)


def test_init_to_sample_draws_from_the_prior():
    pyro.set_rng_seed(3)
    first = vsd.VSDGuide(models.by_hand, init_loc_fn=init_to_sample).setup(*models.data()).median()
    second = vsd.VSDGuide(models.by_hand, init_loc_fn=init_to_sample).setup(*models.data()).median()
    assert not torch.equal(first["sigma"], second["sigma"])


def test_z_starts_at_one_unless_told():
    x, y = models.data()
    assert_close(vsd.VSDGuide(models.hierarchical).setup(x, y).median()["z"], torch.ones(3))
    start = init_to_value(values={"z": torch.full((3,), 2.0)})
    assert_close(vsd.VSDGuide(models.hierarchical, init_loc_fn=start).setup(x, y).median()["z"], torch.full((3,), 2.0))


@pytest.mark.parametrize(("alpha", "spread", "scale"), [(0.2, 0.5, 1.0), (0.01, 0.0, 3.0), (1.0, 2.0, 0.1)])
def test_noise_starts_as_told(alpha, spread, scale):
    model = vsd.nn.Classifier(vsd.nn.bayesianize(torch.nn.Linear(4000, 2)), num_data=10)
    guide = vsd.VSDGuide(model, init_alpha=alpha, init_alpha_spread=spread, init_vector_scale=scale)
    log_alpha = guide.alpha("net.weight").detach().log()
    assert abs(float(log_alpha.mean()) - math.log(alpha)) <= 4.5 * spread / math.sqrt(4000) + 1e-9
    assert_close(log_alpha.std(), torch.tensor(spread), rtol=0.06, atol=1e-9)
    assert_close(guide.vectors.net.weight.detach().std(), torch.tensor(scale), rtol=0.06, atol=0)


def test_init_scale_is_the_spread_of_mean_field_sites():
    guide = vsd.VSDGuide(models.by_hand, init_scale=0.03).setup(*models.data())
    assert_close(guide.posterior("b").stddev, torch.tensor(0.03))


# blitz#50: there the spread of a fresh posterior is a thousandth of the outputs.
def test_predictions_have_a_spread_from_the_start():
    model, (x, _) = models.regressor(sizes=(3, 50, 1)), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=200, seed=0)
    assert float((prediction.epistemic.sqrt() / prediction.mean.abs().clamp(min=0.1)).median()) > 0.05


# ---- parameters


def test_parameters_are_named_by_role_and_site():
    guide = vsd.VSDGuide(models.regressor(noise="latent", prior=vsd.nn.HierarchicalPrior()))
    expected = {f"{r}.{n}" for r in ("theta", "log_alpha", "vectors", "z_loc", "z_log_scale")
                for n in ("net.0.weight", "net.2.weight")}  # fmt: skip
    assert set(dict(guide.named_parameters())) == expected | {"loc.sigma", "log_scale.sigma"}


def test_models_that_list_their_sites_have_parameters_from_the_start():
    assert vsd.VSDGuide(models.regressor()).sites
    guide = vsd.VSDGuide(models.HandWritten())
    assert not list(guide.named_parameters())
    assert guide.setup(*models.data()) is guide
    assert list(guide.parameters())


def test_a_second_setup_changes_nothing():
    guide = vsd.VSDGuide(models.HandWritten()).setup(*models.data())
    before = models.snapshot(guide)
    guide.setup(*models.data())
    assert not models.moved(before, guide)


def test_setup_leaves_running_statistics_and_modes_alone():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=12)
    norm = model.net[1]
    guide = vsd.VSDGuide(poutine.block(model, hide_fn=lambda msg: False))
    guide.setup(*models.data())
    assert int(norm.num_batches_tracked) == 0
    assert norm.training
    assert guide.sites


def test_parameter_groups_give_each_role_its_rate():
    model = models.regressor(noise="latent", prior=vsd.nn.HierarchicalPrior())
    guide = vsd.VSDGuide(model)
    groups = {g["name"]: g for g in guide.parameter_groups(lr=1e-3, vectors=1e-2, z_loc=3e-2, model=5e-4)}
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates == {
        "theta": 1e-3, "log_alpha": 1e-3, "vectors": 1e-2, "z_loc": 3e-2, "z_log_scale": 1e-3, "loc": 1e-3,
        "log_scale": 1e-3, "model": 5e-4,
    }  # fmt: skip
    found = {id(p) for group in groups.values() for p in group["params"]}
    assert found == {id(p) for p in [*guide.parameters(), *model.parameters()]}
    torch.optim.Adam(groups.values())


@pytest.mark.parametrize(("kind", "rank"), [("free", None), ("fc", None), ("low_rank", 2)])
@pytest.mark.parametrize("T", [0, 3])
def test_folding_keeps_predictions_and_trains_on(kind, rank, T):
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model, num_reflections=T, vectors=kind, rank=rank)
    models.train(model, guide, x, y)
    before = vsd.predict(model, guide, x, num_samples=20, seed=0)
    assert guide.fold() is guide
    after = vsd.predict(model, guide, x, num_samples=20, seed=0)
    assert torch.equal(before.samples, after.samples)
    names = dict(guide.named_parameters())
    assert names["vectors.net.0.weight"].shape == (T, 3)
    assert guide.vector_kind == "free"
    start = models.snapshot(guide)
    models.train(model, guide, x, y)
    assert models.moved(start, guide) == {n for n, p in guide.named_parameters() if p.numel()}


@pytest.mark.parametrize(("kind", "rank"), [("fc", None), ("low_rank", 10)])
def test_all_parameters_of_vector_networks_are_trained(kind, rank):
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model, num_reflections=3, vectors=kind, rank=rank)
    before = models.snapshot(guide)
    models.train(model, guide, x, y)
    assert models.moved(before, guide) == set(before)


# ---- mistakes

OPTIONS = [
    ({"num_reflections": -1}, "num_reflections"),
    ({"num_reflections": 1.5}, "num_reflections"),
    ({"vectors": "full"}, "vectors"),
    ({"vectors": "low_rank"}, "rank"),
    ({"vectors": "fc", "rank": 2}, "rank"),
    ({"conv_noise": "both"}, "conv_noise"),
    ({"example_dim": 2}, "example_dim"),
    ({"noise_dim": -1}, "noise_dim"),
    ({"noise_dim": {"nothing": -1}}, "noise_dim"),
    ({"noise_dim": {"net.0.weight": 2}}, "noise_dim"),
    ({"init_alpha": 0.0}, "init_alpha"),
    ({"init_alpha": math.inf}, "init_alpha"),
    ({"init_vector_scale": -1.0}, "init_vector_scale"),
    ({"init_scale": 0.0}, "init_scale"),
    ({"init_alpha_spread": -0.1}, "init_alpha_spread"),
]


@pytest.mark.parametrize(("options", "argument"), OPTIONS, ids=[str(o) for o, _ in OPTIONS])
def test_bad_options(options, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        vsd.VSDGuide(models.regressor(), **options)


CALLS = [
    (lambda g: g.noise("sigma"), "sigma"),
    (lambda g: g.alpha("nothing"), "nothing"),
    (lambda g: g.posterior("nothing"), "nothing"),
    (lambda g: g.quantiles([0.5, 1.0]), "quantiles"),
    (lambda g: g.parameter_groups(alpha=0.1), "alpha"),
]


@pytest.mark.parametrize(("call", "named"), CALLS)
def test_bad_calls(call, named):
    guide = vsd.VSDGuide(models.regressor(noise="latent"))
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        call(guide)


@pytest.mark.parametrize("method", ["median", "mean", "fold", "parameter_groups"])
def test_a_guide_without_parameters_says_what_to_do(method):
    guide = vsd.VSDGuide(models.HandWritten())
    with pytest.raises(ValueError, match=r"\bsetup\b"):
        getattr(guide, method)()


def test_median_may_set_the_guide_up():
    assert set(vsd.VSDGuide(models.by_hand).median(*models.data())) == {"w", "b", "sigma"}


def test_a_matrix_without_to_event_is_reported():
    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(1))
        v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
        pyro.sample("y", dist.Normal(x @ w @ v, 1.0).to_event(2), obs=torch.zeros(len(x), 1))

    with pytest.warns(UserWarning, match=r"\bw\b"):
        guide = vsd.VSDGuide(model).setup(torch.ones(4, 3))
    assert {name: site.kind for name, site in guide.sites.items()} == {"w": "mean_field", "v": "weight"}


# pyro#2797, pyro#3183, pyro#1409: there the first network ends in errors about plates and event dimensions.
@pytest.mark.parametrize("columns", [1, 2])
def test_a_matrix_without_any_event_dimension_is_reported(columns):
    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, columns), 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([columns, 1]).to_event(2))
        pyro.sample("y", dist.Normal(x @ w @ v, 1.0).to_event(2), obs=torch.zeros(len(x), 1))

    with pytest.warns(UserWarning, match=r"\bw\b"):
        vsd.VSDGuide(model).setup(torch.ones(4, 3))


def test_a_model_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"\bmodel\b"):
        vsd.VSDGuide(3)


def test_a_plate_of_vectors_is_no_matrix():
    def model(x):
        with pyro.plate("rows", 3):
            b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        models.one_weight(x + b.sum(), torch.zeros(len(x)))

    assert vsd.VSDGuide(model).setup(torch.ones(4, 3)).sites["b"].kind == "mean_field"


def test_a_model_without_weights_is_served_as_mean_field_with_one_warning():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, sigma), obs=y)

    y = 3 + 0.5 * torch.randn(100)
    guide = vsd.VSDGuide(model)
    with pytest.warns(UserWarning, match=r"\bmu\b"):
        guide.setup(y)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(200):  # warnings are errors here: none comes again
        svi.step(y)
    median = guide.median()
    assert abs(float(median["mu"]) - float(y.mean())) < 0.15
    assert abs(float(median["sigma"]) - 0.5) < 0.15


def test_vector_networks_refuse_weights_in_plates():
    def model():
        with pyro.plate("copies", 3):
            pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))

    with pytest.raises(ValueError, match=r"\bvectors\b"):
        vsd.VSDGuide(model, vectors="fc").setup()


# ---- Pyro's handlers and other guides


def test_block_hides_sites_from_the_guide():
    guide = vsd.VSDGuide(poutine.block(models.by_hand, hide=["sigma"])).setup(*models.data())
    assert list(guide.sites) == ["w", "b"]


def test_condition_takes_sites_away():
    model = poutine.condition(models.by_hand, data={"sigma": torch.tensor(0.3)})
    guide, (x, y) = vsd.VSDGuide(model), models.data()
    elbo = vsd.VSD_ELBO()
    models.train(model, guide, x, y, elbo=elbo)
    assert list(guide.sites) == ["w", "b"]
    assert set(elbo.terms["kl"]) == {"w", "b"}


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_scale_multiplies_likelihood_and_kl(factor):
    x, y = models.data()
    guide = vsd.VSDGuide(models.by_hand).setup(x, y)
    elbo = vsd.VSD_ELBO()
    terms = []
    for f in (1.0, factor):
        pyro.set_rng_seed(1)
        elbo.loss(poutine.scale(models.by_hand, scale=f), poutine.scale(guide, scale=f), x, y)
        terms.append(elbo.terms)
    plain, scaled = terms
    assert_close(scaled["log_likelihood"], factor * plain["log_likelihood"])
    for name, kl in plain["kl"].items():
        assert_close(scaled["kl"][name], factor * kl)


@pytest.mark.parametrize("other", [AutoNormal, AutoDelta])
def test_a_list_of_guides_trains(other):
    x, y = models.data()
    guide = AutoGuideList(models.by_hand)
    guide.append(vsd.VSDGuide(poutine.block(models.by_hand, expose=["w"])))
    guide.append(other(poutine.block(models.by_hand, hide=["w"])))
    elbo = vsd.VSD_ELBO()
    models.train(models.by_hand, guide, x, y, elbo=elbo, steps=1)
    before = models.snapshot(guide)
    models.train(models.by_hand, guide, x, y, elbo=elbo, steps=2)
    assert models.moved(before, guide) == set(before)
    assert set(guide(x, y)) == {"w", "b", "sigma"}
    assert set(guide.median(x, y)) == {"w", "b", "sigma"}
    assert {"w", "b", "sigma"} <= set(elbo.terms["kl"])


def test_a_list_of_guides_has_the_loss_of_one_guide():
    """AutoNormal's sites, drawn through Delta, are paid for as ours are."""
    x, y = models.data()
    single = vsd.VSDGuide(models.by_hand).setup(x, y)
    both = AutoGuideList(models.by_hand)
    both.append(vsd.VSDGuide(poutine.block(models.by_hand, expose=["w"])))
    both.append(AutoNormal(poutine.block(models.by_hand, hide=["w"]), init_scale=0.1))
    both(x, y)
    with torch.no_grad():
        for role in ("theta", "log_alpha", "vectors"):
            getattr(both[0], role).w.copy_(getattr(single, role).w)
        for name in ("b", "sigma"):
            getattr(single.loc, name).copy_(getattr(both[1].locs, name))
    losses = []
    for guide in (single, both):
        elbo = vsd.VSD_ELBO()
        draws = torch.tensor([elbo.loss(models.by_hand, guide, x, y) for _ in range(800)])
        losses.append((draws.mean(), draws.std() / math.sqrt(len(draws))))
    (a, se_a), (b, se_b) = losses
    assert float((a - b).abs() / (se_a**2 + se_b**2).sqrt()) < 4


# ---- plates


def locals_model(x, y, index=None, full=20):
    """A weight, and a local latent for each row of a subsampled plate. Without indices the plate draws its own."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
    size = {"subsample": index} if index is not None else {"subsample_size": 5}
    with pyro.plate("data", full, **size) as rows:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        mean = (x[rows] @ w).squeeze(-1) + shift
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y[rows])
    return rows


# pyro#3468: there a guide without ``create_plates`` redraws the rows of a batch.
@pytest.mark.parametrize("rows", [[3, 1, 7], [0, 19, 4, 5], [9]])
def test_explicit_indices_of_the_model_are_kept(rows):
    """As the objective runs them: the guide first, then the model on its draws."""
    x, y = models.data(20)
    guide, index = vsd.VSDGuide(locals_model).setup(x, y, torch.tensor([2, 3])), torch.tensor(rows)
    trace, guide_trace = next(vsd.VSD_ELBO()._get_traces(locals_model, guide, (x, y, index), {}))
    assert torch.equal(trace.nodes["_RETURN"]["value"], index)
    assert torch.equal(trace.nodes["y"]["value"], y[index])
    assert trace.nodes["y"]["scale"] == 20 / len(rows)
    assert guide_trace.nodes["shift"]["value"].shape == index.shape
    assert_close(guide_trace.nodes["shift"]["fn"].mean, guide.loc.shift[index])


def test_only_the_rows_of_a_batch_are_trained():
    x, y = models.data(20)
    guide = vsd.VSDGuide(locals_model).setup(x, y, torch.tensor([3, 1, 7]))
    assert guide.loc.shift.shape == (20,)
    before = guide.loc.shift.detach().clone()
    models.train(locals_model, guide, x, y, torch.tensor([2, 9]), steps=2)
    assert (guide.loc.shift != before).nonzero().squeeze(-1).tolist() == [2, 9]


def test_a_plate_that_draws_its_own_rows_is_followed():
    x, y = models.data(20)
    guide = vsd.VSDGuide(locals_model)
    seen = set()
    for _ in range(10):
        trace = poutine.trace(guide).get_trace(x, y)
        model_trace = poutine.trace(poutine.replay(locals_model, trace=trace)).get_trace(x, y)
        rows = model_trace.nodes["_RETURN"]["value"]
        assert torch.equal(rows, trace.nodes["data"]["value"])
        assert_close(trace.nodes["shift"]["fn"].mean, guide.loc.shift[rows])
        seen.update(rows.tolist())
    assert len(seen) > 10


def test_create_plates_is_asked():
    x, y = models.data(20)
    calls = []

    def create_plates(x, y, index=None):
        calls.append(index)
        return pyro.plate("data", 20, subsample=index, dim=-1)

    guide = vsd.VSDGuide(locals_model, create_plates=create_plates)
    index = torch.tensor([4, 2])
    models.train(locals_model, guide, x, y, index, steps=2)
    assert len(calls) >= 2
    assert all(torch.equal(c, index) for c in calls)


def test_looking_up_the_rows_moves_no_running_statistics():
    norm = torch.nn.BatchNorm1d(3)

    def model(x, y, index):
        return locals_model(norm(x), y, index)

    x, y = models.data(20)
    guide = vsd.VSDGuide(model).setup(x, y, torch.tensor([1, 2]))
    guide(x, y, torch.tensor([3, 4]))
    assert int(norm.num_batches_tracked) == 0
    assert norm.training


def test_weights_in_a_plate_are_independent_replicas():
    def model(x, y):
        with pyro.plate("copies", 4, dim=-2):
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
            with pyro.plate("data", len(x), dim=-1):
                pyro.sample("y", dist.Normal((x @ w.squeeze(-3)).squeeze(-1), 0.5), obs=y)

    x, y = models.data()
    guide = vsd.VSDGuide(model)
    losses = models.train(model, guide, x, y, steps=3)
    assert all(map(math.isfinite, losses))
    assert guide.posterior("w").theta.shape == (4, 1, 3, 1)
    assert guide.alpha("w").shape == (4, 1, 3)


# ---- Predictive


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda: models.regressor(noise=0.2), models.HandWritten, lambda: models.one_weight, lambda: models.hierarchical],
    ids=["regressor", "module", "one_weight", "hierarchical"],
)
def test_predictive_has_the_moments_of_dense_draws(make, parallel):
    model, (x, _) = make(), models.data()
    guide = vsd.VSDGuide(model, num_reflections=2, init_alpha=0.5).setup(x, torch.zeros(len(x)))
    S = 1000
    y = Predictive(model, guide=guide, num_samples=S, parallel=parallel, return_sites=("y",))(x)["y"]
    assert y.shape == (S, len(x))
    with torch.no_grad():
        draws = []
        for _ in range(S):
            values = {n: v.dense() if isinstance(v, LazyWeight) else v for n, v in guide(x).items()}
            draws.append(poutine.condition(model, data=values)(x))
    expected = torch.stack(draws)
    error = ((y.var(0) + expected.var(0)) / S).sqrt()
    assert float(((y.mean(0) - expected.mean(0)) / error).abs().max()) < 4.5
    assert float((y.var(0) / expected.var(0)).log().abs().max()) < 0.3


@pytest.mark.parametrize("rows", [12, 50])
def test_parallel_predictive_keeps_sampled_biases_with_their_draws(rows):
    """Pyro drops the plate dimensions of such sites; as many rows as samples must not be mistaken for one another."""

    class WithBias(models.HandWritten):
        def __init__(self):
            super().__init__()
            self.first.bias = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))

    model, (x, _) = WithBias(), models.data(1)
    x = x.expand(rows, 3)
    guide = vsd.VSDGuide(model, init_scale=2.0, init_alpha=1e-6).setup(x, torch.zeros(rows))
    model = poutine.condition(model, data={})
    y = Predictive(model, guide=guide, num_samples=50, parallel=True, return_sites=("y", "first.bias"))(x)["y"]
    assert y.shape == (50, rows)
    # equal rows under one bias differ by the observation noise of 0.5 alone; under different biases by far more
    assert float(y.std(1).max()) < 1.0
    assert float(y.mean(1).std()) > 0.2


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trained", [False, True])
def test_to_moves_the_guide(dtype, trained):
    model, (x, y) = models.regressor(noise="latent", prior=vsd.nn.HierarchicalPrior()), models.data()
    guide = vsd.VSDGuide(model)
    if trained:
        models.train(model, guide, x, y)
        pyro.clear_param_store()
    model.to(dtype)
    guide.to(dtype)
    losses = models.train(model, guide, x.to(dtype), y.to(dtype))
    assert all(map(math.isfinite, losses))
    assert {p.dtype for p in [*guide.parameters(), *model.parameters()]} == {dtype}
    assert vsd.predict(model, guide, x.to(dtype), num_samples=3).mean.dtype == dtype
    assert {v.dtype for v in guide.quantiles([0.2]).values()} == {dtype}


def test_set_up_in_float32_under_a_float64_default():
    model, (x, y) = models.HandWritten().float(), models.data()
    for layer in (model.first, model.last):
        layer.weight = pyro.nn.PyroSample(
            dist.Normal(torch.zeros(layer.out_features, layer.in_features, dtype=torch.float32), 1.0).to_event(2)
        )
    guide = vsd.VSDGuide(model).setup(x.float(), y.float())
    assert {p.dtype for p in guide.parameters()} == {torch.float32}
    assert all(map(math.isfinite, models.train(model, guide, x.float(), y.float())))
