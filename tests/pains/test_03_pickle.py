"""Elsewhere serialising a guide spoils the original (pyro#3430), and hooks cannot be pickled (Laplace#159). Here model
and guide go through pickle, ``deepcopy`` and spawned workers, before and after the first step, and the original
trains on.

More of it: ``tests/infer/test_parameters.py``.
"""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def mixed():
    """Norms, and a latent scale beside the weights."""
    return vsd.nn.Regressor(
        vsd.nn.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1))),
        num_data=models.N,
        noise="latent",
    )


@pytest.mark.parametrize("trained", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [models.regressor, models.HandWritten, mixed])
def test_a_copy_predicts_the_same_and_the_original_trains_on(make, duplicate, trained):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    if trained:
        models.train(model, guide, x, y)
    other_model, other = duplicate((model, guide))
    assert guide.model is model
    pairs = (model, guide), (other_model, other)
    first, second = (vsd.predict(m, g, x, num_samples=3, seed=0).samples for m, g in pairs)
    assert torch.equal(first, second)
    before, copied = models.snapshot(guide), models.snapshot(other)
    models.train(model, guide, x, y)
    assert models.moved(before, guide) == set(before)
    assert models.moved(copied, other) == set()


def test_spawned_workers():
    """One worker, which starts from nothing, predicts as this process does, before and after training here."""
    model, (x, y) = models.regressor(prior=vsd.nn.HierarchicalPrior()), models.data()
    guide = vsd.VSDGuide(model)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(2):
            before = models.snapshot(guide)
            there = pool.submit(vsd.predict, model, guide, x, num_samples=3, seed=0).result()
            assert_close(there.samples, vsd.predict(model, guide, x, num_samples=3, seed=0).samples)
            models.train(model, guide, x, y)
            assert models.moved(before, guide) == set(before)
