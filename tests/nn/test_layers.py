"""The tables of ``docs/layers.md``: each row is checked.

bayesian-torch#14: there converting an LSTM changes its call. Laplace#210, Laplace#143: whole networks have unsupported
layers.
"""

import re
import warnings
from pathlib import Path

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models, test_foreign_models

B, C = 6, 4
PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()


def rows(heading):
    """The cells of each row of the table that begins with this heading."""
    table = re.search(rf"\| {heading} \|.*?\n\n", PAGE, flags=re.DOTALL).group()
    lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return [[cell.strip() for cell in line] for line in lines]


TABLE = {cells[0].strip("`"): cells[1:] for cells in rows("layer")}


class Block(nn.Module):
    """A random layer, the layer in question, a random head: one number for each example."""

    def __init__(self, layer, front, call, features):
        super().__init__()
        self.front, self.layer, self.head = front, layer, nn.Linear(features, 1)
        self.call = call

    def forward(self, x):
        return self.head(self.call(self.layer, x if self.front is None else self.front(x)))


def convolution(kind, dims):
    layer = kind(C, 6, 3)
    side = layer(torch.zeros(1, C, *[4] * dims)).shape[-1]
    make = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    front = make(C, C, 1)
    return Block(layer, front, lambda f, x: f(x).flatten(-dims - 1), 6 * side**dims), torch.randn(B, C, *[4] * dims)


def recurrent(kind):
    block = Block(kind(C, 5, batch_first=True), nn.Linear(C, C), lambda f, x: f(x)[0][..., -1, :], 5)
    return block, torch.randn(B, 3, C)


def simple(layer, features=C):
    return Block(layer, nn.Linear(C, C), lambda f, x: f(x), features), torch.randn(B, C)


def words(layer, pooled):
    call = (lambda f, x: f(x)) if pooled else (lambda f, x: f(x).flatten(-2))
    return Block(layer, None, call, C if pooled else 2 * C), torch.arange(2 * B).reshape(B, 2) % 5


def attention():
    block = Block(
        nn.MultiheadAttention(C, 2, batch_first=True), nn.Linear(C, C), lambda f, x: f(x, x, x)[0].mean(-2), C
    )
    return block, torch.randn(B, 3, C)


MAKE = {
    "Linear": lambda: simple(nn.Linear(C, 7), 7),
    **{
        kind.__name__: lambda kind=kind, dims=dims: convolution(kind, dims)
        for kinds in ((nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        for dims, kind in enumerate(kinds, 1)
    },
    "MultiheadAttention": attention,
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "RNN": lambda: recurrent(nn.RNN),
    "Embedding": lambda: words(nn.Embedding(5, C), pooled=False),
    "EmbeddingBag": lambda: words(nn.EmbeddingBag(5, C), pooled=True),
    "Bilinear": lambda: (Block(nn.Bilinear(C, C, C), nn.Linear(C, C), lambda f, x: f(x, x), C), torch.randn(B, C)),
    "LayerNorm": lambda: simple(nn.LayerNorm(C)),
    "RMSNorm": lambda: simple(nn.RMSNorm(C)),
    "BatchNorm1d": lambda: simple(nn.BatchNorm1d(C)),
    "GroupNorm": lambda: simple(nn.GroupNorm(2, C)),
    "PReLU": lambda: simple(nn.PReLU()),
}
AXES = {"inputs": C, "output channels": 6, "input channels": C}


def test_the_table_and_the_cases_are_the_same():
    assert list(TABLE) == list(MAKE)


def build(name, side="out"):
    net, x = MAKE[name]()
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=20)
    return model, vsd.VSDGuide(model, conv_noise=side), x


def found_shared_by(name, side):
    """With one random layer, equal examples differ in a pass where each has its own noise."""
    net, x = MAKE[name]()
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net, include="layer"), num_data=20)
    guide, x = vsd.VSDGuide(model, conv_noise=side, init_alpha=0.5), x[:1].expand(x.shape)
    with torch.no_grad():
        first, second = (poutine.replay(model.net, trace=poutine.trace(guide).get_trace(x))(x) for _ in range(2))
    assert bool((first != second).all())
    return "the batch" if torch.allclose(first, first[:1]) else "each example"


@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("name", MAKE)
def test_row(name, side):
    weight, units, units_in, shared_by, _ = TABLE[name]
    model, guide, x = build(name, side)
    sites = [site for site in guide.sites if site.startswith("net.layer.")]
    if weight == "none":
        assert sites == []
        assert any(parameter.startswith("net.layer.") for parameter, _ in model.named_parameters())
        assert (units, units_in, shared_by) == ("–", "–", "–")
        return
    assert sites == [f"net.layer.{weight.strip('`')}"]
    assert guide.alpha(sites[0]).numel() == AXES[units if side == "out" else units_in]
    assert shared_by == found_shared_by(name, side)


@pytest.mark.parametrize("name", MAKE)
def test_particles_of_a_row(name):
    *_, particles = TABLE[name]
    model, guide, x = build(name)
    elbo = vsd.VSD_ELBO(num_particles=3, vectorize_particles=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        elbo.loss(model, guide, x, torch.randn(B))
    warned = any("vectorize_particles" in str(warning.message) for warning in caught)
    assert (particles, warned, elbo.vectorize_particles) in [("loop", True, False), ("one pass", False, True)]


@pytest.mark.parametrize("name", MAKE)
def test_training_reaches_every_parameter_of_a_row(name):
    model, guide, x = build(name)
    loss = vsd.VSD_ELBO()(model, guide)
    loss(x, torch.randn(B)).backward()
    assert [n for n, p in loss.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())] == []


# ---- weights made random by hand

BY_HAND = {
    "Linear.weight": ("linear", "net.0.weight"),
    "Conv2d.weight": ("convolution", "net.0.weight"),
    "LSTM.weight_ih_l0": ("lstm", "net.layer.weight_ih_l0"),
    "LSTM.weight_hh_l0": ("lstm", "net.layer.weight_hh_l0"),
    "GRU.weight_ih_l0": ("gru", "net.layer.weight_ih_l0"),
    "GRU.weight_hh_l0": ("gru", "net.layer.weight_hh_l0"),
    "TransformerEncoderLayer.linear1.weight": ("transformer", "net.layer.linear1.weight"),
    "TransformerEncoderLayer.self_attn.in_proj_weight": ("transformer", "net.layer.self_attn.in_proj_weight"),
    "TransformerEncoderLayer.self_attn.out_proj.weight": ("transformer", "net.layer.self_attn.out_proj.weight"),
    "Embedding.weight": ("embedding", "net.weight"),
}
HAND_TABLE = {key: cells[1] for cells in rows("weight") for key in re.findall(r"`([^`]+)`", cells[0])}


def test_the_second_table_and_the_cases_are_the_same():
    assert list(HAND_TABLE) == list(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
def test_row_by_hand(name):
    """The sets of ``test_foreign_models``, which its own tests compare with what happens."""
    case, site = BY_HAND[name]
    _, _, per_example, dense = test_foreign_models.CASES[case]
    assert site in {"each example": per_example, "the batch": dense}[HAND_TABLE[name]]


# ---- attention in evaluation mode, where torch has a fused path
# kfac-pytorch#267: there attention never calls its ``out_proj``, so that hooks see nothing.


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(C, 2, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


FUSED = {
    "attention": Attention,
    "encoder layer": lambda: nn.TransformerEncoderLayer(C, 2, 8, dropout=0.0, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        C, 2, 8, dropout=0.0, batch_first=True, norm_first=True
    ),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(C, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
}
every_attention = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


class Pooled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(C, 1)

    def forward(self, x):
        return self.head(self.body(x).mean(-2))


@pytest.fixture
def fused(monkeypatch):
    """Counts calls of torch's fused functions."""
    calls = []
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        original = getattr(torch, name)

        def counted(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return calls


@every_attention
def test_a_plain_network_does_take_the_fused_path(make, fused):
    """So that the tests below speak of it."""
    net = make().eval()
    with torch.no_grad():
        net(torch.randn(B, 3, C))
    assert fused


@every_attention
def test_the_fused_path_neither_crashes_nor_drops_the_noise(make, fused):
    """In evaluation mode, without gradients: what comes out is Θ times the draw, not the mean."""
    model = vsd.nn.Regressor(vsd.nn.bayesianize(Pooled(make()), exclude="head"), num_data=20).eval()
    guide, x = vsd.VSDGuide(model, init_alpha=0.5), torch.randn(B, 3, C)
    with torch.no_grad():
        mean = vsd.nn.mean_network(model, guide).eval()(x).squeeze(-1)
        fused.clear()
        prediction = vsd.predict(model, guide, x, num_samples=30, seed=0)
    assert fused == []
    assert float(prediction.samples.std(0).min()) > 0.01 * float(mean.abs().max())
    sites = [site for site in guide.sites if "out_proj" in site]
    assert sites
    for site in sites:
        trace = poutine.trace(guide).get_trace(x)
        with torch.no_grad():
            first, second = (poutine.replay(model.net, trace=trace)(x) for _ in range(2))
            assert_close(first, second)
            again = poutine.trace(guide).get_trace(x)
            trace.nodes[site] = again.nodes[site]
            assert not torch.allclose(poutine.replay(model.net, trace=trace)(x), first), site


@every_attention
def test_evaluation_and_training_mode_give_the_same(make):
    """Without dropout the two differ by the path alone."""
    model = vsd.nn.Regressor(vsd.nn.bayesianize(Pooled(make())), num_data=20)
    guide, x = vsd.VSDGuide(model), torch.randn(B, 3, C)
    trace = poutine.trace(guide).get_trace(x)
    slow = poutine.replay(model.train().net, trace=trace)(x)
    with torch.no_grad():
        assert_close(poutine.replay(model.eval().net, trace=trace)(x), slow.detach())


# ---- batch norm: numpyro#1446, where it has no example inside a Bayesian network


def test_batch_norm_keeps_its_statistics_where_they_belong():
    model, guide, x = build("BatchNorm1d")
    norm, y = model.net.layer, torch.randn(B)
    guide.setup(x, y), vsd.predict(model, guide, x, num_samples=3)
    assert int(norm.num_batches_tracked) == 0
    models.train(model, guide, x, y, steps=2)
    assert int(norm.num_batches_tracked) == 2
    assert norm.training
    pyro.clear_param_store()
