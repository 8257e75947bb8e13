"""What all observation models share: the plate and its scale, several inputs, the list of sites, the checks."""

import copy
import gc
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.distributions import ScaleMixtureNormal
from pyro_vsd.nn import BinaryClassifier, Classifier, HierarchicalPrior, Regressor, bayesianize, mlp
from tests.infer import models as infer_models


def labels(B, C=3):
    return torch.arange(B) % C


MODELS = {
    "classifier": (lambda **k: Classifier(bayesianize(mlp([4, 5, 3]), **k), 20), lambda B: labels(B)),
    "binary": (lambda **k: BinaryClassifier(bayesianize(mlp([4, 5, 1]), **k), 20), lambda B: labels(B, 2)),
    "regressor": (lambda **k: Regressor(bayesianize(mlp([4, 5, 1]), **k), 20), lambda B: torch.randn(B)),
    "learned": (lambda **k: Regressor(bayesianize(mlp([4, 5, 1]), **k), 20, "learned"), lambda B: torch.randn(B)),
    "latent": (lambda **k: Regressor(bayesianize(mlp([4, 5, 1]), **k), 20, "latent"), lambda B: torch.randn(B)),
    "several": (lambda **k: Regressor(bayesianize(mlp([4, 5, 2]), **k), 20), lambda B: torch.randn(B, 2)),
    "heteroscedastic": (
        lambda **k: Regressor(bayesianize(mlp([4, 5, 2]), **k), 20, "heteroscedastic"),
        lambda B: torch.randn(B),
    ),
}


@pytest.fixture(params=list(MODELS))
def case(request):
    return MODELS[request.param]


@pytest.mark.parametrize("B", [1, 7, 20])
def test_the_likelihood_is_scaled_to_all_data(case, B):
    make, targets = case
    x, y = torch.randn(B, 4), targets(B)
    trace = poutine.trace(make()).get_trace(x, y)
    site = trace.nodes["y"]
    assert site["is_observed"]
    assert float(site["scale"]) == pytest.approx(20 / B)
    assert [(f.name, f.dim, f.size, f.full_size) for f in site["cond_indep_stack"]] == [("data", -1, B, 20)]
    assert site["fn"].batch_shape == (B,)
    trace.compute_log_prob()
    torch.testing.assert_close(site["log_prob_sum"], site["fn"].log_prob(site["value"]).sum() * 20 / B)


def test_without_targets_nothing_is_scaled(case):
    make, targets = case
    trace = poutine.trace(make()).get_trace(torch.randn(50, 4))  # more rows than data
    site = trace.nodes["y"]
    assert not site["is_observed"]
    assert float(site["scale"] or 1.0) == 1.0
    assert trace.nodes["_RETURN"]["value"].shape == targets(50).shape


def test_the_observed_value_is_returned(case):
    make, targets = case
    y = targets(7)
    torch.testing.assert_close(make()(torch.randn(7, 4), y=y), y, check_dtype=False)


def test_an_epoch_of_batches_is_the_full_batch(case):
    """Averaged by their sizes, mini-batches with a short last one give the log-likelihood of all data."""
    make, targets = case
    model, x, y = make(), torch.randn(20, 4), targets(20)
    values = poutine.trace(model).get_trace(x, y)
    fixed = poutine.condition(model, {n: s["value"] for n, s in values.nodes.items() if n in model.latent_sites()})

    def log_likelihood(rows):
        trace = poutine.trace(fixed).get_trace(x[rows], y[rows])
        trace.compute_log_prob()
        return trace.nodes["y"]["log_prob_sum"]

    parts = [slice(0, 8), slice(8, 16), slice(16, 20)]
    average = sum(log_likelihood(rows) * (rows.stop - rows.start) / 20 for rows in parts)
    torch.testing.assert_close(average, log_likelihood(slice(0, 20)))


def test_no_permutation_is_drawn(case):
    make, targets = case
    model = poutine.condition(make(), {})
    x, y = torch.randn(7, 4), targets(7)
    values = poutine.trace(model).get_trace(x, y)
    before = torch.get_rng_state()
    poutine.trace(poutine.replay(model, trace=values)).get_trace(x, y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prior", [vsd.nn.GaussianPrior(), HierarchicalPrior("half_cauchy")])
def test_latent_sites_are_those_of_a_trace(case, prior):
    make, targets = case
    model = make(prior=prior)
    found = model.latent_sites()
    trace = poutine.trace(model).get_trace(torch.randn(7, 4), targets(7))
    expected = {name: trace.nodes[name]["fn"] for name in trace.stochastic_nodes if name != "data"}
    assert list(found) == list(expected)
    for name, site in found.items():
        law = site["fn"]
        assert type(law) is type(expected[name])
        assert law.batch_shape == ()
        assert law.event_shape == expected[name].event_shape
        if isinstance(law, ScaleMixtureNormal):
            assert site["infer"]["vsd"]["z"] in found
            assert torch.equal(law.z, torch.ones_like(law.z))


def test_latent_sites_draws_nothing_and_leaves_no_trace(case):
    model = case[0](prior=HierarchicalPrior())
    before = torch.get_rng_state()
    with poutine.trace() as tracer:
        model.latent_sites()
    assert torch.equal(torch.get_rng_state(), before)
    assert not tracer.trace.stochastic_nodes
    assert not model._pyro_context.used


class OwnSites(PyroModule):
    """Sites of many kinds, some declared in the class and some that depend on others."""

    def __init__(self):
        super().__init__()
        self.weight = PyroSample(lambda self: dist.Normal(0.0, self.scale).expand([3, 4]).to_event(2))
        self.scale = PyroSample(dist.Gamma(2.0, 2.0))
        self.rate = PyroSample(dist.Beta(2.0, 2.0))

    @PyroSample
    def bias(self):
        return dist.Normal(self.rate, 1.0).expand([3]).to_event(1)

    def forward(self, x):
        return x @ self.weight.mT + self.bias


def test_latent_sites_of_a_hand_written_network():
    model = Classifier(OwnSites(), 20)
    found = model.latent_sites()
    trace = poutine.trace(model).get_trace(torch.randn(7, 4), labels(7))
    assert set(found) == set(trace.stochastic_nodes) - {"data"}
    assert list(found).index("net.scale") < list(found).index("net.weight")
    assert isinstance(found["net.rate"]["fn"], dist.Beta)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x1, x2):
        return self.left(x1) + self.right(x2)


def test_several_inputs_come_as_a_tuple():
    model = Classifier(bayesianize(TwoInputs()), 20)
    x = (torch.randn(7, 4), torch.randn(7, 2))
    assert model(x).shape == (7,)
    guide = vsd.VSDGuide(model)
    svi = SVI(model, guide, Adam({"lr": 1e-3}), vsd.VSD_ELBO())
    assert svi.step(x, labels(7)) > 0
    assert vsd.predict(model, guide, x, num_samples=3).probs.shape == (7, 3)


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_other_guides_of_pyro_train_it(case, elbo):
    make, targets = case
    model, x, y = make(), torch.randn(7, 4), targets(7)
    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 1e-2}), elbo())
    losses = [svi.step(x, y) for _ in range(3)]
    assert all(torch.isfinite(torch.tensor(losses)))
    samples = Predictive(model, guide=guide, num_samples=4)(x)
    assert samples["y"].shape == (4, *y.shape)


def test_vectorised_particles_agree_with_a_loop(case):
    make, targets = case
    model, x, y = make(), torch.randn(7, 4), targets(7)
    guide = vsd.VSDGuide(model, init_alpha=1e-12, init_scale=1e-9)  # hardly any noise: both ways agree to rounding
    losses = [
        vsd.VSD_ELBO(num_particles=3, vectorize_particles=vectorize).loss(model, guide, x, y)
        for vectorize in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class OneNumber(torch.nn.Module):
    """Outputs (B,)."""

    def __init__(self):
        super().__init__()
        self.net = mlp([4, 5, 1])

    def forward(self, x):
        return self.net(x).squeeze(-1)


@pytest.mark.parametrize("make", [BinaryClassifier, Regressor])
@pytest.mark.parametrize("particles", [3, 7])  # one as many as rows
def test_vectorised_particles_with_one_number_per_row(make, particles):
    model, x, y = make(bayesianize(OneNumber()), 20), torch.randn(7, 4), labels(7, 2)
    guide = vsd.VSDGuide(model, init_alpha=1e-12)
    elbos = [vsd.VSD_ELBO(particles, vectorize) for vectorize in (False, True)]
    losses = [elbo.loss(model, guide, x, y) for elbo in elbos]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert Predictive(model, guide=guide, num_samples=6, parallel=True)(x)["y"].shape == (6, 7)


def test_an_empty_batch_is_refused(case):
    make, targets = case
    with pytest.raises(ValueError, match=r"\by\b"):
        make()(torch.randn(0, 4), targets(0))


def test_targets_of_another_length_than_the_rows_are_refused():
    model = Regressor(bayesianize(mlp([4, 6, 5])), 20)
    with pytest.raises(ValueError, match=r"\by\b"):
        vsd.VSD_ELBO().loss(model, vsd.VSDGuide(model), torch.randn(8, 4), torch.randn(5))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_and_state_dicts(case, way):
    make, targets = case
    model, x, y = make(prior=HierarchicalPrior()), torch.randn(7, 4), targets(7)
    poutine.trace(model).get_trace(x, y)
    twin = way(model)
    assert list(twin.latent_sites()) == list(model.latent_sites())
    twin.load_state_dict(model.state_dict())
    pyro.set_rng_seed(1)
    expected = model(x)
    pyro.set_rng_seed(1)
    torch.testing.assert_close(twin(x), expected)


def test_state_dict_of_a_fresh_model_loads(case):
    make, _ = case
    model, fresh = make(), make()
    for parameter in model.parameters():
        parameter.data.normal_()
    fresh.load_state_dict(model.state_dict())
    for (name, a), (_, b) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_network_that_has_run_alone_may_join_a_model():
    net = bayesianize(mlp([4, 5, 3]))
    net(torch.randn(2, 4))
    assert list(Classifier(net, 20).latent_sites()) == ["net.0.weight", "net.2.weight"]
    assert Classifier(net, 20)(torch.randn(2, 4)).shape == (2,)


@pytest.mark.parametrize("num_data", [None, 20.0, "20", True])
def test_num_data_of_the_wrong_type(num_data):
    with pytest.raises(ValueError, match=r"\bnum_data\b"):
        Classifier(bayesianize(mlp([4, 3])), num_data)


def test_num_data_missing():
    with pytest.raises(TypeError, match=r"\bnum_data\b"):
        Classifier(bayesianize(mlp([4, 3])))


@pytest.mark.parametrize("num_data", [0, -3])
def test_num_data_not_positive(num_data):
    with pytest.raises(ValueError, match=r"\bnum_data\b"):
        Classifier(bayesianize(mlp([4, 3])), num_data)


def test_a_batch_larger_than_the_data(case):
    make, targets = case
    with pytest.raises(ValueError, match=r"\bnum_data\b"):
        make()(torch.randn(21, 4), targets(21))


@pytest.mark.parametrize(
    ("net", "error"),
    [
        (mlp([4, 3]), ValueError),
        (PyroModule[nn.Linear](4, 3), ValueError),
        (lambda x: x, TypeError),
    ],
)
def test_a_network_that_is_not_bayesian(net, error):
    with pytest.raises(error, match=r"\bnet\b"):
        Classifier(net, 20)


def test_a_network_of_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(TypeError, match=r"\bnet\b"):
        Classifier(bayesianize(Two()), 20)(torch.randn(7, 4))


# TyXe#18: there a column of targets trains without a word, with a likelihood of shape (6, 6).
@pytest.mark.parametrize("outputs", ["column", "flat"])
@pytest.mark.parametrize("make", [Regressor, BinaryClassifier])
def test_a_column_of_targets_is_one_target_a_row(make, outputs):
    net = mlp([3, 4, 1])
    model = make(bayesianize(net if outputs == "column" else nn.Sequential(net, nn.Flatten(-2))), num_data=20)
    x, y = torch.randn(6, 3), torch.ones(6, 1)
    guide, losses = vsd.VSDGuide(model), []
    for target in (y, y.squeeze(-1)):
        torch.manual_seed(0)
        losses.append(vsd.VSD_ELBO().loss(model, guide, x, target))
    assert losses[0] == losses[1]


def test_the_likelihood_has_one_number_per_row():
    """A column of outputs against a row of targets."""
    model = infer_models.regressor(num_data=20)
    x, y = infer_models.data(20)
    trace = pyro.poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    assert trace.nodes["y"]["log_prob"].shape == (20,)


# ---- num_data that is the batch size (gpytorch#518)


def step(loss, x, y):
    loss(x, y).backward()


def epochs(step, x, y, number=2):
    """Batches of 6."""
    for _ in range(number):
        for rows in torch.arange(len(x)).split(6):
            step(x[rows], y[rows])


@pytest.mark.parametrize("make", [infer_models.regressor, infer_models.classifier])
def test_num_data_that_is_the_batch_size_gives_one_warning(make):
    x, y = infer_models.data(24)
    y = y if make is infer_models.regressor else torch.arange(24) // 8
    model = make(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    with pytest.warns(UserWarning, match=r"\bnum_data\b") as caught:
        epochs(lambda *batch: loss(*batch).backward(), x, y)
    assert len(caught) == 1


def test_svi_warns_too():
    x, y = infer_models.data(24)
    model = infer_models.regressor(num_data=6)
    svi = SVI(model, vsd.VSDGuide(model), Adam({"lr": 0.01}), vsd.VSD_ELBO())
    with pytest.warns(UserWarning, match=r"\bnum_data\b"):
        epochs(svi.step, x, y)


@pytest.mark.parametrize("way", ["same", "copied", "shuffled", "augmented", "missing"])
def test_a_true_full_batch_is_no_mistake(way):
    x, y = infer_models.data(6)
    if way == "missing":
        y[0] = torch.nan
    model = infer_models.regressor(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            order = torch.randperm(6) if way == "shuffled" else torch.arange(6)
            noise = torch.randn_like(x) if way == "augmented" else 0.0
            step(loss, x if way == "same" else x[order] + noise, y if way == "same" else y[order])


def test_evaluation_is_not_training():
    x, y = infer_models.data(24)
    model = infer_models.regressor(num_data=6)
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    for rows in torch.arange(24).split(6):
        vsd.VSD_ELBO().loss(model, guide, x[rows], y[rows])
        with torch.no_grad():
            loss(x[rows], y[rows])
        loss.eval()
        loss(x[rows], y[rows])
        loss.train()
    vsd.predict(model, guide, x, num_samples=2)


def test_data_that_grows_is_no_mistake():
    x, y = infer_models.data(24)
    model = infer_models.regressor(num_data=6)
    guide = vsd.VSDGuide(model)
    for n in (6, 12, 24):
        model.num_data = n
        infer_models.train(model, guide, x[:n], y[:n], steps=2)


def test_looking_ends_and_keeps_nothing():
    """A few looks in all: later steps cost nothing and hold no targets."""
    x, y = infer_models.data(6)
    model = infer_models.regressor(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    for _ in range(4):
        step(loss, x, y)
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t is not y and t.shape == y.shape]
    assert not any(torch.equal(t, y) for t in tensors)
    step(loss, x, y + 1)  # too late to be seen


def test_a_watched_model_is_saved_as_before():
    model = infer_models.regressor()
    keys = set(model.state_dict())
    pyro.poutine.trace(model).get_trace(*infer_models.data())
    assert set(model.state_dict()) == keys
