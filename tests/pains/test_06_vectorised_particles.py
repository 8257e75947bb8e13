"""Elsewhere many sampled networks cannot run at once (pyro#503, open since 2017), draws gain dimensions nobody expects
(pyro#2123), and batch statistics have no meaning under particles (numpyro#1990). Here every layer that becomes random
takes ``vectorize_particles`` and ``Predictive(parallel=True)``; where another layer does not, the objective says so and
takes the loop.

More of it: ``tests/infer/test_particles.py``.
"""

import warnings

import pyro
import pytest
import torch
from pyro.infer import Predictive
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.infer.particles import why_not_vectorized

P, B = 5, 6


def convolution(kind, dims, **options):
    """A layer from 4 to 6 channels on images of side 4, and a head."""
    layer = kind(4, 6, 3, **options)
    side = layer(torch.zeros(1, 4, *[4] * dims)).shape[-1]
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(-dims - 1), nn.Linear(6 * side**dims, 1)), (4, *[4] * dims)


LAYERS = {
    "Linear": lambda: (vsd.nn.mlp([4, 5, 1], nn.Tanh), (4,)),
    "Linear on tokens": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(-2), nn.Linear(15, 1)), (3, 4)),
    "Conv1d": lambda: convolution(nn.Conv1d, 1),
    "Conv2d": lambda: convolution(nn.Conv2d, 2),
    "Conv2d, groups": lambda: convolution(nn.Conv2d, 2, groups=2),
    "Conv3d": lambda: convolution(nn.Conv3d, 3),
    "ConvTranspose1d": lambda: convolution(nn.ConvTranspose1d, 1),
    "ConvTranspose2d": lambda: convolution(nn.ConvTranspose2d, 2),
    "ConvTranspose2d, groups": lambda: convolution(nn.ConvTranspose2d, 2, groups=2),
    "ConvTranspose3d": lambda: convolution(nn.ConvTranspose3d, 3),
}
CASES = [
    pytest.param(make, side, prior, id=f"{name}-{side}-{prior}")
    for name, make in LAYERS.items()
    for side in (("out", "in") if "Conv" in name else ("out",))
    for prior in ("gaussian", "hierarchical")
]
PRIORS = {"gaussian": vsd.nn.GaussianPrior(), "hierarchical": vsd.nn.HierarchicalPrior()}
every_layer = pytest.mark.parametrize(("make", "side", "prior"), CASES)


def regression(make, side="out", prior="gaussian"):
    net, shape = make()
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net, PRIORS[prior], conv_noise=side), num_data=20, noise=1e-3)
    return model, vsd.VSDGuide(model, init_alpha=0.3), torch.randn(B, *shape), torch.randn(B)


@every_layer
def test_particles_in_one_pass_equal_particles_one_by_one(make, side, prior):
    """The same draws, in one pass and each alone, give the same densities; the objective's own check is used."""
    model, guide, x, y = regression(make, side, prior)
    elbo = vsd.VSD_ELBO(P, True)
    elbo._guess_max_plate_nesting(model, guide, (x, y), {})
    passes = (elbo._get_trace, elbo._get_vectorized_trace)
    single, together = (lambda run=run: run(model, guide, (x, y), {}) for run in passes)
    assert why_not_vectorized(model, single, together, P) is None
    model_trace, _ = together()
    assert model_trace.nodes["y"]["fn"].batch_shape[0] == P


@every_layer
def test_predictive_in_parallel_has_the_spread_of_predict(make, side, prior):
    model, guide, x, _ = regression(make, side, prior)
    S = 400
    drawn = Predictive(model, guide=guide, num_samples=S, parallel=True, return_sites=("y",))(x)["y"]
    assert drawn.shape == (S, B)
    expected = vsd.predict(model, guide, x, num_samples=S, seed=0).samples
    error = ((drawn.var(0) + expected.var(0)) / S).sqrt()
    assert float(((drawn.mean(0) - expected.mean(0)) / error).abs().max()) < 4.5
    assert float((drawn.var(0) / expected.var(0)).log().abs().max()) < (0.5 if prior == "gaussian" else 1.0)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(-2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest, self.head = nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.rest(self.first(x))[0][..., -1, :])


# The last three go on without an error, with wrong numbers: B is the number of channels.
FOREIGN = {
    "pooling": lambda: (vsd.nn.lenet5(num_classes=1, image_size=16), (1, 16, 16)),
    "flatten from the left": lambda: (nn.Sequential(nn.Conv2d(4, 2, 3), nn.Flatten(1), nn.Linear(8, 1)), (4, 4, 4)),
    "attention": lambda: (Attends(), (3, 4)),
    "recurrent": lambda: (Recurrent(), (3, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, B), nn.BatchNorm1d(B), nn.Tanh(), nn.Linear(B, 1)), (4,)),
    "group norm": lambda: (nn.Sequential(nn.Linear(4, B), nn.GroupNorm(2, B), nn.Linear(B, 1)), (4,)),
    "softmax from the left": lambda: (nn.Sequential(nn.Linear(4, B), nn.Softmax(1), nn.Linear(B, 1)), (4,)),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_other_layers_take_the_loop_and_one_message_says_so(make):
    model, guide, x, y = regression(make)
    model.eval()  # batch norm moves its statistics otherwise
    elbo = vsd.VSD_ELBO(P, True)
    pyro.set_rng_seed(1)
    with pytest.warns(UserWarning, match=r"vectorize_particles: expected a network .*5 particles are drawn in a loop"):
        found = elbo.loss(model, guide, x, y)
    pyro.set_rng_seed(1)
    assert found == pytest.approx(vsd.VSD_ELBO(P).loss(model, guide, x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss_and_grads(model, guide, x, y)


@pytest.mark.parametrize("name", ["batch norm", "group norm"])
def test_pyros_parallel_draws_through_a_norm_are_refused(name):
    """With as many rows as channels they would be wrong without a word; Pyro's Predictive has no loop to go back to."""
    model, guide, x, _ = regression(FOREIGN[name])
    with pytest.raises(ValueError, match=r"would take rows for channels\. Use vsd\.predict, or Predictive\(parallel"):
        Predictive(model.eval(), guide=guide, num_samples=4, parallel=True)(x)


def test_an_error_of_the_user_is_not_taken_for_one_of_the_particles():
    model, guide, x, y = regression(LAYERS["Linear"])
    with pytest.raises(ValueError, match=r"y\.squeeze\(-1\)"):  # and no warning, which would be an error
        vsd.VSD_ELBO(P, True).loss(model, guide, x, y.unsqueeze(-1))
