"""Elsewhere a positive parameter becomes NaN (pyro#1755), a prior's density minus infinity spoils the loss (blitz#43),
log-variance and standard deviation are mixed up (PyTorch-BayesianCNN#8). Here rates are stored as logarithms, vectors
of any length can be normalised, no density of a prior is computed, and a loss that is not finite names its cause.

More of it: ``tests/training/test_numbers.py`` (all edges, and 20,000 steps in float32 in ``test_load.py``).
"""

import math

import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models


def single():
    x, y = (v.float() for v in models.data())
    model = models.regressor(noise="learned").float()
    return model, vsd.VSDGuide(model), x, y


@pytest.mark.parametrize("role", ["log_alpha", "vectors", "theta"])
@pytest.mark.parametrize("value", [0.0, 25.0, -25.0])
def test_a_step_from_any_finite_parameter_is_finite(role, value):
    """In float32: droprates of e^±25, Householder vectors of length zero, weights that are all zero."""
    model, guide, x, y = single()
    for name, parameter in guide.named_parameters():
        if name.startswith(role):
            parameter.data.fill_(value)
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in loss.parameters())


def test_a_large_step_size_is_survived_in_float32():
    model, guide, x, y = single()
    losses = models.train(model, guide, x, y, steps=100, lr=0.3)
    assert all(map(math.isfinite, losses))
    assert bool((guide.alpha("net.0.weight") > 0).all())


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda guide, x: guide.theta.net._modules["0"].weight.data.fill_(torch.nan), r"theta\.net\.0\.weight"),
        (lambda guide, x: x.fill_(torch.nan), "the log-likelihood of site 'y' is nan"),
    ],
    ids=["parameter", "data"],
)
def test_a_loss_that_is_not_finite_names_its_cause(spoil, named):
    model, guide, x, y = single()
    spoil(guide, x)
    with pytest.raises(ValueError, match=f"expected a finite loss, got nan: .*{named}"):
        vsd.VSD_ELBO().loss(model, guide, x, y)


def test_a_parameter_that_became_nan_is_named_with_the_step():
    """The loss of a step is that of the parameters before it, so it is the parameters that ``fit`` looks at."""
    model, guide, x, y = single()

    class Spoils(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][0].data[0] = torch.nan

    data = vsd.datasets.Data(x, y)
    message = r"parameter 'theta\.net\.0\.weight': expected finite entries, got NaN .*after 1"
    with pytest.raises(ValueError, match=message):
        vsd.fit(model, guide, data, epochs=1, batch_size=len(x), optimizer=lambda p: Spoils(p, lr=1e-3), progress=False)
