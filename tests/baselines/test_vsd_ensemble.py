"""Ensembles among the baselines, with equal weights and stacked."""

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.baselines import make_method


def rows(number=120):
    x = torch.randn(number, 3)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(number)


@pytest.mark.parametrize("name", ["vsd_ensemble", "deep_ensemble"])
def test_stacking_is_used_saved_and_better_on_its_rows(name, tmp_path):
    (x, y), (held_x, held_y) = rows(), rows()
    method = make_method(name, vsd.nn.mlp([3, 8, 1]), num_data=120, task="regression", lr=0.01)
    for _ in range(30):
        method.step(x, y)
    before = method.predict(held_x, seed=0)
    found = method.stack(held_x, held_y)
    after = method.predict(held_x, seed=0)
    assert found.fitted
    assert vsd.metrics.log_likelihood(after, held_y) > vsd.metrics.log_likelihood(before, held_y)
    torch.save(method.state_dict(), tmp_path / "method.pt")
    other = make_method(name, vsd.nn.mlp([3, 8, 1]), num_data=120, task="regression", lr=0.01)
    other.load_state_dict(torch.load(tmp_path / "method.pt", weights_only=True))
    torch.testing.assert_close(other.predict(held_x, seed=0).samples, after.samples)
    torch.testing.assert_close(other.predict(held_x, seed=0).weights, after.weights)


def test_members_have_their_own_weights_and_starts():
    method = make_method("vsd_ensemble", vsd.nn.mlp([3, 8, 2]), num_data=50, kl_weight=(0.1, 2.0))
    assert [member.elbo.kl_weight for member in method.members] == [0.1, 2.0]
    first, second = (member.guide.theta.net._modules["0"].weight for member in method.members)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="kl_weight"):
        make_method("vsd_ensemble", vsd.nn.mlp([3, 8, 2]), num_data=50, kl_weight=())
