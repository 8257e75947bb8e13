"""A model and its guide in a new process, from their ``state_dict`` s alone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models

ROOT = Path(__file__).resolve().parents[2]
FREE = {"num_reflections": 3}
FC = {"num_reflections": 2, "vectors": "fc"}
LOW_RANK = {"num_reflections": 4, "vectors": "low_rank", "rank": 8}
MODELS = {
    "regressor": "models.regressor(noise='learned')",
    "latent": "models.regressor(noise='latent')",
    "hierarchical": "models.regressor(prior=vsd.nn.HierarchicalPrior('half_cauchy', 1.0))",
    "hand_written": "models.HandWritten()",
    "function": "models.by_hand",
    "hierarchical_by_hand": "models.hierarchical",
}
CASES = [
    *((name, options) for name in ("regressor", "hand_written", "hierarchical") for options in (FREE, FC, LOW_RANK)),
    ("latent", FREE),
    ("function", FREE),
    ("hierarchical_by_hand", FREE),
    ("regressor", {"num_reflections": 0}),
]
PREDICT = {"num_samples": 7, "seed": 11}


def build(name):
    return eval(MODELS[name], {"models": models, "vsd": vsd})


def test_a_new_process_predicts_the_same(tmp_path):
    """One process for all cases: it builds each model anew, loads, and saves its predictions."""
    x, y = models.data()
    expected = {}
    for i, (name, options) in enumerate(CASES):
        model = build(name)
        guide = vsd.VSDGuide(model, **options)
        models.train(model, guide, x, y, steps=2)
        own = model.state_dict() if isinstance(model, torch.nn.Module) else {}
        torch.save({"model": own, "guide": guide.state_dict()}, tmp_path / f"{i}.pt")
        prediction = vsd.predict(model, guide, x, **PREDICT)
        expected[i] = (prediction.samples, prediction.variance)
    script = f"""
        import torch
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        import pyro_vsd as vsd
        from tests.infer import models
        from tests.infer.test_saving import CASES, MODELS, PREDICT, build

        x, _ = models.data()
        found = {{}}
        for i, (name, options) in enumerate(CASES):
            model = build(name)
            guide = vsd.VSDGuide(model)
            state = torch.load({str(tmp_path)!r} + f"/{{i}}.pt", weights_only=True)
            guide.load_state_dict(state["guide"])
            if state["model"]:
                model.load_state_dict(state["model"])
            prediction = vsd.predict(model, guide, x, **PREDICT)
            found[i] = (prediction.samples, prediction.variance)
        torch.save(found, {str(tmp_path / "found.pt")!r})
    """
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    different = [
        CASES[i] for i, (samples, variance) in expected.items()
        if not (torch.equal(samples, found[i][0]) and torch.equal(variance, found[i][1]))
    ]  # fmt: skip
    assert not different


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{o}" for n, o in CASES])


@every_case
def test_a_loaded_guide_trains_on(name, options):
    model, (x, y) = build(name), models.data()
    guide = vsd.VSDGuide(model, **options)
    models.train(model, guide, x, y, steps=1)
    again = vsd.VSDGuide(model)
    again.load_state_dict(guide.state_dict())
    before = models.snapshot(again)
    assert set(before) == set(models.snapshot(guide))
    models.train(model, again, x, y, steps=2)
    assert models.moved(before, again) == {n for n, p in again.named_parameters() if p.numel()}


@every_case
def test_saving_changes_nothing_in_the_live_guide(name, options):
    model, (x, y) = build(name), models.data()
    guide = vsd.VSDGuide(model, **options)
    models.train(model, guide, x, y, steps=1)
    before = models.snapshot(guide)
    first = vsd.predict(model, guide, x, **PREDICT).samples
    state = guide.state_dict()
    assert guide.model is model
    assert not models.moved(before, guide)
    assert torch.equal(vsd.predict(model, guide, x, **PREDICT).samples, first)
    assert set(state) - {"_extra_state"} == set(before)


def test_the_extra_state_is_of_plain_types():
    guide = vsd.VSDGuide(models.by_hand).setup(*models.data())

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or type(value) in (int, float, str, bool)

    assert plain(guide.state_dict()["_extra_state"])


def test_a_state_in_another_precision_keeps_its_own():
    model, (x, y) = models.HandWritten(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y).float()
    again = vsd.VSDGuide(model)
    again.load_state_dict(guide.state_dict())
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_loading_does_not_touch_the_saved_tensors():
    model, (x, y) = models.HandWritten(), models.data()
    state = vsd.VSDGuide(model).setup(x, y).state_dict()
    kept = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    again = vsd.VSDGuide(model)
    again.load_state_dict(state)
    models.train(model, again, x, y)
    assert all(torch.equal(state[k], v) for k, v in kept.items())


def test_a_folded_guide_is_saved_as_free():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model, vectors="fc").fold()
    again = vsd.VSDGuide(model, vectors="low_rank", rank=3)
    again.load_state_dict(guide.state_dict())
    assert again.vector_kind == "free"
    first, second = (vsd.predict(model, g, x, **PREDICT).samples for g in (guide, again))
    assert torch.equal(first, second)


def test_example_dim_is_saved():
    model = models.regressor()
    again = vsd.VSDGuide(model)
    again.load_state_dict(vsd.VSDGuide(model, example_dim=1).state_dict())
    assert again.example_dim == 1


@pytest.mark.parametrize("num_reflections", [2, 3])
def test_supports_that_cannot_be_written_need_a_set_up(num_reflections):
    import pyro.distributions as dist

    prior = dist.Uniform(torch.zeros(3), torch.arange(1.0, 4.0)).to_event(1)
    model, (x, y) = models.extra_site(prior), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    with pytest.raises(ValueError, match=r"\bs\b"):
        vsd.VSDGuide(model).load_state_dict(guide.state_dict())
    again = vsd.VSDGuide(model, num_reflections=num_reflections).setup(x, y)
    again.load_state_dict(guide.state_dict())
    assert torch.equal(again.median()["s"], guide.median()["s"])
    assert set(again(x, y)) == {"s", "w"}


WRONG = [
    (lambda: models.regressor(sizes=(3, 6, 1)), "net.0.weight"),
    (lambda: models.regressor(sizes=(3, 5, 5, 1)), "net.4.weight"),
    (lambda: models.regressor(noise="latent"), "sigma"),
    (lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()), "weight_z"),
]


@pytest.mark.parametrize(("make", "named"), WRONG, ids=["shape", "depth", "noise", "prior"])
def test_the_state_of_another_model(make, named):
    state = vsd.VSDGuide(make()).state_dict()
    guide = vsd.VSDGuide(models.regressor())
    before = models.snapshot(guide)
    with pytest.raises(ValueError, match=rf"{named}\b"):
        guide.load_state_dict(state)
    assert not models.moved(before, guide)
    assert set(models.snapshot(guide)) == set(before)


def test_a_guide_set_up_with_another_batch_takes_the_state():
    from tests.infer.test_guide import locals_model

    x, y = models.data(20)
    guide = vsd.VSDGuide(locals_model).setup(x, y, torch.tensor([1, 2, 3]))
    again = vsd.VSDGuide(locals_model).setup(x, y, torch.tensor([4, 5]))
    again.load_state_dict(guide.state_dict())
    assert torch.equal(again.loc.shift, guide.loc.shift)


def test_guides_in_larger_modules_are_saved():
    model, (x, y) = models.HandWritten(), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model).setup(x, y))
    fresh = models.HandWritten()
    again = vsd.VSD_ELBO()(fresh, vsd.VSDGuide(fresh))
    again.load_state_dict(loss.state_dict())
    assert set(models.snapshot(again)) == set(models.snapshot(loss))
    first = vsd.predict(model, loss.guide, x, **PREDICT).samples
    assert torch.equal(vsd.predict(fresh, again.guide, x, **PREDICT).samples, first)
