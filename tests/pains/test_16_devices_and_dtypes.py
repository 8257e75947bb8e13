"""Elsewhere guides ignore the model's device (pyro#1850), layers make tensors on the CPU (blitz#9, #118), and gradient
accumulation, moves and autocast fail (ivon#7). Here every number follows the parameters: ``.to()`` before and after the
first step, single and double precision, bfloat16 autocast; tensors are made where the parameters are.

More of it: ``tests/infer/test_guide.py``, ``tests/nn/test_training.py``; micro-batches in ``test_08_minibatches.py``.
"""

import math

import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models

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
