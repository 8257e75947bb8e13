"""Elsewhere two guides of one model meet in Pyro's global store, and users clear it between runs (pyro#2912) or switch
sharing off (pyro#3149). Here a guide owns its parameters, whatever ``module_local_params`` says.

More of it: ``tests/infer/test_parameters.py``.
"""

import pyro
import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models


@pytest.mark.parametrize("local", [False, True], ids=["store", "module_local"])
@pytest.mark.parametrize("make", [models.regressor, models.HandWritten], ids=["listed", "hand_written"])
def test_two_guides_of_one_model_alive_at_once(make, local):
    pyro.settings.set(module_local_params=local)
    model, (x, y) = make(), models.data()
    guides = [vsd.VSDGuide(model).setup(x, y) for _ in range(2)]
    losses = [vsd.VSD_ELBO()(model, guide) for guide in guides]
    optimizers = [torch.optim.Adam(loss.parameters(), lr=0.01) for loss in losses]
    for turn in (0, 1, 0):
        before = [models.snapshot(guide) for guide in guides]
        optimizers[turn].zero_grad()
        losses[turn](x, y).backward()
        optimizers[turn].step()
        assert models.moved(before[turn], guides[turn]) == set(before[turn])
        assert models.moved(before[1 - turn], guides[1 - turn]) == set()


def test_a_second_guide_under_svi_starts_where_it_was_made():
    """Without ``pyro.clear_param_store()`` between the two."""
    model, (x, y) = models.regressor(), models.data()
    models.train(model, vsd.VSDGuide(model), x, y)
    guide = vsd.VSDGuide(model, num_reflections=0)
    before = models.snapshot(guide)
    models.train(model, guide, x, y, steps=1, lr=1e-3)
    after = models.snapshot(guide)
    for name, value in before.items():  # one step of Adam moves each number by its rate
        if value.numel():
            assert 0 < float((after[name] - value).abs().max()) < 2e-3, name


def test_the_store_and_the_guide_give_the_same_numbers():
    """pyro#2470: there two ways of reading a parameter give its constrained and its unconstrained value."""
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    own = dict(guide.named_parameters())
    stored = {name: pyro.param(f"VSDGuide.{name}") for name in own}
    assert all(torch.equal(own[name], value) for name, value in stored.items())
