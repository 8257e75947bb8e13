"""Random trees of modules made Bayesian: nested and shared modules, tied weights, patterns, odd layers."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from pyro import poutine
from torch import nn
from torch.nn.utils import parametrizations, prune

import pyro_vsd as vsd
from tests.fuzz.outcomes import RAISED, answer, examples, finite, mostly

WIDTH = 4
ROWS = 3


class Sum(nn.Module):
    """The mean of what its children make of the input; a slot of it is empty."""

    def __init__(self, children):
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.gone = nn.Identity()
        self.gone = None

    def forward(self, x):
        return sum((part(x) for part in self.parts), 0 * x) / max(1, len(self.parts))


class Named(nn.Module):
    """Children in a dictionary, called one after another."""

    def __init__(self, children):
        super().__init__()
        self.steps = nn.ModuleDict({f"weight_{i}": child for i, child in enumerate(children)})
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for step in self.steps.values():
            x = step(x)
        return x * self.scale


class Flat(nn.Module):
    """A layer for channels ``(B, WIDTH, L)`` in a network of rows ``(B, WIDTH)``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unsqueeze(-1)).mean(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), need_weights=False)[0].squeeze(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x.unsqueeze(1))[0].squeeze(1)


def pruned():
    return prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5)


def frozen():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


LAYERS = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: Flat(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    lambda: Flat(nn.Conv1d(WIDTH, WIDTH, 1, groups=2)),
    lambda: Flat(nn.ConvTranspose1d(WIDTH, WIDTH, 1)),
    lambda: Flat(nn.ConvTranspose1d(WIDTH, WIDTH, 3, groups=2, bias=False)),
    Attention,
]
OTHERS = [
    lambda: nn.Tanh(),
    lambda: nn.Identity(),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.5),
    Recurrent,
    frozen,
]
ODD = [
    lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    lambda: nn.LazyLinear(WIDTH),
    lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: vsd.nn.bayesianize(nn.Linear(WIDTH, WIDTH)),
    pruned,
]
# Layers that the network cannot call with one input of rows, or that stay random without their data.
NOT_CALLED = (nn.Bilinear, nn.LazyLinear)


@st.composite
def trees(draw, depth=3):
    """A module, its children drawn in the same way; now and then one that is there already, or a tied weight."""
    made = []

    def build(level):
        if made and draw(st.integers(0, 7)) == 0:
            return draw(st.sampled_from(made))  # the same module once more
        if level == 0 or draw(st.booleans()):
            kinds = draw(st.sampled_from([LAYERS] * 12 + [OTHERS] * 6 + [ODD]))
            module = draw(st.sampled_from(kinds))()
        else:
            children = [build(level - 1) for _ in range(draw(st.integers(0, 3)))]
            kind = draw(st.sampled_from([nn.Sequential, Sum, Named]))
            module = kind(*children) if kind is nn.Sequential else kind(children)
        made.append(module)
        return module

    first = draw(st.sampled_from(LAYERS))()
    net = draw(st.sampled_from([nn.Sequential(first, build(depth)), nn.Sequential(first, build(depth)), build(depth)]))
    linear = [m for m in net.modules() if type(m) is nn.Linear and "weight" in m._parameters]
    if len(linear) > 1 and draw(st.integers(0, 3)) == 0:
        linear[-1].weight = linear[0].weight
    return net


@st.composite
def selectors(draw, net):
    """Mostly paths and types that are there; also patterns without a match, functions, lists, junk."""
    paths = [path for path, _ in net.named_modules()]
    names = st.sampled_from(paths)
    there = [names, names.map(lambda path: path + "*"), "*weight*", "*", nn.Linear, nn.Module]
    functions = [lambda path, module: True, lambda path, module: False, lambda path, module: "0" in path]
    rule = mostly(*there, *there, *functions, "[", "", "nowhere", nn.Conv3d)
    return draw(st.one_of(st.none(), st.none(), rule, st.lists(rule, max_size=3)))


PRIORS = mostly(vsd.nn.GaussianPrior(0.5), vsd.nn.HierarchicalPrior(), vsd.nn.HierarchicalPrior("half_cauchy"))


@given(st.data(), trees(), PRIORS, mostly("out", "in"), st.booleans())
@examples(300)
def test_bayesianize(data, net, prior, conv_noise, inplace):
    """A network that comes back computes, in evaluation mode at its sites' starts what it computed before."""
    include, exclude = data.draw(selectors(net)), data.draw(selectors(net))
    callable_net = not any(isinstance(m, NOT_CALLED) for m in net.modules())
    x = torch.randn(ROWS, WIDTH)
    was_bayesian = any(getattr(m, "_pyro_samples", None) for m in net.modules())
    net.eval()
    before = net(x).detach() if callable_net and not was_bayesian else None
    made = answer(
        lambda: vsd.nn.bayesianize(net, prior, include=include, exclude=exclude, conv_noise=conv_noise, inplace=inplace)
    )
    if made is RAISED or not callable_net:
        return
    trace = poutine.trace(made).get_trace(x)
    assert finite(trace.nodes["_RETURN"]["value"])
    sites = list(trace.stochastic_nodes)
    assert len(set(sites)) == len(sites)
    if before is not None:
        starts = {name: node["fn"].init for name, node in trace.nodes.items() if hasattr(node.get("fn"), "init")}
        at_start = poutine.condition(made, data=starts)(x)
        torch.testing.assert_close(at_start, before)


@given(trees(), mostly("free", "fc"), st.sampled_from([(), (2,)]))
@examples(120)
def test_training(net, vectors, particles):
    """A Bayesian network of any shape takes a step, and predicts."""
    if any(isinstance(m, NOT_CALLED) for m in net.modules()):
        return
    made = answer(lambda: vsd.nn.bayesianize(net))
    if made is RAISED:
        return
    model = vsd.nn.Classifier(made, num_data=ROWS)
    guide = answer(lambda: vsd.VSDGuide(model, vectors=vectors))
    if guide is RAISED:
        return
    x, y = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    elbo = vsd.VSD_ELBO(num_particles=2 if particles else 1, vectorize_particles=bool(particles))
    loss = answer(lambda: elbo.loss_and_grads(model, guide, x, y))
    if not particles:
        assert loss is not RAISED
    if loss is not RAISED:
        assert finite(loss)
        assert all(finite(p.grad) for p in guide.parameters() if p.grad is not None)
    assert finite(vsd.predict(model, guide, x, num_samples=2).probs)


@given(mostly(nn.Linear(2, 2)), PRIORS)
@examples(60)
def test_something_else(net, prior):
    answer(lambda: vsd.nn.bayesianize(net, prior))
