"""Elsewhere the truth lies outside of every interval (blitz#50, #97), spreads are constant because fitted noise
dominates (Laplace#142), and two moons do not look like the paper's (Laplace#88). Here three gates: two moons, a gap
in the middle of the data, coverage.

What no gate promises: multiplicative noise vanishes where activations do, so a ReLU network on a bare number that is
zero in the gap is *not* less sure there. With features that live in the gap it is.
"""

import math

import pytest
import torch
from torch import nn

import pyro_vsd as vsd


def train(model, guide, x, y, steps):
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


def moons(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(rows, generator=generator)
    y = torch.arange(rows) % 2
    upper = torch.stack([angle.cos(), angle.sin()], -1)
    x = torch.where(y.unsqueeze(-1) == 0, upper, torch.tensor([1.0, 0.5]) - upper)
    return x + 0.15 * torch.randn(rows, 2, generator=generator), y


@pytest.mark.slow
def test_two_moons():
    x, y = moons(200, seed=0)
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([2, 50, 50, 1])), num_data=200)
    guide = vsd.VSDGuide(model)
    train(model, guide, x, y, 600)
    x, y = moons(400, seed=1)
    near = vsd.predict(model, guide, x, num_samples=100, seed=0)
    assert vsd.metrics.accuracy(near, y) > 0.96
    assert vsd.metrics.ece(near, y) < 0.05
    # between the moons it does not know, far away it knows less than at the data
    between = vsd.predict(model, guide, torch.tensor([[0.5, 0.25], [0.1, 0.4], [0.9, 0.1]]), num_samples=100, seed=0)
    angle = torch.arange(16) * math.pi / 8
    circle = torch.tensor([0.5, 0.25]) + 8 * torch.stack([angle.cos(), angle.sin()], -1)
    far = vsd.predict(model, guide, circle, num_samples=100, seed=0)
    assert float(between.entropy.mean()) > 2 * float(near.entropy.mean())
    assert float(far.mutual_information.mean()) > 1.5 * float(near.mutual_information.mean())
    plain = vsd.nn.mean_network(model, guide)(circle).detach().abs().sigmoid()
    assert float(plain.mean()) > 0.99  # where a plain network is sure
    assert float(far.confidence.mean()) < 0.98


class Waves(nn.Module):
    """Fixed random cosines of a number: features that do not vanish anywhere."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("frequency", 2 * torch.randn(1, 50, generator=generator))
        self.register_buffer("phase", 2 * math.pi * torch.rand(50, generator=generator))

    def forward(self, x):
        return torch.cos(x @ self.frequency + self.phase)


def test_a_gap_in_the_middle_and_noise_of_the_right_size():
    train_set, grid = vsd.datasets.two_clusters()
    net = nn.Sequential(Waves(), *vsd.nn.mlp([50, 50, 1]))
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=len(train_set), noise="learned")
    guide = vsd.VSDGuide(model)
    train(model, guide, train_set.x, train_set.y, 500)
    x = grid.x.squeeze(-1)
    at_data = ((x > -1) & (x < -0.7)) | ((x > 0.5) & (x < 1))
    in_gap, outside = (x > -0.4) & (x < 0.2), x.abs() > 1.3
    prediction = vsd.predict(model, guide, grid.x, num_samples=200, seed=0)
    spread = prediction.epistemic.sqrt()
    assert float(spread[in_gap].mean()) > 2 * float(spread[at_data].mean())
    assert float(spread[outside].mean()) > 2 * float(spread[at_data].mean())
    # Laplace#142: learnt noise that swallows everything. The true one is 0.1.
    assert 0.07 < float(prediction.aleatoric.sqrt().mean()) < 0.15
    # blitz#50: the truth inside of the interval, at the data
    generator = torch.Generator().manual_seed(1)
    y = grid.y[at_data] + 0.1 * torch.randn(int(at_data.sum()), generator=generator)
    held_out = vsd.predict(model, guide, grid.x[at_data], num_samples=200, seed=0)
    assert vsd.metrics.coverage(held_out, y) > 0.85
