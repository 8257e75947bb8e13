"""Weights of the KL over training."""

import pickle

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.infer import cosine_warmup, cyclical, linear_warmup
from tests.infer import models

VALUES = [
    (linear_warmup(4), [0, 0.25, 0.5, 0.75, 1, 1]),
    (linear_warmup(2, to=0.5), [0, 0.25, 0.5, 0.5]),
    (cosine_warmup(2), [0, 0.5, 1, 1]),
    (cosine_warmup(4, to=2.0), [0, 0.29289, 1, 1.70711, 2, 2]),
    (cyclical(4), [0, 0.5, 1, 1, 0, 0.5, 1, 1, 0]),
    (cyclical(4, to=0.1, ratio=1.0), [0, 0.025, 0.05, 0.075, 0]),
]


@pytest.mark.parametrize(("schedule", "values"), VALUES, ids=[repr(s) for s, _ in VALUES])
def test_values(schedule, values):
    assert [schedule(step) for step in range(len(values))] == pytest.approx(values, abs=1e-5)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(("schedule", "values"), VALUES, ids=[repr(s) for s, _ in VALUES])
def test_the_elbo_follows(schedule, values):
    model, (x, y) = models.regressor(), models.data()
    elbo, guide = vsd.VSD_ELBO(kl_weight=schedule), vsd.VSDGuide(model)
    used = []
    for _ in values:
        models.train(model, guide, x, y, elbo=elbo, steps=1)
        used.append(float(elbo.terms["kl_weight"]))
    assert used == pytest.approx(values, abs=1e-5)


def test_any_function_is_a_schedule():
    model, (x, y) = models.regressor(), models.data()
    elbo = vsd.VSD_ELBO(kl_weight=lambda step: 0.5**step)
    models.train(model, vsd.VSDGuide(model), x, y, elbo=elbo, steps=3)
    assert float(elbo.terms["kl_weight"]) == 0.25


def test_evaluating_does_not_count_and_the_step_is_saved():
    model, (x, y) = models.regressor(), models.data()
    guide, elbo = vsd.VSDGuide(model), vsd.VSD_ELBO(kl_weight=linear_warmup(10))
    models.train(model, guide, x, y, elbo=elbo, steps=4)
    elbo.loss(model, guide, x, y)
    with torch.no_grad():
        elbo(model, guide)(x, y)
    assert elbo.state_dict() == {"step": 4}
    again = vsd.VSD_ELBO(kl_weight=linear_warmup(10))
    again.load_state_dict(elbo.state_dict())
    again.loss(model, guide, x, y)
    assert float(again.terms["kl_weight"]) == pytest.approx(0.4)


@pytest.mark.parametrize("particles", [1, 3])
def test_the_module_form_counts_one_step_a_call(particles):
    model, (x, y) = models.regressor(), models.data()
    elbo = vsd.VSD_ELBO(num_particles=particles, kl_weight=linear_warmup(10))
    loss = elbo(model, vsd.VSDGuide(model))
    loss(x, y).backward()
    loss(x, y).backward()
    assert elbo.step == 2


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: linear_warmup(0), "steps"),
        (lambda: cosine_warmup(-1), "steps"),
        (lambda: cyclical(0), "period"),
        (lambda: cyclical(5, ratio=0.0), "ratio"),
        (lambda: cyclical(5, ratio=1.5), "ratio"),
    ],
)
def test_bad_arguments(make, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        make()
