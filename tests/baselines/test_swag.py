"""SWAG: its moments against a direct computation, its snapshots, BatchNorm."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import pyro_vsd as vsd
from pyro_vsd.baselines.swag import SWAG


def walk(steps, max_rank, **options):
    """A method after some epochs of one batch each, and its weights after each of them."""
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    method = SWAG(vsd.nn.mlp([3, 2]), num_data=20, start=0, max_rank=max_rank, lr=0.3, **options)
    path = []
    for _ in range(steps):
        method.step(x, y)
        path.append(parameters_to_vector(method.net.parameters()).detach())
    return method, torch.stack(path)


@pytest.mark.parametrize(("steps", "max_rank"), [(4, 10), (12, 5)])
def test_moments_equal_a_direct_computation(steps, max_rank):
    method, path = walk(steps, max_rank)
    torch.testing.assert_close(method.mean, path.mean(0))
    torch.testing.assert_close(method.variance, path.var(0, correction=0))
    running = path.cumsum(0) / torch.arange(1, steps + 1).unsqueeze(-1)
    kept = (path - running)[-max_rank:]
    # the order of the columns does not matter
    torch.testing.assert_close(method.deviations.mT @ method.deviations, kept.mT @ kept)


def test_draws_have_the_stated_mean_and_covariance():
    method, _ = walk(steps=8, max_rank=4, scale=0.5)
    drawn = torch.stack([method.draw_weights() for _ in range(20_000)])
    columns = method.deviations
    expected = 0.25 * 0.5 * (method.variance.diag() + columns.mT @ columns / (len(columns) - 1))
    torch.testing.assert_close(drawn.mean(0), method.mean, rtol=0, atol=0.01)
    torch.testing.assert_close(drawn.mT.cov(), expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize(("start", "period", "expected"), [(0, 1, 6), (2, 1, 4), (1, 2, 2), (0, 0.5, 12), (10, 1, 0)])
def test_snapshots_count_epochs(start, period, expected):
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    method = SWAG(vsd.nn.mlp([3, 2]), num_data=20, start=start, period=period)
    for _ in range(6 * 4):
        method.step(x, y)
    assert method.num_snapshots == expected


def test_too_few_snapshots_are_an_error():
    method, _ = walk(steps=1, max_rank=4)
    with pytest.raises(ValueError, match=r"\bsnapshots\b.*\bstart="):
        method.predict(torch.randn(2, 3))


def batch_norm_method():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x, y = 3 + torch.randn(40, 3), torch.randint(2, (40,))
    method = SWAG(net, num_data=40, start=0, lr=0.3)
    for _ in range(5):
        method.step(x, y)
    return method, x


def test_batch_norm_statistics_for_each_draw():
    method, x = batch_norm_method()
    before = {name: value.clone() for name, value in method.named_buffers()}
    stale = method.predict(x, num_samples=3, seed=0)
    fresh = method.predict(x, num_samples=3, seed=0, batch_norm_data=[x[:20], (x[20:], None)])
    assert not torch.allclose(stale.samples, fresh.samples, atol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in method.named_buffers())
    assert method.batch_norm_data is None


@pytest.mark.parametrize(("option", "value"), [("start", -1), ("period", 0), ("max_rank", 1)])
def test_wrong_options(option, value):
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        SWAG(vsd.nn.mlp([3, 2]), num_data=10, **{option: value})


def test_gradient_is_that_of_the_loss_per_row_and_bounded():
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    net = vsd.nn.mlp([3, 2])
    expected = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    for max_norm in (None, 0.01):
        method = SWAG(net, num_data=1000, prior_scale=None, max_norm=max_norm)
        method.step(x, y)
        found = [p.grad for p in method.net.parameters()]
        norm = torch.cat([g.flatten() for g in found]).norm()
        if max_norm is None:
            torch.testing.assert_close(found, list(expected))
        else:
            assert norm.item() == pytest.approx(max_norm, rel=1e-3)


def test_memory_format_makes_no_difference():
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    net = vsd.nn.convnet(3, image_size=8)
    predictions = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        method = SWAG(net.to(memory_format=memory_format), num_data=6, start=0, lr=0.1)
        for _ in range(3):
            method.step(x.contiguous(memory_format=memory_format), y)
        predictions.append(method.predict(x, num_samples=4, seed=0).probs)
    torch.testing.assert_close(predictions[0], predictions[1])
