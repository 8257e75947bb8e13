"""Distributions, priors, guides, objectives, networks and schedules made from odd arguments."""

import math

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyro_vsd as vsd
from pyro_vsd import distributions as laws
from pyro_vsd.infer import cosine_warmup, cyclical, linear_warmup
from pyro_vsd.training import Checkpoint, EarlyStopping
from tests.fuzz.outcomes import RAISED, answer, examples, finite, mostly, sizes, tensors

BATCHES = st.sampled_from([(), (), (), (2,), (1,), (2, 1)])


def check_law(law):
    """A law that was made draws finite values of its shape and scores them, or says why not."""
    assert answer(lambda: law.rsample((3,)).shape) in (RAISED, (3, *law.batch_shape, *law.event_shape))
    value = law.rsample()
    assert finite(value.dense() if hasattr(value, "dense") else value)
    density = answer(lambda: law.log_prob(value))
    if density is not RAISED:
        assert density.shape == law.batch_shape
        assert not density.isnan().any()
    for moment in (law.mean, law.variance):
        assert moment.shape == law.batch_shape + law.event_shape
        assert finite(moment)


@given(st.data())
@examples(150)
def test_noise(data):
    K, T, batch = data.draw(sizes()), data.draw(sizes(0, 3)), data.draw(BATCHES)
    loc = data.draw(st.one_of(mostly(1.0, 0), tensors((*batch, K))))
    alpha = data.draw(tensors((*batch, K), positive=True))
    vectors = data.draw(st.one_of(st.none(), tensors((*batch, T, K))))
    law = answer(lambda: laws.HouseholderNormal(loc, alpha, vectors))
    if law is not RAISED:
        check_law(law)


@given(st.data(), st.sampled_from([laws.ColumnProduct, laws.StructuredDropout]))
@examples(300)
def test_weights(data, kind):
    event, batch = data.draw(st.lists(sizes(), min_size=2, max_size=3)), data.draw(BATCHES)
    axis, T = data.draw(st.integers(-len(event), -1)), data.draw(sizes(0, 3))
    theta = data.draw(tensors((*batch, *event)))
    alpha = data.draw(tensors((*batch, event[axis]), positive=True))
    vectors = data.draw(st.one_of(st.none(), tensors((*batch, T, event[axis]))))
    options = {"noise_dim": data.draw(mostly(axis)), "event_dim": data.draw(mostly(None, len(event)))}
    if kind is laws.StructuredDropout:
        options["scale"] = data.draw(st.one_of(st.none(), tensors((*batch, event[axis]), positive=True)))
    law = answer(lambda: kind(theta, alpha, vectors, **options))
    if law is not RAISED:
        check_law(law)


@given(st.data())
@examples(150)
def test_hierarchical_weight_priors(data):
    shape, batch = data.draw(st.lists(sizes(), min_size=2, max_size=3)), data.draw(BATCHES)
    axis = data.draw(st.integers(-len(shape), -1))
    law = answer(
        lambda: laws.ScaleMixtureNormal(
            data.draw(tensors((*batch, shape[axis]), positive=True)),
            data.draw(mostly(axis)),
            data.draw(mostly(shape)),
            data.draw(st.one_of(mostly(1.0), tensors(shape[-1:], positive=True))),
            data.draw(mostly("paper", "full")),
        )
    )
    if law is not RAISED:
        check_law(law)


@given(st.data())
@examples(150)
def test_divergences(data):
    K, Q, T = data.draw(sizes()), data.draw(sizes()), data.draw(sizes(0, 3))
    alpha = data.draw(tensors((K,), positive=True))
    vectors = data.draw(st.one_of(st.none(), tensors((T, K))))
    columns = data.draw(mostly(Q))
    z_loc, z_scale = data.draw(tensors((K,))), data.draw(tensors((K,), positive=True))
    theta = data.draw(tensors((K, Q)))
    for call in (
        lambda: laws.empirical_bayes_kl(alpha, vectors, columns),
        lambda: laws.hierarchical_kl(alpha, vectors, z_loc, z_scale, columns, data.draw(mostly("paper", "full"))),
        lambda: laws.beta_star(theta, alpha, vectors, data.draw(mostly(-2))),
    ):
        value = answer(call)
        if value is not RAISED:
            assert not value.isnan().any()


@given(st.data())
@examples(200)
def test_priors(data):
    number = mostly(1.0, 2, 0.5)
    prior = answer(
        lambda: data.draw(
            st.sampled_from(
                [
                    lambda: vsd.nn.GaussianPrior(data.draw(number)),
                    lambda: vsd.nn.HierarchicalPrior(
                        data.draw(mostly("inverse_gamma", "gamma", "half_cauchy")),
                        data.draw(number),
                        data.draw(mostly(None, 1.0)),
                        data.draw(mostly("paper", "full")),
                        data.draw(number),
                    ),
                ]
            )
        )()
    )
    if prior is RAISED:
        return
    model = vsd.nn.Classifier(vsd.nn.bayesianize(nn.Linear(3, 2), prior), num_data=4)
    y = torch.tensor([0, 1, 0, 1])
    for kind in ("empirical_bayes", "model"):
        loss = answer(lambda: vsd.VSD_ELBO(prior=kind).loss(model, vsd.VSDGuide(model), torch.ones(4, 3), y))  # noqa: B023
        assert loss is RAISED or math.isfinite(loss)


@given(st.data())
@examples(150)
def test_guides(data):
    """A guide that was made takes a step of training from its options."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 2])), num_data=5)
    kind = data.draw(mostly("free", "fc", "low_rank"))
    options = {
        "num_reflections": data.draw(mostly(0, 1, 2, 5)),
        "vectors": kind,
        "rank": data.draw(mostly(2 if kind == "low_rank" else None)),
        "init_alpha": data.draw(mostly(0.2, 1, 1e-6, 1e6)),
        "init_alpha_spread": data.draw(mostly(0.5, 0)),
        "init_vector_scale": data.draw(mostly(1.0, 1e-3)),
        "init_scale": data.draw(mostly(0.1, 1)),
        "noise_dim": data.draw(mostly(None, {"net.0.weight": 0}, {"net.0.weight": "a"}, {"net.9.weight": 0}, {1: 2})),
        "conv_noise": data.draw(mostly("out", "in")),
        "example_dim": data.draw(mostly(0, 1)),
    }
    guide = answer(lambda: vsd.VSDGuide(model, **options))
    if guide is not RAISED:
        loss = vsd.VSD_ELBO()(model, guide)(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
        loss.backward()
        assert finite(loss)
        assert all(finite(p.grad) for p in guide.parameters() if p.grad is not None)


@given(mostly(lambda x: x))
@examples(40)
def test_guides_of_something_else(model):
    answer(lambda: vsd.VSDGuide(model))


@given(st.data())
@examples(150)
def test_objectives(data):
    schedules = (linear_warmup(3), lambda step: 0.5, lambda step: "a", lambda step: None, lambda step: math.nan)
    options = {
        "num_particles": data.draw(mostly(1, 2)),
        "vectorize_particles": data.draw(mostly(False, True)),
        "max_plate_nesting": data.draw(mostly(math.inf, 1)),
        "kl_weight": data.draw(mostly(1.0, 0, 0.1, *schedules)),
        "kl_scale": data.draw(mostly("unit", "weight")),
        "prior": data.draw(mostly("empirical_bayes", "model")),
    }
    elbo = answer(lambda: vsd.VSD_ELBO(**options))
    if elbo is RAISED:
        return
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 2])), num_data=5)
    guide = vsd.VSDGuide(model)
    loss = answer(lambda: elbo.loss_and_grads(model, guide, torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])))
    assert loss is RAISED or math.isfinite(loss)


@given(st.data())
@examples(200)
def test_observation_models(data):
    outputs = data.draw(st.integers(1, 4))
    net = data.draw(mostly(vsd.nn.bayesianize(vsd.nn.mlp([3, outputs])), vsd.nn.mlp([3, 2]), nn.Identity()))
    num_data = data.draw(mostly(5, 100))
    kind = data.draw(st.sampled_from(["classes", "yes", "numbers"]))
    if kind == "numbers":
        noise = data.draw(mostly("learned", "latent", "heteroscedastic", 0.1, 2))
        separate = data.draw(mostly(None, outputs))
        model = answer(lambda: vsd.nn.Regressor(net, num_data, noise, separate))
    else:
        made = vsd.nn.Classifier if kind == "classes" else vsd.nn.BinaryClassifier
        model = answer(lambda: made(net, num_data))
    if model is RAISED:
        return
    shape = data.draw(st.sampled_from([(5,), (5,), (5,), (5, outputs), (5, 1), (4,), (), (0,)]))
    whole = torch.arange(math.prod(shape)).reshape(shape) % 2
    y = data.draw(mostly(whole, whole.double(), whole * 7, -whole, whole.bool(), whole * math.nan, whole.float()))
    guide = vsd.VSDGuide(model)
    loss = answer(lambda: vsd.VSD_ELBO().loss(model, guide, torch.randn(5, 3), y))
    assert loss is RAISED or math.isfinite(loss)


@given(st.data())
@examples(150)
def test_networks(data):
    width = mostly(3, 5)
    activation = data.draw(mostly(nn.ReLU, nn.Tanh, lambda: nn.Identity(), lambda: 3))
    net = answer(lambda: vsd.nn.mlp(data.draw(mostly(st.lists(width, max_size=4), [3, 2])), activation))
    if net is not RAISED:
        assert finite(net(torch.ones(2, net[0].in_features)))
    side = data.draw(mostly(8, 16, 7, 1))
    channels, classes = data.draw(mostly(1, 3)), data.draw(mostly(2, 10))
    make = data.draw(st.sampled_from([vsd.nn.convnet, vsd.nn.lenet5]))
    net = answer(lambda: make(classes, channels, side))
    if net is not RAISED:
        assert net(torch.ones(1, channels, side, side)).shape == (1, classes)


@given(st.data())
@examples(200)
def test_schedules(data):
    to = mostly(1.0, 0.1, 0)
    make = data.draw(
        st.sampled_from(
            [
                lambda: linear_warmup(data.draw(mostly(10, 1)), data.draw(to)),
                lambda: cosine_warmup(data.draw(mostly(10, 1)), data.draw(to)),
                lambda: cyclical(data.draw(mostly(10, 1)), data.draw(to), data.draw(mostly(0.5, 1.0))),
            ]
        )
    )
    schedule = answer(make)
    if schedule is not RAISED:
        assert all(math.isfinite(schedule(step)) and schedule(step) >= 0 for step in (0, 1, 7, 10, 10**9))


@given(st.data())
@examples(150)
def test_settings_of_training(data):
    answer(
        lambda: EarlyStopping(
            data.draw(mostly(1, 5)),
            data.draw(mostly(None, "nll")),
            data.draw(mostly(0.0)),
            data.draw(mostly(None, "min")),
        )
    )
    answer(lambda: Checkpoint("a", data.draw(mostly(1)), data.draw(mostly(None, 3))))


@given(st.data())
@examples(60)
def test_fit(data):
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([2, 1])), num_data=6)
    guide = vsd.VSDGuide(model)
    x, y = data.draw(tensors((6, 2))), data.draw(tensors((6,)))
    options = {
        "epochs": data.draw(mostly(1, 2)),
        "batch_size": data.draw(mostly(3, 100)),
        "seed": data.draw(mostly(None, 0)),
        "optimizer": data.draw(mostly(None, torch.optim.SGD)),
        "scheduler_interval": data.draw(mostly("epoch", "batch")),
        "early_stopping": data.draw(mostly(None)),
        "validation": data.draw(mostly(None, (torch.ones(3, 2), torch.ones(3)))),
        "validation_samples": data.draw(mostly(2)),
    }
    history = answer(lambda: vsd.fit(model, guide, data.draw(mostly((x, y))), progress=False, **options))
    if history is not RAISED:
        assert all(math.isfinite(record["loss"]) for record in history)


# ---- the test of the tests

ACCIDENTS = [
    lambda: {}["a"],
    lambda: [][0],
    lambda: None.shape,
    lambda: torch.ones(2).view(3),
    lambda: dist.Normal(torch.ones(2), torch.ones(3)),
]


@pytest.mark.parametrize("call", ACCIDENTS, ids=["key", "index", "attribute", "runtime", "a different library"])
def test_an_accident_is_no_answer(call):
    with pytest.raises(AssertionError, match="Error"):
        answer(call)


def test_a_wrong_python_type_may_be_named_by_python():
    assert answer(lambda: "a" + 1) is RAISED
