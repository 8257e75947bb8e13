"""Elsewhere a guide without ``create_plates`` redraws the rows of a batch and replaces the model's explicit indices
(pyro#3468), batches without a scale give wrong objectives (pyro#1437), nobody knows by what to divide the KL
(tensorflow/probability#651), and ``num_data`` is taken for the batch size (gpytorch#518). Here the model's rows are
kept, one number scales every batch, the KL is counted once however the data is cut, and the mistake is told.

More of it: ``tests/infer/test_guide.py``, ``tests/nn/test_observation.py``, ``tests/training/test_accumulate.py``.
"""

import warnings

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models
from tests.infer.test_guide import locals_model


def gradients(loss):
    return {name: p.grad.clone() for name, p in loss.named_parameters()}


# ---- rows


@pytest.mark.parametrize("rows", [[3, 1, 7], [0, 19, 4, 5], [9]])
def test_explicit_rows_reach_guide_and_likelihood_unchanged(rows):
    """As the objective runs them: the guide first, then the model on its draws."""
    x, y = models.data(20)
    guide = vsd.VSDGuide(locals_model).setup(x, y, torch.tensor([2, 3]))
    index = torch.tensor(rows)
    model_trace, guide_trace = vsd.VSD_ELBO()._get_trace(locals_model, guide, (x, y, index), {})
    assert torch.equal(model_trace.nodes["_RETURN"]["value"], index)
    assert torch.equal(model_trace.nodes["y"]["value"], y[index])
    assert model_trace.nodes["y"]["scale"] == 20 / len(rows)
    assert_close(guide_trace.nodes["shift"]["fn"].mean, guide.loc.shift[index])


# ---- scale


def test_every_batch_counts_as_the_whole_data_the_short_last_one_too():
    model, (x, y) = models.regressor(num_data=20), models.data(20)
    guide = vsd.VSDGuide(model, init_alpha=1e-12)
    elbo = vsd.VSD_ELBO()
    elbo.loss(model, guide, x, y)
    whole = {"log_likelihood": float(elbo.terms["log_likelihood"]), "kl": elbo.terms["kl"]}
    parts = []
    for rows in torch.arange(20).split(8):  # 8, 8, 4
        elbo.loss(model, guide, x[rows], y[rows])
        parts.append(len(rows) / 20 * float(elbo.terms["log_likelihood"]))
        assert elbo.terms["kl"] == whole["kl"]
    assert sum(parts) == pytest.approx(whole["log_likelihood"], rel=1e-4)


def test_gradients_of_micro_batches_add_up_to_those_of_one_batch_and_the_kl_is_counted_once():
    """k losses, each divided by k. In ``coherent`` one noise vector serves all, so that nothing is left to chance."""
    model, (x, y) = models.regressor(num_data=60, noise="learned"), models.data(12)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, init_alpha=0.5))
    k = 4
    with vsd.coherent():
        torch.manual_seed(0)
        loss(x, y).backward()
        expected = gradients(loss)
        loss.zero_grad()
        for rows in torch.arange(12).split(12 // k):
            torch.manual_seed(0)
            (loss(x[rows], y[rows]) / k).backward()
    found = gradients(loss)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, msg=name)


def test_likelihood_and_kl_are_told_apart():
    model, (x, y) = models.regressor(num_data=100), models.data()
    elbo = vsd.VSD_ELBO(kl_weight=0.5)
    value = elbo.loss(model, vsd.VSDGuide(model), x, y)
    kl = sum(elbo.terms["kl"].values())
    assert value == pytest.approx(float(0.5 * kl - elbo.terms["log_likelihood"]))
    assert set(elbo.terms["kl"]) == {"net.0.weight", "net.2.weight"}


# ---- num_data

MISTAKE = "num_data: expected the number of rows of the whole training set, got 6, the size of a batch"


def step(loss, x, y):
    loss(x, y).backward()


def epochs(step, x, y, number=2):
    """Batches of 6."""
    for _ in range(number):
        for rows in torch.arange(len(x)).split(6):
            step(x[rows], y[rows])


@pytest.mark.parametrize("make", [models.regressor, models.classifier])
def test_num_data_that_is_the_batch_size_is_told_once(make):
    x, y = models.data(24)
    y = y if make is models.regressor else torch.arange(24) // 8
    model = make(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    with pytest.warns(UserWarning, match=MISTAKE) as caught:
        epochs(lambda *batch: loss(*batch).backward(), x, y)
    assert len(caught) == 1


def test_svi_tells_it_too():
    x, y = models.data(24)
    model = models.regressor(num_data=6)
    svi = SVI(model, vsd.VSDGuide(model), Adam({"lr": 0.01}), vsd.VSD_ELBO())
    with pytest.warns(UserWarning, match=MISTAKE):
        epochs(svi.step, x, y)


@pytest.mark.parametrize("way", ["same", "copied", "shuffled", "augmented", "missing"])
def test_a_true_full_batch_is_no_mistake(way):
    x, y = models.data(6)
    if way == "missing":
        y[0] = torch.nan
    model = models.regressor(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            order = torch.randperm(6) if way == "shuffled" else torch.arange(6)
            noise = torch.randn_like(x) if way == "augmented" else 0.0
            step(loss, x if way == "same" else x[order] + noise, y if way == "same" else y[order])


def test_evaluation_is_not_training():
    x, y = models.data(24)
    model = models.regressor(num_data=6)
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
    x, y = models.data(24)
    model = models.regressor(num_data=6)
    guide = vsd.VSDGuide(model)
    for n in (6, 12, 24):
        model.num_data = n
        models.train(model, guide, x[:n], y[:n], steps=2)


def test_looking_ends_and_keeps_nothing():
    """A few looks in all: later steps cost nothing and hold no targets."""
    x, y = models.data(6)
    model = models.regressor(num_data=6)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    for _ in range(4):
        step(loss, x, y)
    assert model._watch.first is None
    step(loss, x, y + 1)  # too late to be seen


def test_a_watched_model_is_saved_as_before():
    model = models.regressor()
    keys = set(model.state_dict())
    pyro.poutine.trace(model).get_trace(*models.data())
    assert set(model.state_dict()) == keys
