"""Elsewhere memory grows with the number of draws (numpyro#1503) and of steps (pyro#798, #3068), and predictions in
batches differ from those in one piece (gpax#116). Here draws are running sums, a step leaves nothing behind, and a seed
gives the same numbers however rows are cut.

More of it: ``tests/infer/test_predict.py``, ``tests/training/test_load.py`` (20,000 steps).
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_vsd as vsd
from tests.infer import models


def attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            h = self.embed(x).unsqueeze(1)
            return self.head(self.attention(h, h, h)[0].squeeze(1))

    return vsd.nn.Regressor(vsd.nn.bayesianize(Net()), num_data=12)


MODELS = {
    "per row": models.regressor,
    "hierarchical": lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()),
    "latent": lambda: models.regressor(noise="latent"),
    "dense draw": attention,
}


@pytest.mark.parametrize("batch_size", [1, 5, 7])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_batched_equals_unbatched_under_one_seed(make, batch_size):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    whole, parts = (vsd.predict(model, guide, x, num_samples=6, seed=3, batch_size=b) for b in (10**6, batch_size))
    assert_close(parts.samples, whole.samples)
    assert_close(parts.variance, whole.variance)
    assert float(whole.samples.std(0).min()) > 0


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries = max(self.entries, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_no_tensor_grows_with_the_number_of_draws():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    largest = []
    for num_samples in (50, 1000):
        with Largest() as mode:
            vsd.predict(model, guide, x, num_samples=num_samples, batch_size=100, keep_samples=False)
        largest.append(mode.entries)
    assert largest[0] == largest[1]


def test_a_step_leaves_no_tensor_behind():
    model, (x, y) = models.regressor(num_data=100), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    step(), step()
    before = alive()
    for _ in range(20):
        step()
    assert alive() == before


def test_a_step_leaves_no_cycle_of_traces():
    """pyro#798: traces in cycles wait for the collector, and memory grows meanwhile."""
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    gc.collect()
    gc.disable()
    try:
        draw = weakref.ref(guide(x)["net.0.weight"].draw)
        assert draw() is None
    finally:
        gc.enable()
