"""Models that know nothing of this library: modules made random by hand, torchvision's, recurrent, attention, tied.

Which weights take the path per example and which the dense draw:

===============================  ==========================================  =====================================
module                           per example                                 dense draw
===============================  ==========================================  =====================================
``nn.Linear``, convolutions      ``weight``
``nn.LSTM``, ``nn.GRU``                                                      ``weight_ih_l*``, ``weight_hh_l*``
``nn.TransformerEncoderLayer``   ``linear1.weight``, ``linear2.weight``      ``self_attn.in_proj_weight``,
                                                                             ``self_attn.out_proj.weight``
``nn.Embedding``                                                             ``weight``
===============================  ==========================================  =====================================
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchvision
from pyro import poutine
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models


def normal(weight):
    return dist.Normal(torch.zeros_like(weight), 1.0).to_event(weight.dim())


def randomise(net, select=lambda name, p: p.dim() >= 2):
    """Turns a module into Pyro's and its matrices into random variables, as Pyro's documentation does it."""
    to_pyro_module_(net)
    for name, parameter in list(net.named_parameters()):
        if select(name, parameter):
            owner = net.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], PyroSample(normal(parameter.detach())))
    return net


class Classifies(PyroModule):
    """Any network whose output is ``(B, C)``."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y=None):
        logits = self.net(x)
        with pyro.plate("data", len(logits)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


class LastStep(PyroModule):
    """A recurrent layer, by its last output."""

    def __init__(self, layer, outputs):
        super().__init__()
        self.layer = layer
        self.head = PyroModule[nn.Linear](outputs, 3)

    def forward(self, x):
        # torch's recurrent layers keep their weights in a list of their own
        self.layer._flat_weights = [getattr(self.layer, name) for name in self.layer._flat_weights_names]
        return self.head(self.layer(x)[0][:, -1])


class Attends(PyroModule):
    def __init__(self):
        super().__init__()
        self.layer = randomise(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
        self.head = PyroModule[nn.Linear](4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


class Embeds(PyroModule):
    """An embedding tied to the output layer: dense where it is looked up, per example where it multiplies."""

    def __init__(self):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))

    def forward(self, x):
        weight = self.weight
        return nn.functional.linear(nn.functional.embedding(x, weight).mean(1).tanh(), weight)


class Tied(PyroModule):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))

    def forward(self, x):
        weight = self.weight
        return torch.tanh(x @ weight) @ weight.T


def recurrent(kind):
    def make():
        layer = kind(2, 5, batch_first=True)
        names = list(layer._flat_weights_names)
        to_pyro_module_(layer)
        for name in names:
            if name.startswith("weight"):
                shape = layer._parameters[name].shape
                del layer._parameters[name]
                PyroModule.__setattr__(layer, name, PyroSample(normal(torch.zeros(shape))))
        return LastStep(layer, 5)

    return make


sequence = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0))
tokens = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
image = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
words = torch.arange(12).reshape(6, 2) % 3

CASES = {
    "linear": (
        lambda: randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), torch.ones(6, 3),
        {"net.0.weight", "net.2.weight"}, set(),
    ),
    "convolution": (
        lambda: randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))), image,
        {"net.0.weight", "net.3.weight"}, set(),
    ),
    "lstm": (recurrent(nn.LSTM), sequence, set(), {"net.layer.weight_ih_l0", "net.layer.weight_hh_l0"}),
    "gru": (recurrent(nn.GRU), sequence, set(), {"net.layer.weight_ih_l0", "net.layer.weight_hh_l0"}),
    "transformer": (
        Attends, tokens, {"net.layer.linear1.weight", "net.layer.linear2.weight"},
        {"net.layer.self_attn.in_proj_weight", "net.layer.self_attn.out_proj.weight"},
    ),
    "embedding": (Embeds, words, {"net.weight"}, {"net.weight"}),
    "tied": (Tied, torch.ones(6, 3), {"net.weight"}, set()),
}  # fmt: skip
every_case = pytest.mark.parametrize(("make", "x", "per_example", "dense"), CASES.values(), ids=CASES)


@every_case
def test_which_weights_meet_what(make, x, per_example, dense):
    model, y = Classifies(make()), models.labels(6)
    guide = vsd.VSDGuide(model).setup(x, y)
    trace = poutine.trace(guide).get_trace(x, y)
    poutine.replay(model, trace=trace)(x, y)
    draws = {name: site["value"].draw for name, site in trace.iter_stochastic_nodes()}
    assert {name for name, draw in draws.items() if draw.source.used_dense} == dense
    assert {name for name, draw in draws.items() if draw.source.examples == {6}} == per_example
    assert set(draws) == per_example | dense


@every_case
def test_they_train_and_predict(make, x, per_example, dense):
    model, y = Classifies(make()), models.labels(6)
    guide = vsd.VSDGuide(model).setup(x, y)
    before, own = models.snapshot(guide), models.snapshot(model)
    losses = models.train(model, guide, x, y, steps=3)
    assert all(map(math.isfinite, losses))
    assert models.moved(before, guide) == set(before)
    assert models.moved(own, model) == set(own)
    prediction = vsd.predict(model, guide, x, num_samples=4, seed=0)
    assert prediction.probs.shape == (6, 3)
    again = vsd.predict(model, guide, x, num_samples=4, seed=0, batch_size=4)
    assert_close(again.samples, prediction.samples, rtol=1e-9, atol=1e-9)
    assert float(prediction.samples.std(0).min()) > 0


@pytest.mark.parametrize("name", ["lstm", "transformer", "tied"])
def test_dense_and_lazy_draws_predict_alike(name):
    """Pyro's own Predictive, which makes every draw dense, has the same mean as predict."""
    make, x, _, _ = CASES[name]
    model, y = Classifies(make()), models.labels(6)
    guide = vsd.VSDGuide(model, init_alpha=0.3).setup(x, y)
    S = 300
    samples = vsd.predict(model, guide, x, num_samples=S, seed=0).samples
    drawn = Predictive(model, guide=guide, num_samples=S, return_sites=("y",))(x)["y"]
    share = nn.functional.one_hot(drawn, 3).double()
    error = ((samples.var(0) + share.var(0)) / S).sqrt().clamp(min=1e-3)
    assert float(((samples.mean(0) - share.mean(0)) / error).abs().max()) < 4.5


def test_a_tied_weight_shares_its_noise_per_example():
    """With Θ = I and inputs so small that tanh is linear, ξ acts twice: first on inputs, then on outputs."""
    model, x = Classifies(Tied()), torch.full((6, 3), 1e-4)
    guide = vsd.VSDGuide(model, init_loc_fn=lambda site: torch.eye(3)).setup(x, models.labels(6))
    trace = poutine.trace(guide).get_trace(x)
    out = poutine.replay(model.net, trace=trace)(x).detach() / 1e-4
    noise = trace.nodes["net.weight"]["value"].draw.rows(6).detach()
    assert_close(out, noise.square(), rtol=1e-6, atol=1e-6)


def test_positions_of_one_example_share_their_noise():
    model = Classifies(CASES["linear"][0]())
    guide = vsd.VSDGuide(model).setup(torch.ones(2, 3), models.labels(2))
    weight = guide(torch.ones(2, 3))["net.0.weight"]
    out = nn.functional.linear(torch.ones(2, 5, 3), weight).detach()
    assert_close(out, out[:, :1].expand(2, 5, 4))
    assert bool((out[0, 0] != out[1, 0]).all())


def test_sequence_first_networks():
    model = Classifies(CASES["linear"][0]())
    guide = vsd.VSDGuide(model, example_dim=1).setup(torch.ones(2, 3), models.labels(2))
    weight = guide(torch.ones(2, 3))["net.0.weight"]
    out = nn.functional.linear(torch.ones(5, 2, 3), weight).detach()
    assert_close(out, out[:1].expand(5, 2, 4))
    assert bool((out[0, 0] != out[0, 1]).all())


def test_a_model_with_plates_and_subsampling():
    """Weights, a latent scale and effects of groups in a plate; batches by the plate's own subsample."""
    x, y = models.data(40)
    groups = torch.arange(40) % 4

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0))
        with pyro.plate("groups", 4):
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), subsample_size=10) as rows:
            mean = (x[rows] @ w).squeeze(-1) + effect[groups[rows]]
            pyro.sample("y", dist.Normal(mean, sigma), obs=None if y is None else y[rows])

    guide = vsd.VSDGuide(model)
    y = y + groups.double()
    losses = models.train(model, guide, x, y, steps=200, lr=0.03)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert guide.posterior("effect").batch_shape == (4,)
    assert bool((guide.median()["effect"].diff() > 0).all())


def test_a_latent_noise_scale_is_found():
    x, _ = models.data(200)
    y = x.sum(-1) + 0.3 * torch.randn(200)
    model = models.regressor(num_data=200, sizes=(3, 1), noise="latent")
    guide = vsd.VSDGuide(model, init_alpha=1e-3)
    models.train(model, guide, x, y, steps=600, lr=0.05)
    assert float(guide.median()["sigma"]) == pytest.approx(0.3, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("conv_noise", ["out", "in"])
def test_torchvisions_resnet(conv_noise):
    net = randomise(torchvision.models.resnet18(num_classes=3), lambda name, p: p.dim() >= 2)
    model = Classifies(net)
    x, y = torch.randn(4, 3, 32, 32), models.labels(4)
    guide = vsd.VSDGuide(model, conv_noise=conv_noise).setup(x, y)
    assert len(guide.sites) == 21
    axes = {"net.fc.weight": -1, "net.conv1.weight": -4 if conv_noise == "out" else -3}
    assert {name: guide.noise_dim(name) for name in axes} == axes
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    before = models.snapshot(guide)
    assert all(map(math.isfinite, models.train(model, guide, x, y, steps=2)))
    assert models.moved(before, guide) == set(before)
    assert any(not torch.equal(b, statistics[n]) for n, b in model.named_buffers())
    trace = poutine.trace(guide).get_trace(x, y)
    poutine.replay(model, trace=trace)(x, y)
    draws = [site["value"].draw for _, site in trace.iter_stochastic_nodes()]
    assert all(draw.source.examples == {4} and not draw.source.used_dense for draw in draws)
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    assert vsd.predict(model, guide, x, num_samples=2).probs.shape == (4, 3)
    assert all(torch.equal(b, statistics[n]) for n, b in model.named_buffers())


def test_a_discrete_choice_beside_the_weights_is_named():
    def model(x, y=None):
        pyro.sample("k", dist.Categorical(torch.ones(3)))
        return models.one_weight(x, y)

    with pytest.raises(ValueError, match=r"\bk\b"):
        vsd.VSDGuide(model).setup(*models.data())
