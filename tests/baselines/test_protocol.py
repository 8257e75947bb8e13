"""What methods share: observation, steps, batches of a prediction, states."""

import pyro
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines import METHODS, make_method
from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.protocol import Observation, gaussian_penalty
from pyro_vsd.baselines.vsd import VSD


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b], -1))


@pytest.mark.parametrize("cls", [MAP, VSD])
def test_networks_of_several_inputs(cls):
    x, y = (torch.randn(8, 2), torch.randn(8, 3)), torch.arange(8) % 2
    method = cls(TwoInputs(), num_data=8)
    method.step(x, y)
    assert method.predict(x, num_samples=2, batch_size=3).probs.shape == (8, 2)


def test_prediction_does_not_depend_on_the_batch_size():
    method = MAP(vsd.nn.mlp([3, 4, 2]), num_data=10)
    x = torch.randn(10, 3)
    torch.testing.assert_close(method.predict(x, batch_size=3).probs, method.predict(x).probs)


def test_prediction_puts_modes_and_the_generator_back():
    method = MAP(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), num_data=10)
    method.train()
    state = torch.get_rng_state()
    predictions = [method.predict(torch.ones(5, 3), seed=0).probs for _ in range(2)]
    assert torch.equal(*predictions)  # evaluation mode
    assert method.net[1].training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [{"num_samples": 0}, {"batch_size": 0}])
def test_counts_are_checked(options):
    with pytest.raises(ValueError, match=rf"\b{next(iter(options))}\b"):
        MAP(vsd.nn.mlp([3, 2]), num_data=10).predict(torch.ones(5, 3), **options)


def test_no_rows():
    with pytest.raises(ValueError, match=r"\bx\b"):
        MAP(vsd.nn.mlp([3, 2]), num_data=10).predict(torch.ones(0, 3))


def test_a_loss_that_is_not_finite_changes_nothing():
    method = MAP(vsd.nn.mlp([3, 2]), num_data=10)
    before = method.net[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"\bloss\b.* nan "):
        method.step(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.long))
    assert torch.equal(method.net[0].weight, before)
    assert method.num_steps == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_real_targets_without_the_task(name, outputs, shape):
    method = make_method(name, vsd.nn.mlp([3, 4, outputs]), num_data=8)
    with pytest.raises(ValueError, match=r"\by\b.*task='regression'"):
        method.step(torch.randn(8, 3), torch.randn(shape))


def test_state_of_a_different_method():
    net = vsd.nn.mlp([3, 2])
    with pytest.raises(ValueError, match=r"\bstate_dict\b.*\bVSD\b"):
        MAP(net, num_data=10).load_state_dict(VSD(net, num_data=10).state_dict())


def test_a_users_store_is_left_alone():
    mine = pyro.param("net.0.bias", torch.ones(2))
    VSD(vsd.nn.mlp([3, 2]), num_data=10).step(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    assert list(pyro.get_param_store()) == ["net.0.bias"]
    assert torch.equal(pyro.param("net.0.bias"), mine)


@pytest.mark.parametrize(
    ("output", "target", "means"),
    [
        ((6, 1), (6,), (6,)),
        ((6,), (6,), (6,)),
        ((6, 3), (6, 3), (6, 3)),
        ((5, 6, 1), (6,), (5, 6)),
        ((5, 6, 3), (6, 3), (5, 6, 3)),
    ],
)
def test_regression_shapes(output, target, means):
    """One entry per row, of each sample where outputs of several come in front."""
    output, y = torch.randn(output), torch.randn(target)
    found = Observation("regression", 0.5, nn.Linear(1, 1)).log_prob(output, y)
    expected = torch.distributions.Normal(output.reshape(means), 0.5).log_prob(y)
    torch.testing.assert_close(found, expected.sum(-1) if len(target) == 2 else expected)


def test_targets_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"\by\b"):
        Observation("regression", 0.5, nn.Linear(1, 1)).log_prob(torch.ones(6, 1), torch.ones(6, 2))


def test_penalty_counts_weights_alone():
    layer = nn.Linear(2, 2)
    found = gaussian_penalty(layer.parameters(), 2.0)
    torch.testing.assert_close(found, layer.weight.square().sum() / 8)
    assert gaussian_penalty(layer.parameters(), None) == 0


def test_penalty_has_a_gradient_at_zero():
    weight = torch.zeros(2, 2, requires_grad=True)
    gaussian_penalty([weight], 1.0).backward()
    assert torch.equal(weight.grad, torch.zeros(2, 2))
