"""Vectorised particles: one pass for many draws, through ordinary layers."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.nn import PyroSample
from torch import nn

import pyro_vsd as vsd
from tests.infer import models


class SampledBias(models.HandWritten):
    def __init__(self):
        super().__init__()
        self.first.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))


class SampledConvBias(pyro.nn.PyroModule):
    def __init__(self):
        super().__init__()
        self.conv = pyro.nn.PyroModule[nn.Conv2d](2, 4, 3)
        self.conv.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 2, 3, 3]).to_event(4))
        self.conv.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))

    def forward(self, x, y=None):
        h = self.conv(x).tanh().mean((-1, -2, -3))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(h.as_subclass(torch.Tensor), 0.5), obs=y)


def image_net(net, noise="out"):
    def make():
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net()), num_data=12)
        model.conv_noise = noise
        return model

    return make


def guide_of(model, **options):
    """A guide that puts the noise of convolutions where the case says."""
    return vsd.VSDGuide(model, conv_noise=getattr(model, "conv_noise", "out"), **options)


vectors, targets = models.data()
images = torch.randn(12, 2, 8, 8, generator=torch.Generator().manual_seed(0))
classes = models.labels()
CASES = {
    "mlp": (models.regressor, vectors, targets),
    "classifier": (models.classifier, vectors, classes),
    "hand_written": (models.HandWritten, vectors, targets),
    "one_weight": (lambda: models.one_weight, vectors, targets),
    "latent": (lambda: models.regressor(noise="latent"), vectors, targets),
    "hierarchical": (lambda: models.hierarchical, vectors, targets),
    "hierarchical_prior": (lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()), vectors, targets),
    "sampled_bias": (SampledBias, vectors, targets),
    "sampled_conv_bias": (SampledConvBias, images, targets),
    "convolution": (
        image_net(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(108, 3))),
        images, classes,
    ),
    "convolution, input noise": (
        image_net(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(108, 3)), "in"),
        images, classes,
    ),
    "layer_norm": (
        lambda: vsd.nn.Regressor(
            vsd.nn.bayesianize(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 1))), num_data=12
        ),
        vectors, targets,
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize(("make", "x", "y"), CASES.values(), ids=CASES)


@every_case
def test_vectorised_particles_equal_the_loop_in_expectation(make, x, y):
    model = make()
    guide = guide_of(model, init_alpha=0.3, init_scale=0.2).setup(x, y)
    P, n = 20, 25
    loop, vectorised = vsd.VSD_ELBO(num_particles=P), vsd.VSD_ELBO(num_particles=P, vectorize_particles=True)
    means = []
    for elbo in (loop, vectorised):
        losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(n)])
        means.append((losses.mean(), losses.std() / math.sqrt(n), elbo.terms["kl"]))
    (a, error_a, kl_a), (b, error_b, kl_b) = means
    assert float((a - b).abs() / (error_a**2 + error_b**2).sqrt()) < 4.5
    for name, kl in kl_a.items():
        assert float(kl_b[name]) == pytest.approx(float(kl), rel=1e-9)


@every_case
def test_the_spread_of_particles_is_that_of_single_draws(make, x, y):
    """Particles that shared their noise would have the right mean loss and a variance P times too large."""
    model = make()
    guide = guide_of(model, init_alpha=0.3, init_scale=0.2).setup(x, y)
    P = 20
    single = torch.tensor([vsd.VSD_ELBO().loss(model, guide, x, y) for _ in range(200)])
    elbo = vsd.VSD_ELBO(num_particles=P, vectorize_particles=True)
    many = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(100)])
    ratio = float(single.var() / many.var()) / P
    assert 0.4 < ratio < 2.5


@every_case
def test_gradients_reach_every_parameter(make, x, y):
    model = make()
    guide = guide_of(model).setup(x, y)
    vsd.VSD_ELBO(num_particles=3, vectorize_particles=True)(model, guide)(x, y).backward()
    for name, parameter in guide.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


def test_one_vectorised_particle_is_one_particle():
    model, (x, y) = models.regressor(), models.data()
    guide = guide_of(model)
    losses = []
    for vectorize in (False, True):
        pyro.set_rng_seed(0)
        losses.append(vsd.VSD_ELBO(vectorize_particles=vectorize, max_plate_nesting=1).loss(model, guide, x, y))
    assert losses[0] == pytest.approx(losses[1])


def test_training_with_vectorised_particles():
    model, (x, y) = models.regressor(noise="latent"), models.data()
    guide = guide_of(model)
    before = models.snapshot(guide)
    elbo = vsd.VSD_ELBO(num_particles=4, vectorize_particles=True)
    losses = models.train(model, guide, x, y, elbo=elbo, steps=3)
    assert all(map(math.isfinite, losses))
    assert models.moved(before, guide) == set(before)


# scvi-tools#895: there an ELBO remembers the depth of plates that it saw first.
def test_an_elbo_remembers_its_nesting_for_itself_alone():
    deep = vsd.VSD_ELBO(num_particles=3, vectorize_particles=True)
    model, (x, y) = models.regressor(), models.data()
    deep.loss(model, guide_of(model), x, y)
    assert deep.max_plate_nesting == 2
    assert vsd.VSD_ELBO().max_plate_nesting == math.inf


def test_pyros_vectorised_elbo_agrees():
    x, y = models.data()
    guide = guide_of(models.one_weight).setup(x, y)
    n = 60
    ours = vsd.VSD_ELBO(prior="model", num_particles=20, vectorize_particles=True)
    theirs = Trace_ELBO(num_particles=20, vectorize_particles=True)
    values = [torch.tensor([float(e.loss(models.one_weight, guide, x, y)) for _ in range(n)]) for e in (ours, theirs)]
    error = math.sqrt(sum(float(v.var()) / n for v in values))
    assert abs(float(values[0].mean() - values[1].mean())) < 4.5 * error


def test_identical_rows_and_particles_get_different_noise():
    x = torch.ones(4, 3)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        pyro.deterministic("out", x @ w)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal((x @ w).sum(-1), 1.0), obs=y)

    guide = guide_of(model).setup(x, torch.zeros(4))
    elbo = vsd.VSD_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1)
    trace, _ = next(elbo._get_traces(model, guide, (x, torch.zeros(4)), {}))
    out = trace.nodes["out"]["value"].detach()
    assert out.shape == (5, 4, 2)
    assert len(out[..., 0].unique()) == 20


def test_masks_and_scales_with_particles():
    x, y = models.data()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", 24, subsample=torch.arange(12)), poutine.mask(mask=torch.arange(12) < 6):
            pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)

    guide = guide_of(model, init_alpha=1e-24).setup(x, y)
    theta = guide.posterior("w").theta.detach()
    expected = 2 * torch.distributions.Normal((x @ theta).squeeze(-1), 0.5).log_prob(y)[:6].sum()
    for vectorize in (False, True):
        elbo = vsd.VSD_ELBO(num_particles=3, vectorize_particles=vectorize)
        elbo.loss(model, guide, x, y)
        assert float(elbo.terms["log_likelihood"]) == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("rows", [5, 7], ids=["as many rows as samples", "more rows"])
def test_parallel_predictive_with_a_hand_written_bias_is_refused(rows):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w + b, 0.1).to_event(1), obs=y)

    x = torch.randn(rows, 3)
    guide = guide_of(model).setup(x, torch.zeros(rows, 2))
    with pytest.raises(ValueError, match=r"\bparallel\b"):
        Predictive(model, guide=guide, num_samples=5, parallel=True)(x)
    assert Predictive(model, guide=guide, num_samples=5, parallel=False)(x)["y"].shape == (5, rows, 2)


# ---- layers, one by one
# pyro#503, open since 2017: there many sampled networks cannot run at once. pyro#2123: draws gain dimensions.

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
LAYER_CASES = [
    pytest.param(make, side, prior, id=f"{name}-{side}-{prior}")
    for name, make in LAYERS.items()
    for side in (("out", "in") if "Conv" in name else ("out",))
    for prior in ("gaussian", "hierarchical")
]
PRIORS = {"gaussian": vsd.nn.GaussianPrior(), "hierarchical": vsd.nn.HierarchicalPrior()}
every_layer = pytest.mark.parametrize(("make", "side", "prior"), LAYER_CASES)


def regression(make, side="out", prior="gaussian"):
    net, shape = make()
    chosen = PRIORS[prior]
    if isinstance(chosen, vsd.nn.HierarchicalPrior):
        chosen = vsd.nn.HierarchicalPrior(channels=side)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net, chosen), num_data=20, noise=1e-3)
    model.conv_noise = side
    return model, guide_of(model, init_alpha=0.3), torch.randn(B, *shape), torch.randn(B)


@every_layer
def test_every_random_layer_takes_particles_in_one_pass(make, side, prior):
    """The objective itself compares one pass with single draws, and warns where they differ."""
    model, guide, x, y = regression(make, side, prior)
    elbo = vsd.VSD_ELBO(P, True)
    elbo.loss(model, guide, x, y)
    assert elbo.vectorize_particles
    trace, _ = next(elbo._get_traces(model, guide, (x, y), {}))
    assert trace.nodes["y"]["fn"].batch_shape[0] == P


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


# numpyro#1990: there batch statistics have no meaning under particles.
@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_other_layers_take_the_loop_with_one_warning(make):
    model, guide, x, y = regression(make)
    model.eval()  # batch norm moves its statistics otherwise
    elbo = vsd.VSD_ELBO(P, True)
    pyro.set_rng_seed(1)
    with pytest.warns(UserWarning, match=r"\bvectorize_particles\b"):
        found = elbo.loss(model, guide, x, y)
    pyro.set_rng_seed(1)
    assert found == pytest.approx(vsd.VSD_ELBO(P).loss(model, guide, x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss_and_grads(model, guide, x, y)


@pytest.mark.parametrize("name", ["batch norm", "group norm"])
def test_pyros_parallel_draws_through_a_norm_raise(name):
    """With as many rows as channels they would be wrong without a word; Pyro's Predictive has no loop to go back to."""
    model, guide, x, _ = regression(FOREIGN[name])
    with pytest.raises(ValueError, match=r"\bparallel\b"):
        Predictive(model.eval(), guide=guide, num_samples=4, parallel=True)(x)


def test_an_error_of_the_user_is_not_taken_for_one_of_the_particles():
    model, guide, x, y = regression(LAYERS["Linear"])
    with pytest.raises(ValueError, match=r"\by\b"):  # and no warning, which would be an error
        vsd.VSD_ELBO(P, True).loss(model, guide, x, y[1:])
