"""Checkpoints: training goes on bit for bit, and nothing is half loaded.

Elsewhere a fitted posterior could not be stored for years (Laplace#45, #236), ``map_location`` missed tensors
(Laplace#158), a loaded state left stale caches in use (BoTorch#1471), and buffers that begin as None could not be
loaded (BoTorch#1874). Checkpoints hold more than tensors, so that torch 2.6 refuses them (speechbrain#2856), and the
workaround is to switch its protection off (yolov9#661).
"""

import os
import pickle

import numpy
import pyro
import pyro.optim
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.training import load_checkpoint, save_checkpoint
from pyro_vsd.training.checkpoint import read_archive, write_archive
from tests.infer import models
from tests.training import cases
from tests.training.cases import PyroRun, TorchRun

# SequentialLR of torch 2.4 calls its parts in a way that torch 2.4 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")


def adam(groups):
    return torch.optim.Adam(groups)


TORCH = {
    "adam": lambda: TorchRun(cases.regressor, adam),
    "sgd-steps": lambda: TorchRun(
        cases.regressor, lambda g: torch.optim.SGD(g, momentum=0.9), lambda o: torch.optim.lr_scheduler.StepLR(o, 1)
    ),
    "milestones": lambda: TorchRun(
        cases.regressor, adam, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2, 4], gamma=0.5)
    ),
    "cosine": lambda: TorchRun(cases.regressor, adam, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)),
    "sequential": lambda: TorchRun(
        cases.regressor,
        adam,
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [1, 2])],
            milestones=[2],
        ),
    ),
    "batch-norm": lambda: TorchRun(cases.batch_norm, adam),
    "low-rank": lambda: TorchRun(cases.regressor, adam, vectors="low_rank", rank=2),
    "hierarchical": lambda: TorchRun(lambda: cases.regressor(prior=vsd.nn.HierarchicalPrior()), adam),
    "latent": lambda: TorchRun(lambda: cases.regressor(noise="latent"), adam),
}
PYRO = {
    "adam": lambda: PyroRun(cases.regressor, lambda: pyro.optim.Adam({"lr": 0.01})),
    "clipped": lambda: PyroRun(cases.regressor, lambda: pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.99})),
    "by-name": lambda: PyroRun(
        cases.regressor, lambda: pyro.optim.Adam(lambda name: {"lr": 0.02 if "theta" in name else 0.01})
    ),
    "clip-norm": lambda: PyroRun(cases.regressor, lambda: pyro.optim.Adam({"lr": 0.01}, {"clip_norm": 1.0})),
    "scheduler": lambda: PyroRun(
        cases.regressor,
        lambda: pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.5}),
    ),
    "function": lambda: PyroRun(cases.function, lambda: pyro.optim.Adam({"lr": 0.01})),
    "batch-norm": lambda: PyroRun(cases.batch_norm, lambda: pyro.optim.Adam({"lr": 0.01})),
}
RUNS = [*(pytest.param(make, id=f"torch-{name}") for name, make in TORCH.items()),
        *(pytest.param(make, id=f"pyro-{name}") for name, make in PYRO.items())]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("make", RUNS)
@pytest.mark.parametrize("clear", [True, False], ids=["store-cleared", "store-full"])
def test_training_goes_on_bit_for_bit(make, clear, path):
    """With Pyro's store empty, as in a new process, and with the first run's parameters still holding the names."""
    run = make()
    run.train(2)
    save_checkpoint(path, **run.parts(), epoch=2)
    run.train(2)
    expected, numbers = run.values(), cases.draw_all()
    if clear:
        pyro.clear_param_store()
    torch.manual_seed(99)
    again = make()
    assert load_checkpoint(path, **again.parts())["epoch"] == 2
    again.train(2)
    assert cases.same(again.values(), expected)
    assert cases.draw_all() == numbers
    assert again.elbo.step == run.elbo.step


@pytest.mark.parametrize("make", RUNS)
def test_loading_into_a_live_run_takes_it_back(make, path):
    run = make()
    run.train(1)
    save_checkpoint(path, **run.parts())
    run.train(2)
    expected = run.values()
    load_checkpoint(path, **run.parts())
    run.train(2)
    assert cases.same(run.values(), expected)


@pytest.mark.parametrize("make", RUNS)
def test_saving_changes_nothing(make, path):
    run = make()
    run.train(1)
    before = run.values()
    state = torch.get_rng_state()
    save_checkpoint(path, **run.parts())
    assert cases.same(run.values(), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", PYRO)
def test_a_state_that_waits_is_saved_again(name, path):
    """Loaded and saved at once: Pyro's optimisers have not yet met their parameters."""
    run = PYRO[name]()
    run.train(2)
    save_checkpoint(path, **run.parts())
    run.train(1)
    expected = run.values()
    pyro.clear_param_store()
    middle = PYRO[name]()
    load_checkpoint(path, **middle.parts())
    save_checkpoint(path, **middle.parts())
    pyro.clear_param_store()
    again = PYRO[name]()
    load_checkpoint(path, **again.parts())
    again.train(1)
    assert cases.same(again.values(), expected)


def test_a_guide_without_parameters_gets_them(path):
    run = PYRO["function"]()
    run.train(1)
    save_checkpoint(path, **run.parts())
    pyro.clear_param_store()
    guide = vsd.VSDGuide(cases.function)
    load_checkpoint(path, model=cases.function, guide=guide)
    assert cases.same(cases.values(guide), cases.values(run.guide))
    assert pyro.param("sigma").item() == pytest.approx(dict(cases.store())["sigma"].exp().item())


def test_without_the_generators(path):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_checkpoint(path, **run.parts(), rng=False)
    assert torch.equal(torch.rand(3), expected)


def test_what_is_returned(path):
    run = TORCH["adam"]()
    extra = {"best": 0.5, "rows": numpy.arange(3), "shape": (1, 2), "none": None, "flag": True, 3: [1.5, "a"]}
    save_checkpoint(path, **run.parts(), epoch=4, step=17, extra=extra)
    found = load_checkpoint(path)
    assert (found["epoch"], found["step"]) == (4, 17)
    assert found["versions"]["torch"] == torch.__version__
    assert torch.equal(found["extra"].pop("rows"), torch.arange(3))
    assert found["extra"] == {"best": 0.5, "shape": (1, 2), "none": None, "flag": True, 3: [1.5, "a"]}
    assert set(found["guide"]) == set(run.guide.state_dict())


def test_a_view_is_saved_without_its_storage(path):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts(), extra=torch.zeros(1_000_000)[:2])
    assert path.stat().st_size < 1_000_000


def test_mapped_elsewhere(path):
    run = TORCH["adam"]()
    run.train(1)
    save_checkpoint(path, **run.parts())
    found = load_checkpoint(path, map_location="meta", rng=False)
    assert {v.device.type for v in found["model"].values()} == {"meta"}


def test_a_different_precision(path):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts())
    model = cases.regressor().float()
    guide = vsd.VSDGuide(model).float()
    load_checkpoint(path, model=model, guide=guide)
    assert {p.dtype for p in [*model.parameters(), *guide.parameters()]} == {torch.float32}


def test_nothing_stale_is_used_after_loading():
    """Predictions, noise variances and medians of a guide that was used before (BoTorch#1471)."""
    x, y = models.data()
    model = models.regressor()
    old, new = vsd.VSDGuide(model), vsd.VSDGuide(model)
    vsd.predict(model, old, x, num_samples=3), old.median(), old.noise("net.0.weight").covariance_matrix
    models.train(model, new, x, y)
    old.load_state_dict(new.state_dict())
    first, second = (vsd.predict(model, g, x, num_samples=5, seed=0).samples for g in (old, new))
    assert torch.equal(first, second)
    assert torch.equal(old.alpha("net.0.weight"), new.alpha("net.0.weight"))
    assert all(torch.equal(value, new.median()[name]) for name, value in old.median().items())


def test_no_tensor_of_a_state_is_none_or_left_behind(path):
    """BoTorch#1874, Laplace#158."""
    run = TORCH["adam"]()
    run.train(1)
    for module in (run.model, run.guide):
        assert all(value is not None for value in module.state_dict().values())
        assert all(buffer is not None for m in module.modules() for buffer in m._buffers.values())
    torch.save(run.guide.state_dict(), path)
    elsewhere = torch.load(path, map_location="meta", weights_only=True)
    tensors = [value for value in elsewhere.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == len(list(run.guide.parameters()))
    assert {value.device.type for value in tensors} == {"meta"}


@pytest.mark.parametrize("make", [models.regressor, models.HandWritten], ids=["listed", "hand_written"])
def test_states_are_tensors_and_plain_types(make, path):
    """speechbrain#2856."""
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, path)
    states = torch.load(path, weights_only=True)
    fresh = vsd.VSDGuide(model)
    fresh.load_state_dict(states["guide"])
    assert not models.moved(models.snapshot(guide), fresh)


# ---- the file


def test_the_folder_holds_the_checkpoint_alone(path):
    run = TORCH["adam"]()
    for _ in range(3):
        save_checkpoint(path, **run.parts())
    assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_failure_while_writing_leaves_the_old_one(path, call, monkeypatch):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts(), epoch=1)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(call, fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, **run.parts(), epoch=2)
    monkeypatch.undo()
    assert load_checkpoint(path)["epoch"] == 1
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_what_a_killed_process_left_is_removed_in_time(path):
    run = TORCH["adam"]()
    old, new = (path.with_name(f".last.ckpt.{name}.tmp") for name in ("old", "new"))
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (0, 0))
    save_checkpoint(path, **run.parts())
    assert not old.exists()
    assert new.exists()  # perhaps some other process is writing it


def test_a_link_stays_one(path):
    target = path.with_name("target.ckpt")
    path.symlink_to(target)
    save_checkpoint(path, **TORCH["adam"]().parts(), epoch=3)
    assert path.is_symlink()
    assert load_checkpoint(target)["epoch"] == 3


class Hostile:
    def __reduce__(self):
        return (os.mkdir, ("hostile",))


@pytest.mark.parametrize("place", ["pickle", "torch", "whole", "extra", "guide"])
def test_a_hostile_file_raises_and_runs_nothing(place, path, monkeypatch):
    """A pickle, a file of torch's, and three places of ours, with a valid checksum (yolov9#661)."""
    monkeypatch.chdir(path.parent)
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts())
    content = read_archive(path)
    if place == "pickle":
        path.write_bytes(pickle.dumps({"guide": Hostile()}))
    elif place == "torch":
        torch.save({"guide": Hostile()}, path)
    else:
        write_archive(path, Hostile() if place == "whole" else {**content, place: {"x": Hostile()}})
    assert not os.path.exists("hostile")
    before = run.values()
    with pytest.raises(ValueError, match=r"\bpath\b.*last"):
        load_checkpoint(path, **run.parts())
    assert not os.path.exists("hostile")
    assert cases.same(run.values(), before)
    pickle.loads(pickle.dumps(Hostile()))
    assert os.path.exists("hostile")  # the bait does bite


@pytest.mark.parametrize(
    "make",
    [
        lambda path: torch.save({"a": torch.ones(2)}, path),
        lambda path: path.write_bytes(pickle.dumps({"a": 1})),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"pyro_vsd check"),
        lambda path: write_archive(path, {"epoch": 1, "new": 2}),
        lambda path: write_archive(path, [1]),
    ],
    ids=["torch", "pickle", "empty", "short", "keys", "list"],
)
def test_a_foreign_file(make, path):
    make(path)
    with pytest.raises(ValueError, match=r"\bpath\b"):
        load_checkpoint(path)


def damage(path, place, value):
    data = bytearray(path.read_bytes())
    data[place] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
        lambda p: damage(p, 23, 1),
        lambda p: damage(p, 2000, 255),
    ],
    ids=["cut", "longer", "old-version", "flipped"],
)
def test_a_damaged_or_old_file(change, path):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts())
    change(path)
    before = run.values()
    with pytest.raises(ValueError, match=r"\bpath\b"):
        load_checkpoint(path, **run.parts())
    assert cases.same(run.values(), before)


def test_a_missing_file(path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["nowhere/last.ckpt", "."])
def test_a_place_that_cannot_be(name, path):
    with pytest.raises(ValueError, match=r"\bpath\b"):
        save_checkpoint(path.parent / name, **TORCH["adam"]().parts())


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"a": [1, object()]}, r"extra\['a'\]\[1\]"),
        ({"f": print}, r"extra\['f'\]"),
        ({(1, object()): 1}, "extra"),
    ],
)
def test_what_cannot_be_written(extra, name, path):
    run = TORCH["adam"]()
    save_checkpoint(path, **run.parts(), epoch=1)
    with pytest.raises(TypeError, match=name):
        save_checkpoint(path, **run.parts(), extra=extra)
    assert load_checkpoint(path)["epoch"] == 1


# ---- the wrong objects


def other(**changes):
    run = TORCH["sgd-steps"]()
    return {**run.parts(), **changes}


class Odd:
    """No optimiser at all."""


# What is loaded, and the argument that does not fit.
WRONG = {
    "model": (lambda: {"model": cases.batch_norm()}, "model"),
    "shapes": (lambda: {"model": vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 6, 1])), 24, "learned")}, "model"),
    "guide": (lambda: {"guide": vsd.VSDGuide(cases.batch_norm())}, "guide"),
    "layout": (lambda: other(guide=vsd.VSDGuide(cases.regressor(), num_reflections=3)), "optimizer"),
    "function": (lambda: {"model": cases.function}, "model"),
    "optimizer": (lambda: other(optimizer=torch.optim.Adam([torch.ones(1)])), "optimizer"),
    "groups": (lambda: other(optimizer=torch.optim.SGD([torch.ones(1)])), "optimizer"),
    "pyro": (lambda: other(optimizer=pyro.optim.SGD({"lr": 1.0})), "optimizer"),
    "odd": (lambda: other(optimizer=Odd()), "optimizer"),
    "scheduler": (
        lambda: other(scheduler=torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.ones(1)]), 0.5)),
        "scheduler",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_object_and_nothing_is_touched(name, path):
    run = TORCH["sgd-steps"]()
    run.train(1)
    save_checkpoint(path, **run.parts())
    make, argument = WRONG[name]
    parts = make()
    modules = [part for key, part in parts.items() if key in ("model", "guide")]
    before, random = cases.values(*modules), torch.get_rng_state()
    scheduler = parts["scheduler"].state_dict() if "scheduler" in parts else None
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        load_checkpoint(path, **parts)
    assert cases.same(cases.values(*modules), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert scheduler is None or parts["scheduler"].state_dict() == scheduler


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "elbo"])
def test_a_state_that_was_not_saved(name, path):
    run = TORCH["sgd-steps"]()
    save_checkpoint(path, model=run.model, guide=run.guide)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        load_checkpoint(path, **{name: run.parts()[name]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", "three"),
        ("rng", {"torch": torch.zeros(3)}),
        ("rng", None),
        ("optimizer", {"kind": "SGD"}),
        ("optimizer", {"kind": "SGD", "state": {"param_groups": 3}}),
        ("scheduler", {"kind": "StepLR", "state": {"a": 1}}),
        ("elbo", {}),
        ("params", {"w": 3}),
        ("guide", {"_extra_state": 5}),
    ],
)
def test_a_crafted_state(key, value, path):
    run = TORCH["sgd-steps"]()
    save_checkpoint(path, **run.parts())
    write_archive(path, {**read_archive(path), key: value})
    before = run.values()
    with pytest.raises(ValueError, match=r"last\.ckpt"):
        load_checkpoint(path, **run.parts())
    assert cases.same(run.values(), before)


def test_an_optimizer_that_is_none_of_ours(path):
    run = TORCH["adam"]()
    with pytest.raises(TypeError, match=r"\boptimizer\b"):
        save_checkpoint(path, **{**run.parts(), "optimizer": Odd()})


def test_a_cleared_store(path):
    run = PYRO["adam"]()
    run.train(1)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"\boptimizer\b"):
        save_checkpoint(path, **run.parts())
