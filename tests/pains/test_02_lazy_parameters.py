"""Elsewhere a guide's parameters exist only after its first call, so that a trained one cannot be loaded (TyXe#15,
cell2location#430) and an optimiser made too early trains nothing (scvi-tools#1845). Here they exist from the start
where the model lists its sites, a state loads into a fresh guide without data, and a guide without parameters says so.

More of it: ``tests/infer/test_saving.py``.
"""

import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models


def test_an_optimiser_made_before_the_first_step_trains_everything():
    model, (x, y) = models.regressor(noise="latent"), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    before = models.snapshot(loss)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    loss(x, y).backward()
    optimizer.step()
    assert set(dict(loss.named_parameters())) == set(before)
    assert models.moved(before, loss) == set(before)


@pytest.mark.parametrize("make", [models.regressor, models.HandWritten], ids=["listed", "hand_written"])
def test_a_state_loads_into_a_fresh_guide_without_data(make):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    fresh = vsd.VSDGuide(model)
    fresh.load_state_dict(guide.state_dict())
    first, second = (vsd.predict(model, g, x, num_samples=5, seed=0).samples for g in (guide, fresh))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "use", [lambda g: g.parameter_groups(), lambda g: g.median(), lambda g: vsd.predict(g.model, g, torch.ones(2, 3))]
)
def test_a_guide_without_parameters_says_so_in_a_sentence(use):
    with pytest.raises(ValueError, match=r"has not seen its model's sites\..* guide\.setup\("):
        use(vsd.VSDGuide(models.HandWritten()))
