"""A step asks nothing of the host: no number is waited for, and nothing larger than a number is made on the CPU.

The ``meta`` device has shapes and no numbers: whatever asks for one, or mixes devices, fails there. Elsewhere guides
ignore the model's device (pyro#1850), layers make tensors on the CPU (blitz#9, #118), and moves fail (ivon#7).
"""

import math
from collections import Counter

import pyro
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyro_vsd as vsd
from pyro_vsd.ops.householder import compact_wy, rotate
from pyro_vsd.ops.noise import noise_terms, structured_noise, structured_noise_
from tests.infer import models

B = 8
PRIORS = {"gaussian": vsd.nn.GaussianPrior(), "hierarchical": vsd.nn.HierarchicalPrior("gamma")}
NETWORKS = {
    "mlp": (lambda: vsd.nn.mlp([20, 30, 10]), (20,)),
    "lenet5": (vsd.nn.lenet5, (1, 28, 28)),
    "batch-norm": (lambda: nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10)), (20,)),
}
GUIDES = {
    "free": {},
    "fc": {"vectors": "fc"},
    "low-rank": {"vectors": "low_rank", "rank": 2},
    "none": {"num_reflections": 0},
}
# What a GPU has to be waited for: a number, or a size that depends on numbers.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")


class Watch(TorchDispatchMode):
    """What is waited for, and what is made on the CPU."""

    def __init__(self):
        super().__init__()
        self.waits, self.on_cpu = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        self.waits.update([name] * any(word in name for word in WAITING))
        self.on_cpu += [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_cpu]
        return out


def classifier(name, prior, device, **options):
    make, shape = NETWORKS[name]
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make(), PRIORS[prior]), num_data=100)
    guide = vsd.VSDGuide(model, **options).to(device)
    x, y = torch.randn(B, *shape, device=device), torch.zeros(B, dtype=torch.long, device=device)
    return model.to(device), guide, x, y


def regressor(noise, device):
    outputs = 2 if noise == "heteroscedastic" else 1
    net = vsd.nn.bayesianize(vsd.nn.mlp([20, 30, outputs]))
    model = vsd.nn.Regressor(net, num_data=100, noise=noise)
    guide = vsd.VSDGuide(model).to(device)
    return model.to(device), guide, torch.randn(B, 20, device=device), torch.randn(B, device=device)


def watched_step(model, guide, x, y, **options):
    """The second step: the first one looks at shapes and priors."""
    loss = vsd.VSD_ELBO(**options)(model, guide)
    for _ in range(2):
        loss.zero_grad()
        with Watch() as watch:
            loss(x, y).backward()
    for name, parameter in loss.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == parameter.device
    return watch


CASES = {
    **{f"{n}-{p}": lambda d, n=n, p=p: (*classifier(n, p, d), {}) for n in NETWORKS for p in PRIORS},
    **{f"vectors-{g}": lambda d, g=g: (*classifier("mlp", "gaussian", d, **GUIDES[g]), {}) for g in GUIDES},
    **{f"sigma-{s}": lambda d, s=s: (*regressor(s, d), {}) for s in (0.1, "learned", "latent", "heteroscedastic")},
    "particles": lambda d: (*regressor(0.1, d), {"num_particles": 3}),
    "vectorized": lambda d: (*regressor(0.1, d), {"num_particles": 3, "vectorize_particles": True}),
    "stated-prior": lambda d: (*regressor(0.1, d), {"prior": "model"}),
}  # fmt: skip


def marks_while_watched():
    """Whether a tensor can be given a subclass under a dispatch mode, as particles are: not in torch 2.4."""
    try:
        with Watch():
            (torch.ones(1) + 1).as_subclass(nn.Parameter)
    except RuntimeError:
        return False
    return True


@pytest.fixture
def unchecked():
    """As in production: Pyro's checks of arguments look at the numbers."""
    with pyro.validation_enabled(False):
        yield


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_for_nothing(case, unchecked):
    if case == "vectorized" and not marks_while_watched():
        pytest.skip("this version of torch marks no tensor while operations are watched")
    *setting, options = CASES[case]("cpu")
    assert not watched_step(*setting, **options).waits


# A first step with vectorised particles compares them with others, number by number.
@pytest.mark.parametrize("case", [case for case in CASES if case != "vectorized"])
def test_a_step_on_the_meta_device(case, unchecked):
    """On the CPU there are single numbers, and the row numbers of the plate, which Pyro looks at."""
    *setting, options = CASES[case]("meta")
    watch = watched_step(*setting, **options)
    assert all(tensor.numel() <= 1 for tensor in watch.on_cpu if tensor.is_floating_point())
    assert all(tensor.numel() <= B for tensor in watch.on_cpu)


def test_the_watch_sees():
    """It is no check that cannot fail."""
    with Watch() as watch:
        torch.ones(3).sum().item()
    assert watch.waits == {"aten._local_scalar_dense.default": 1}
    assert max(tensor.numel() for tensor in watch.on_cpu) == 3


def test_with_checks_numbers_are_looked_at():
    """Labels are checked where Pyro's validation is on, its default: two numbers a step, and in the first steps whether
    outputs look like probabilities."""
    assert watched_step(*classifier("mlp", "gaussian", "cpu")).waits == {"aten._local_scalar_dense.default": 3}


@pytest.mark.parametrize("T", [0, 3])
def test_operators(T):
    log_alpha, vectors = torch.randn(20, device="meta"), torch.randn(T, 20, device="meta")
    with Watch() as watch:
        terms = noise_terms(log_alpha, vectors)
        eps = torch.randn(B, 20, device="meta")
        results = [structured_noise(eps, terms.std, terms.N, terms.S), rotate(compact_wy(vectors), eps)]
        results += [structured_noise_(eps, terms.std, terms.N, terms.S)]
    assert all(result.is_meta and result.shape == (B, 20) for result in results)
    assert all(tensor.numel() <= 1 for tensor in watch.on_cpu)


@pytest.mark.parametrize("name", ["HouseholderNormal", "StructuredDropout"])
def test_draws(name, unchecked):
    alpha, vectors = torch.ones(20, device="meta"), torch.randn(2, 20, device="meta")
    with Watch() as watch:
        if name == "HouseholderNormal":
            law = vsd.distributions.HouseholderNormal(1.0, alpha, vectors)
            draw = law.rsample((B,))
        else:
            law = vsd.distributions.StructuredDropout(torch.randn(20, 5, device="meta"), alpha, vectors)
            draw = torch.randn(B, 20, device="meta") @ law.rsample()
        assert draw.is_meta
        assert len(draw) == B
    assert all(tensor.numel() <= 1 for tensor in watch.on_cpu)


# ---- numbers follow the parameters (pyro#1850, blitz#9, #118, ivon#7)

MODELS = {
    "plain": models.regressor,
    "latent": lambda: models.regressor(noise="latent", prior=vsd.nn.HierarchicalPrior()),
    "learned": lambda: models.regressor(noise="learned"),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def step(loss, optimizer, x, y):
    optimizer.zero_grad()
    value = loss(x, y)
    value.backward()
    optimizer.step()
    return value


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("when", ["before", "after"])
def test_to_before_and_after_the_first_step(make, dtype, when):
    """torch's default is double here, so that single precision shows what does not follow."""
    model, (x, y) = make(), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    if when == "after":
        step(loss, torch.optim.Adam(loss.parameters()), x, y)
    loss.to(dtype)
    x, y = x.to(dtype), y.to(dtype)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    before = models.snapshot(loss)
    value = step(loss, optimizer, x, y)
    assert value.dtype == dtype
    assert math.isfinite(value.item())
    assert models.moved(before, loss) == set(before)
    assert {p.dtype for p in loss.parameters()} == {dtype}
    prediction = vsd.predict(model, loss.guide, x, num_samples=2)
    assert prediction.mean.dtype == prediction.samples.dtype == dtype


@every_model
def test_bfloat16_autocast(make):
    model, (x, y) = make().float(), (v.float() for v in models.data())
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(x, y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert value.dtype == torch.float32
        assert math.isfinite(value.item())
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in loss.parameters())


MAKERS = ("randn", "rand", "zeros", "ones", "empty", "full", "eye", "linspace")


@pytest.fixture
def bare(monkeypatch):
    """Names of the functions that make a floating-point tensor without a device, so where torch's default is."""
    made = []
    for name in MAKERS:
        original = getattr(torch, name)

        def noted(*args, original=original, name=name, **kwargs):
            if kwargs.get("device") is None and kwargs.get("out") is None:
                made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, noted)
    return made


@every_model
def test_tensors_are_made_where_the_parameters_are(make, bare):
    """Without a second device at hand: whoever makes a tensor must say where."""
    x, y = models.data()
    model = make()
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    loss(x, y)
    bare.clear()
    vsd.VSDGuide(model)
    loss(x, y).backward()
    guide.median()
    assert bare == []


def test_the_check_sees_a_bare_tensor(bare):
    torch.zeros(3)
    torch.zeros(3, device="cpu")
    assert bare == ["zeros"]
