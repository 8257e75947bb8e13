"""The module for Lightning, with its real Trainer: training as by hand, resumed, measured, in two processes."""

import copy
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

lightning = pytest.importorskip("lightning")

import pyro_vsd as vsd  # noqa: E402
from pyro_vsd._utils import mix_seed  # noqa: E402
from pyro_vsd.lightning import VSDModule  # noqa: E402
from pyro_vsd.training import compiling  # noqa: E402
from tests.training import cases  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    # data in memory need no workers
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    # Lightning uses what torch's next version takes away
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]


def trainer(folder, epochs=3, **options):
    settings = {
        "accelerator": "cpu", "max_epochs": epochs, "default_root_dir": folder, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(**{**settings, **options})


def loader(data=None, size=10, **options):
    data = cases.data() if data is None else data
    return DataLoader(TensorDataset(data.x, data.y), batch_size=size, **options)


class Once:
    """One batch, without a DataLoader, which would draw a number for its workers."""

    def __init__(self, *batch):
        self.batch = batch[0] if len(batch) == 1 else batch

    def __iter__(self):
        yield self.batch

    def __len__(self):
        return 1


def module(make=cases.regressor, guide=None, **options):
    torch.manual_seed(3)
    model = make()
    options = {"elbo": vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(5)), "num_samples": 5, **options}
    return VSDModule(model, vsd.VSDGuide(model, **(guide or {})), **options)


def values(found):
    return cases.values(found.model, found.guide)


def train(found, folder, seed=0, ckpt_path=None, data=None, validation=None, **options):
    torch.manual_seed(seed)
    engine = trainer(folder, **options)
    engine.fit(found, data or loader(shuffle=True), validation, ckpt_path=ckpt_path)
    return engine


# ---- training


def test_digits(tmp_path):
    train_data, test_data = vsd.datasets.digits(dtype=torch.float32)
    torch.set_default_dtype(torch.float32)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 10])), num_data=len(train_data))
    found = VSDModule(model, vsd.VSDGuide(model), num_samples=20, optimizer=lambda g: torch.optim.Adam(g, lr=5e-3))
    engine = train(found, tmp_path, data=loader(train_data, 100, shuffle=True), epochs=30)
    (metrics,) = engine.validate(found, loader(test_data, 400), verbose=False)
    assert metrics["val_accuracy"] > 0.96
    assert metrics["val_nll"] < 0.15


def test_the_same_as_by_hand(tmp_path):
    found, expected = module(), module()
    train(found, tmp_path, epochs=3)
    loss, rows = expected.loss, loader(shuffle=True)
    optimizer = torch.optim.Adam(expected.guide.parameter_groups(lr=1e-3), fused=True)
    torch.manual_seed(0)
    for _ in range(3):
        for x, y in rows:
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
    assert cases.same(values(found), values(expected))
    assert found.elbo.step == expected.elbo.step == 9


def test_parameters_exist_before_the_first_batch():
    found = module()
    (group,) = found.configure_optimizers().param_groups
    wanted = [p for part in found.guide.parameter_groups() for p in part["params"]]
    assert wanted
    assert list(map(id, group["params"])) == list(map(id, wanted))


@pytest.mark.parametrize("kind", ["class", "function", "instance"])
def test_optimizers(kind, tmp_path):
    found = module()
    found.optimizer = {
        "class": torch.optim.AdamW,
        "function": lambda groups: torch.optim.SGD(groups, lr=1e-4),
        "instance": torch.optim.Adam(found.guide.parameter_groups(lr=1e-2, vectors=1e-3)),
    }[kind]
    before = values(found)
    train(found, tmp_path, epochs=1)
    assert not any(torch.equal(v, before[k]) for k, v in values(found).items() if k.startswith("1.theta"))


def test_schedulers(tmp_path):
    found = module(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    engine = train(found, tmp_path, epochs=2)
    assert engine.optimizers[0].param_groups[0]["lr"] == 1e-3 / 4


def test_a_plateau_is_seen_in_the_validation(tmp_path):
    def plateau(optimizer):
        # nothing is better than the first by so much
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, threshold=1e9, threshold_mode="abs"
        )
        return {"scheduler": scheduler, "monitor": "val_log_likelihood"}

    engine = train(module(scheduler=plateau), tmp_path, epochs=2, validation=loader())
    assert engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_batches_that_are_dicts(tmp_path):
    class Dicts(torch.utils.data.Dataset):
        def __len__(self):
            return cases.N

        def __getitem__(self, i):
            return {"x": cases.data().x[i], "y": cases.data().y[i]}

    engine = train(module(), tmp_path, epochs=1, data=DataLoader(Dicts(), batch_size=12))
    assert engine.logged_metrics["train_loss"].isfinite()


def test_other_elbos(tmp_path):
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    model = cases.regressor()
    guide = AutoNormal(model)
    guide(cases.data().x, cases.data().y)
    engine = train(VSDModule(model, guide, Trace_ELBO()), tmp_path, epochs=1)
    assert set(engine.logged_metrics) == {"train_loss"}


def test_a_loss_that_is_not_finite_names_the_site(tmp_path):
    data = cases.data()
    data.y[3] = float("nan")
    found = module()
    with pytest.raises(ValueError, match=r"nan.*'y'"):
        train(found, tmp_path, data=loader(data))
    assert all(bool(v.isfinite().all()) for v in values(found).values())


def quiet(**options):
    guide = {"init_alpha": 1e-24, "scale_vectors": False}
    return module(guide=guide, optimizer=lambda g: torch.optim.SGD(g, lr=1e-4), **options)


def test_accumulated_batches_are_one_large_batch_with_one_kl(tmp_path):
    found, expected = quiet(), quiet()
    train(found, tmp_path, data=loader(size=4), accumulate_grad_batches=3)
    train(expected, tmp_path, data=loader(size=12))
    for name, value in values(expected).items():
        torch.testing.assert_close(values(found)[name], value, rtol=1e-9, atol=1e-9)
    assert found.elbo.step == expected.elbo.step == 6


def test_bfloat16(tmp_path):
    torch.set_default_dtype(torch.float32)
    data = vsd.datasets.Data(*(v.float() for v in (cases.data().x, cases.data().y)))
    losses = {}
    for precision in ("bf16-mixed", "32-true"):
        found = quiet()
        engine = train(found, tmp_path, epochs=2, data=loader(data), validation=loader(data), precision=precision)
        losses[precision] = engine.logged_metrics["train_loss"]
        assert all(v.dtype == torch.float32 and v.isfinite().all() for v in found.parameters())
        assert engine.logged_metrics["val_rmse"].isfinite()
        assert engine.predict(found, loader(data))[0].mean.isfinite().all()
    torch.testing.assert_close(losses["bf16-mixed"], losses["32-true"], rtol=0.05, atol=0.0)


# ---- compiled


@pytest.fixture
def replayed(monkeypatch):
    """The captured operators run as they are, without a compiler."""
    monkeypatch.setattr(compiling, "_compile", compiling.replay)


@pytest.fixture
def programs(monkeypatch):
    """How often a captured graph ran."""
    calls, backward = [], compiling.Program.backward
    monkeypatch.setattr(compiling.Program, "backward", lambda self, *args: (calls.append(1), backward(self, *args))[1])
    return calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    ],
    ids=str,
)
def test_compiled_it_is_the_same(options, replayed, programs, tmp_path):
    found, expected = (module(cases.batch_norm, compile=flag) for flag in (True, False))
    for each in (expected, found):
        train(each, tmp_path, data=loader(size=6), validation=Once(cases.data().x, cases.data().y), **options)
        assert len(programs) >= 12 if each is found else not programs
    assert found.elbo.step == expected.elbo.step
    for name, value in values(expected).items():
        torch.testing.assert_close(values(found)[name], value)
    copy.deepcopy(found)


def test_compiled_mixed_precision_runs_eagerly(replayed, programs, tmp_path):
    torch.set_default_dtype(torch.float32)
    data = vsd.datasets.Data(*(v.float() for v in (cases.data().x, cases.data().y)))
    found, expected = module(compile=True), module()
    with pytest.warns(UserWarning, match="autocast"):
        train(found, tmp_path, data=loader(data, 12), precision="bf16-mixed")
    train(expected, tmp_path, data=loader(data, 12), precision="bf16-mixed")
    assert cases.same(values(found), values(expected))
    assert not programs


def test_compiled_in_several_processes_warns():
    found = module(compile=True)
    found._trainer = types.SimpleNamespace(world_size=2)
    with pytest.warns(UserWarning, match=r"\bcompile\b"):
        found.on_fit_start()


# ---- metrics and predictions


def test_metrics(tmp_path):
    found = module()
    engine = train(found, tmp_path, validation=loader(size=24))
    prediction = found(cases.data().x, seed=mix_seed(0, 0))
    for name, value in vsd.metrics.report(prediction, cases.data().y).to_dict().items():
        assert engine.logged_metrics[f"val_{name}"].item() == pytest.approx(value, rel=1e-6)
    assert {"train_loss", "train_log_likelihood", "train_kl"} <= set(engine.logged_metrics)
    (tested,) = engine.test(found, loader(size=24), verbose=False)
    assert tested["test_rmse"] == pytest.approx(vsd.metrics.rmse(prediction, cases.data().y), rel=1e-6)


def test_metrics_of_classes(tmp_path):
    found = module(cases.classifier)
    engine = train(found, tmp_path, data=loader(cases.classes()), validation=loader(cases.classes()))
    assert {"val_nll", "val_accuracy", "val_ece"} <= set(engine.logged_metrics)


def test_metrics_of_several_sets(tmp_path):
    found = module()
    metrics = trainer(tmp_path).test(found, [loader(), loader(cases.data(7))], verbose=False)
    assert {"test_rmse/dataloader_idx_0", "test_rmse/dataloader_idx_1"} <= set(metrics[0])


def test_validation_does_not_change_the_training(tmp_path):
    first, second = module(cases.batch_norm), module(cases.batch_norm)
    train(first, tmp_path)
    train(second, tmp_path, validation=Once(cases.data().x, cases.data().y))
    assert cases.same(values(first), values(second))


@pytest.mark.parametrize("columns", ["x", "x,", "x,y"])
def test_predictions(columns, tmp_path):
    found, data = module(num_samples=7, seed=1), cases.data()
    batch = {"x": data.x, "x,": (data.x,), "x,y": [data.x, data.y]}[columns]
    (prediction,) = trainer(tmp_path).predict(found, Once(batch))
    assert isinstance(prediction, vsd.RegressionPrediction)
    expected = vsd.predict(found.model, found.guide, data.x, num_samples=7, seed=1)
    assert torch.equal(prediction.mean, expected.mean)


# ---- going on


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("validated", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(validated, tmp_path):
    validation = loader(size=24) if validated else None

    def checkpoint():
        return lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)

    options = {"validation": validation, "num_sanity_val_steps": 0}
    whole = module(cases.batch_norm)
    train(whole, tmp_path, epochs=4, **options)
    saved = {"enable_checkpointing": True, "callbacks": [checkpoint()]}
    train(module(cases.batch_norm), tmp_path, epochs=2, **options, **saved)
    resumed = module(cases.batch_norm)
    saved["callbacks"] = [checkpoint()]
    train(resumed, tmp_path, epochs=4, seed=99, ckpt_path=tmp_path / "epoch=1.ckpt", **options, **saved)
    assert resumed.elbo.step == whole.elbo.step == 12
    assert cases.same(values(resumed), values(whole))


def test_a_checkpoint_is_of_plain_types_and_loads_for_prediction(tmp_path):
    found = module()
    engine = train(found, tmp_path)
    engine.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["pyro_vsd"]["elbo"] == {"step": 9}
    other = module()
    state = torch.get_rng_state()
    loaded = VSDModule.load_from_checkpoint(tmp_path / "last.ckpt", model=other.model, guide=other.guide)
    assert cases.same(values(loaded), values(found))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("given", "missing"), [([], "model and guide"), (["model"], "guide"), (["guide"], "model")], ids=str
)
def test_a_checkpoint_without_its_model_and_guide(given, missing, tmp_path):
    found = module()
    train(found, tmp_path, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    parts = {name: getattr(found, name) for name in given}
    with pytest.raises(TypeError, match=rf"^{missing} "):
        VSDModule.load_from_checkpoint(tmp_path / "last.ckpt", **parts)


class MakesItsOwn(VSDModule):
    def __init__(self):
        model = cases.regressor()
        super().__init__(model, vsd.VSDGuide(model))


def test_a_subclass_may_make_its_model_and_guide(tmp_path):
    found = MakesItsOwn()
    train(found, tmp_path, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    assert cases.same(values(MakesItsOwn.load_from_checkpoint(tmp_path / "last.ckpt")), values(found))


def test_a_checkpoint_of_a_different_module(tmp_path):
    found = module()
    engine = train(found, tmp_path, epochs=1)
    engine.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del content["pyro_vsd"]
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"\bcheckpoint\b"):
        train(module(), tmp_path, ckpt_path=tmp_path / "other.ckpt")


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_know_their_model(how):
    found = module(seed=1, optimizer=torch.optim.AdamW)
    other = pickle.loads(pickle.dumps(found)) if how == "pickle" else copy.deepcopy(found)
    assert other.guide.model is other.model
    assert other.model is not found.model
    assert torch.equal(other(cases.data().x).mean, found(cases.data().x).mean)


# ---- errors


@pytest.mark.parametrize(("name", "value"), [("num_samples", 0), ("num_inputs", 0.5)])
def test_wrong_values(name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        module(**{name: value})


def test_a_guide_without_parameters():
    guide = vsd.VSDGuide(cases.function)
    with pytest.raises(ValueError, match=r"\bguide\b"):
        VSDModule(cases.regressor(), guide)


def test_a_model_that_is_a_function():
    guide = vsd.VSDGuide(cases.function)
    with pytest.raises(TypeError, match=r"\bmodel\b"):
        VSDModule(cases.function, guide)


def test_an_optimizer_of_pyro():
    import pyro.optim

    with pytest.raises(TypeError, match=r"\boptimizer\b"):
        module(optimizer=pyro.optim.Adam({})).configure_optimizers()


@pytest.mark.parametrize("batch", [[torch.ones(2, 3)], {"x": torch.ones(2, 3), "z": torch.ones(2)}], ids=["x", "dict"])
def test_batches_that_cannot_be_evaluated(batch, tmp_path):
    with pytest.raises(ValueError, match=r"\bbatch\b"):
        trainer(tmp_path).validate(module(), Once(batch), verbose=False)


# ---- several inputs, dicts, short batches, frozen layers


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(cases.D, 1)

    def forward(self, x, gate):
        return self.linear(x * gate)


def gated():
    return vsd.nn.Regressor(vsd.nn.bayesianize(Gated()), cases.N)


class Dicts(torch.utils.data.Dataset):
    def __len__(self):
        return cases.N

    def __getitem__(self, i):
        x, y = cases.data()[i]
        return {"x": x, "gate": (x > 0).to(x), "answer": y}


def test_several_inputs_and_dicts(tmp_path):
    x, y = cases.data().x, cases.data().y
    tuples = DataLoader(TensorDataset(x, (x > 0).to(x), y), batch_size=8)
    results = []
    for data, options in ((tuples, {}), (DataLoader(Dicts(), batch_size=8), {"target": "answer"})):
        found = module(gated, elbo=None, lr=0.03, kl_weight=2.0, **options)
        run = train(found, tmp_path, epochs=2, data=data)
        predictions = run.predict(found, data)
        results.append((values(found), run.validate(found, data, verbose=False), predictions))
        assert len(vsd.Prediction.concat(predictions)) == cases.N
    assert cases.same(results[0][0], results[1][0])
    assert results[0][1][0] == pytest.approx(results[1][1][0])
    assert found.elbo.kl_weight == 2.0


def test_a_short_batch(tmp_path):
    data = cases.data(25)
    with pytest.warns(UserWarning, match=r"drop_last=True"):
        train(module(lambda: cases.regressor(25)), tmp_path, epochs=1, data=loader(data, 8))


def test_frozen_statistics(tmp_path):
    found = module(cases.batch_norm)
    norm = found.model.net.network[1]
    for parameter in norm.parameters():
        parameter.requires_grad_(False)
    train(found, tmp_path, epochs=1)
    assert not norm.running_mean.any()


# ---- two processes


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each process runs this file; without noise they give what one gives on batches twice as large."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.test_lightning", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name in ("quiet", "noisy", "resumed"):
        assert cases.same(first[name], second[name])
    assert cases.same(first["resumed"], first["noisy"])
    assert first["metrics"] == second["metrics"]
    assert not torch.equal(first["noise"], second["noise"])
    expected = quiet()
    train(expected, tmp_path, data=loader(size=12))
    for name, value in values(expected).items():
        torch.testing.assert_close(first["quiet"][name], value, rtol=1e-9, atol=1e-9)


def two_processes(folder):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    group = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 0}
    # Lightning would shuffle. Rows 0, 2, … and 1, 3, …: together those of the batches in one process.
    rank = int(os.environ.get("LOCAL_RANK", 0))
    rows = DistributedSampler(cases.data(), num_replicas=2, rank=rank, shuffle=False)
    still = quiet()
    train(still, folder, data=loader(size=6, sampler=rows), use_distributed_sampler=False, **group)
    result = {"quiet": values(still)}
    noisy, resumed = module(cases.batch_norm), module(cases.batch_norm)
    engine = train(noisy, folder, epochs=2, validation=loader(size=5), **group)
    engine.save_checkpoint(folder / "last.ckpt")
    result["metrics"] = {name: float(v) for name, v in engine.logged_metrics.items() if name.startswith("val")}
    result["noise"] = torch.rand(4)
    whole = module(cases.batch_norm)
    train(whole, folder, epochs=3, validation=loader(size=5), **group)
    result["noisy"] = values(whole)
    train(resumed, folder, seed=5, ckpt_path=folder / "last.ckpt", epochs=3, validation=loader(size=5), **group)
    result["resumed"] = values(resumed)
    torch.save(result, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
