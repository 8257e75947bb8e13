"""The ensemble: members of their own, each trained as if alone."""

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.baselines.deep_ensemble import DeepEnsemble
from pyro_vsd.baselines.map import MAP


def test_each_member_is_trained_as_if_alone():
    net = vsd.nn.mlp([3, 4, 1])
    x, y = torch.randn(10, 3), torch.randn(10)
    ensemble = DeepEnsemble(net, num_data=40, task="regression", num_members=3)
    singles = [MAP(member.net, num_data=40, task="regression") for member in ensemble.members]
    for _ in range(5):
        loss = ensemble.step(x, y)
        losses = [single.step(x, y) for single in singles]
        assert loss == pytest.approx(sum(losses) / 3)
    prediction = ensemble.predict(x)
    expected = [single.predict(x) for single in singles]
    torch.testing.assert_close(prediction.samples, torch.cat([p.samples for p in expected]))
    torch.testing.assert_close(prediction.scales, torch.cat([p.scales for p in expected]))


def test_members_start_apart_and_the_first_as_given():
    net = vsd.nn.mlp([3, 4, 2])
    ensemble = DeepEnsemble(net, num_data=10, num_members=3, init=vsd.nn.xavier_uniform_)
    weights = [member.net[0].weight for member in ensemble.members]
    assert torch.equal(weights[0], net[0].weight)
    assert all(not torch.equal(weights[0], other) for other in weights[1:])
    assert (ensemble.members[1].net[0].bias == 0).all()  # Xavier's, where the layers' own would not be zero


@pytest.mark.parametrize(("asked", "given"), [(100, 4), (2, 2)])
def test_no_more_samples_than_members(asked, given):
    ensemble = DeepEnsemble(vsd.nn.mlp([3, 4, 2]), num_data=10, num_members=4)
    assert ensemble.predict(torch.randn(5, 3), num_samples=asked).num_samples == given


def test_number_of_members_is_checked():
    with pytest.raises(ValueError, match=r"\bnum_members\b"):
        DeepEnsemble(vsd.nn.mlp([3, 4, 2]), num_data=10, num_members=0)
