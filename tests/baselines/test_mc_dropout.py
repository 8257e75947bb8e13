"""Dropout that stays on: the stated variance, one mask per example, the stated prior."""

import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.baselines.mc_dropout import MCDropout


def regressor(net, **options):
    return MCDropout(net, num_data=10, task="regression", noise=0.1, **options)


def samples(method, x, num_samples):
    """``(S, N)``; copies of a row have masks of their own, so few passes give many samples."""
    drawn = method.predict(x.repeat(num_samples, 1), num_samples=1, batch_size=10_000, seed=0).samples
    return drawn.reshape(num_samples, len(x))


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_samples_have_the_stated_mean_and_variance(p):
    net = nn.Linear(6, 1, bias=False)
    x = torch.randn(4, 6)
    drawn = samples(regressor(net, input_rate=p), x, 20_000)
    terms = x * net.weight.detach()
    torch.testing.assert_close(drawn.mean(0), terms.sum(-1), rtol=0, atol=0.03)
    torch.testing.assert_close(drawn.var(0), p / (1 - p) * terms.square().sum(-1), rtol=0.05, atol=0)


def test_masks_are_drawn_per_example():
    drawn = samples(regressor(nn.Linear(8, 1), input_rate=0.5), torch.ones(50, 8), 1)
    assert len(drawn.unique()) > 10


@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (nn.Linear(5, 2), torch.ones(3, 7, 5), (3, 1, 5)),
        (nn.Conv1d(5, 2, 3), torch.ones(3, 5, 8), (3, 5, 1)),
        (nn.Conv2d(5, 2, 3), torch.ones(3, 5, 8, 8), (3, 5, 1, 1)),
        (nn.ConvTranspose2d(5, 2, 3), torch.ones(3, 5, 8, 8), (3, 5, 1, 1)),
        (nn.Conv2d(5, 2, 3), torch.ones(5, 8, 8), (5, 1, 1)),
        (nn.Linear(5, 2), torch.ones(5), (5,)),
    ],
)
def test_positions_of_an_example_share_a_mask(layer, x, expected):
    method = MCDropout(layer, num_data=10, input_rate=0.5)
    seen = []
    method.net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    method.net(x)
    corner = seen[0][tuple(slice(0, size) for size in expected)]
    torch.testing.assert_close(seen[0], corner.expand(x.shape))
    assert set(corner.unique().tolist()) == {0.0, 2.0}


def test_the_first_layer_has_its_own_rate():
    net = vsd.nn.mlp([3, 4, 4, 2])
    method = MCDropout(net, num_data=10, rate=0.3)
    assert method.rates == {"0.weight": 0.0, "2.weight": 0.3, "4.weight": 0.3}


def test_rates_by_layer_and_selection():
    net = vsd.nn.lenet5()
    assert MCDropout(net, num_data=10, rate={"fc3": 0.2}, include="fc*").rates == {
        "fc1.weight": 0.0, "fc2.weight": 0.0, "fc3.weight": 0.2,
    }  # fmt: skip
    assert set(MCDropout(net, num_data=10, exclude="conv*").rates) == {"fc1.weight", "fc2.weight", "fc3.weight"}


def test_penalty_is_the_expected_negative_log_prior():
    """E‖W‖² / 2σ² over masks, by sampling the masks."""
    net = nn.Linear(6, 2, bias=False)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    losses = []
    for prior_scale in (0.5, None):
        method = MCDropout(net, num_data=4, input_rate=0.4, prior_scale=prior_scale)
        torch.manual_seed(0)
        losses.append(method.loss(x, y).item())
    masks = torch.nn.functional.dropout(torch.ones(100_000, 6), 0.4)
    expected = (masks.square().mean(0) * net.weight.detach().square()).sum() / (2 * 0.5**2)
    assert losses[0] - losses[1] == pytest.approx(expected.item(), rel=0.02)


@pytest.mark.parametrize(("rate", "named"), [(1.0, "'2'"), ({"fc": 0.1}, "'fc'")])
def test_wrong_rate(rate, named):
    with pytest.raises(ValueError, match=rf"\brate\b.*{named}"):
        MCDropout(vsd.nn.mlp([3, 4, 2]), num_data=10, rate=rate)
