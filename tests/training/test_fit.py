"""The training loop: what it records, when it stops, and that it goes on where it was."""

import math
import os
import signal
import threading

import pyro
import pyro.optim
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import pyro_vsd as vsd
from pyro_vsd._utils import mix_seed
from pyro_vsd.training import Checkpoint, EarlyStopping, History, fit, load_checkpoint, save_checkpoint
from pyro_vsd.training.checkpoint import read_archive, write_archive
from tests.training import cases


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C as in a terminal: a process started in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def loader(**options):
    data = cases.data()
    return DataLoader(TensorDataset(data.x, data.y), batch_size=10, **options)


def own_generator():
    generator = torch.Generator().manual_seed(3)
    return loader(sampler=RandomSampler(cases.data(), generator=generator), generator=torch.Generator())


SOURCES = {
    "data": cases.data,
    "tuple": lambda: (cases.data().x, cases.data().y),
    "loader": lambda: loader(shuffle=True),
    "generators": own_generator,
}
OPTIMIZERS = {
    "default": lambda: None,
    "class": lambda: torch.optim.AdamW,
    "factory": lambda: lambda groups: torch.optim.SGD(groups, lr=1e-5, momentum=0.9),
    "pyro": lambda: pyro.optim.Adam({"lr": 0.01}),
    "pyro-schedule": lambda: pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.9}
    ),
}
FAST = {"batch_size": 10, "seed": 0}


class Run:
    def __init__(self, make=cases.regressor, source="data", **options):
        torch.manual_seed(4)
        self.model = cases.function if make is cases.function else make()
        self.guide = vsd.VSDGuide(self.model, num_reflections=2)
        self.source = SOURCES[source]()
        self.options = {**FAST, "elbo": vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(9)), **options}

    def fit(self, epochs, **options):
        return fit(self.model, self.guide, self.source, epochs=epochs, **{**self.options, **options})

    def values(self):
        return {**cases.values(self.model, self.guide), **{k: v for k, v in cases.store().items() if k == "sigma"}}


class Ctrl_C:
    """Presses it at a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0


def interrupted_at(step):
    return vsd.VSD_ELBO(kl_weight=Ctrl_C(step))


# ---- what it does


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loss_falls(source, optimizer):
    run = Run(source=source)
    history = run.fit(12, optimizer=OPTIMIZERS[optimizer](), elbo=vsd.VSD_ELBO())
    assert [record["epoch"] for record in history] == list(range(1, 13))
    assert history[-1]["loss"] < history[0]["loss"]
    assert history.stopped == "epochs"


def test_a_function_trains_its_parameters_too():
    run = Run(cases.function)
    history = run.fit(10)
    assert history[-1]["loss"] < history[0]["loss"]
    assert pyro.param("sigma").item() != 0.7


def test_the_same_as_by_hand():
    run = Run(elbo=vsd.VSD_ELBO())
    expected = Run(elbo=vsd.VSD_ELBO())
    run.fit(2)
    loss = vsd.VSD_ELBO()(expected.model, expected.guide)
    optimizer = torch.optim.Adam(expected.guide.parameter_groups(lr=1e-2), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 6)))
    torch.manual_seed(0)
    for epoch in range(2):
        order = torch.randperm(cases.N, generator=torch.Generator().manual_seed(mix_seed(0, epoch)))
        for rows in order.split(8):  # 24 rows in batches of at most 10
            x, y = expected.source.x[rows], expected.source.y[rows]
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
            schedule.step()
    for name, value in expected.values().items():
        torch.testing.assert_close(run.values()[name], value)


def test_a_loader_keeps_its_batches_and_others_are_near_equal():
    sizes = []

    class Noted(vsd.VSD_ELBO):
        def differentiable_loss(self, model, guide, x, y):
            sizes.append(len(x))
            return super().differentiable_loss(model, guide, x, y)

    for source in ("data", "tuple", "loader"):
        Run(source=source, elbo=Noted()).fit(1)
    assert sizes == [8, 8, 8, 8, 8, 8, 10, 10, 4]


def test_the_record_adds_up():
    history = Run().fit(3)
    for record in history:
        total = -record["log_likelihood"] + record["kl_weight"] * sum(record["kl"].values())
        assert record["loss"] == pytest.approx(total)
    rates = [record["lr"] for record in history]  # after each epoch, along a cosine to zero
    assert rates == pytest.approx([0.01 * 0.5 * (1 + math.cos(math.pi * third / 3)) for third in (1, 2, 3)])


def test_the_length_by_default():
    run = Run()
    history = vsd.fit(
        run.model, run.guide, (run.source.x, run.source.y), batch_size=24, callbacks=[lambda h: len(h) > 4]
    )
    assert history.stopped == "callback"
    assert history[0]["lr"] == pytest.approx(0.01, rel=1e-5)  # 3,000 steps are to come
    with pytest.raises(ValueError, match="epochs"):
        vsd.fit(run.model, run.guide, Endless())


class Endless:
    """Batches, nobody knows how many."""

    def __iter__(self):
        return iter([(cases.data().x, cases.data().y)])


def test_an_optimiser_that_looks_several_times():
    def lbfgs(groups):
        return torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=1e-6, max_iter=3)

    run = Run()
    before = run.values()
    assert len(run.fit(1, optimizer=lbfgs)) == 1
    assert not cases.same(run.values(), before)
    assert run.options["elbo"].step == 3  # of the optimiser, not evaluations


def test_the_objective_counts_its_own_steps_again_afterwards():
    run = Run()
    run.fit(1)
    elbo, data = run.options["elbo"], cases.data()
    assert elbo.auto_step
    elbo(run.model, run.guide)(data.x, data.y)
    assert elbo.step == 4


def test_a_seed_leaves_the_global_generator_alone():
    run = Run()
    before = torch.get_rng_state()
    run.fit(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_seed_gives_the_same(source):
    first, second = Run(source=source), Run(source=source)
    first.fit(2)
    torch.manual_seed(77)
    second.fit(2)
    assert cases.same(first.values(), second.values())


def test_without_a_seed_the_global_one_decides():
    runs = [Run(seed=None) for _ in range(3)]
    for run, seed in zip(runs, [1, 1, 2], strict=True):
        torch.manual_seed(seed)
        run.fit(1)
    assert cases.same(runs[0].values(), runs[1].values())
    assert not cases.same(runs[0].values(), runs[2].values())


def test_schedulers():
    def step_lr(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    assert [r["lr"] for r in Run().fit(3, scheduler=step_lr)] == [1e-3, 5e-4, 2.5e-4]
    rates = [r["lr"] for r in Run().fit(2, scheduler=step_lr, scheduler_interval="batch")]
    assert rates == [1e-3 / 8, 1e-3 / 64]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_is_seen_in_the_validation(mode):
    metrics = iter([3.0, 2.0, 1.0, 1.0, 1.0])

    def validation(model, guide):
        return {"nll": next(metrics)}

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode=mode, factor=0.1, patience=0, threshold_mode="abs"
        )

    rates = [r["lr"] for r in Run().fit(5, scheduler=plateau, validation=validation)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 1e-4])


@pytest.mark.parametrize("source", ["data", "tuple", "loader"])
def test_validation(source):
    run = Run()
    history = run.fit(2, validation=SOURCES[source]())
    metrics = history[-1]["validation"]
    assert set(metrics) == {"rmse", "log_likelihood", "crps", "coverage", "calibration_error"}
    assert list(history.to_pandas()["validation.rmse"])[-1] == metrics["rmse"]


def test_validation_of_classes():
    model = cases.classifier()
    history = fit(model, vsd.VSDGuide(model), cases.classes(), epochs=1, validation=cases.classes(), **FAST)
    assert {"accuracy", "nll", "ece"} <= set(history[0]["validation"])


def test_validation_by_a_function_that_reports():
    def validation(model, guide):
        prediction = vsd.predict(model, guide, cases.data().x, num_samples=3, progress=False)
        return vsd.metrics.report(prediction, cases.data().y)

    assert "log_likelihood" in Run().fit(1, validation=validation)[0]["validation"]


@pytest.mark.parametrize(
    "found", [3.0, None, [("nll", 1.0)], {"nll": "low"}, {"nll": torch.ones(2)}, {"nll": None}], ids=str
)
def test_validation_by_a_function_that_returns_something_else(found):
    with pytest.raises(TypeError, match=r"\bvalidation\b"):
        Run().fit(1, validation=lambda model, guide: found)


def test_validation_does_not_change_the_training():
    first, second = Run(cases.batch_norm), Run(cases.batch_norm)
    first.fit(3)
    second.fit(3, validation=loader())
    assert cases.same(first.values(), second.values())


def test_the_history_can_be_drawn():
    plots = pytest.importorskip("pyro_vsd.plots")
    history = Run().fit(3)
    assert len(plots.elbo_terms(history).get_lines()) == 3


def test_other_elbos_and_guides():
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    model = cases.regressor()
    history = fit(model, AutoNormal(model), cases.data(), epochs=2, elbo=Trace_ELBO(), **FAST)
    assert [sorted(record) for record in history] == [["epoch", "loss", "lr"]] * 2


def test_batches_that_are_dicts():
    class Dicts:
        def __iter__(self):
            return ({"x": x, "y": y} for x, y in cases.data().batches(10, seed=0))

    model = cases.regressor()
    assert len(fit(model, vsd.VSDGuide(model), Dicts(), epochs=2, seed=0)) == 2


def test_a_progress_bar(capsys):
    Run().fit(2, progress=True)
    assert "fit: 100%" in capsys.readouterr().err
    Run().fit(2)
    assert capsys.readouterr().err == ""


# ---- when it stops


def scripted(values):
    values = iter(values)
    return lambda model, guide: {"score": next(values)}


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_early_stopping_restores_the_best(mode, sign):
    scores = [sign * score for score in (3.0, 1.0, 2.0, float("nan"), 0.999, 0.5)]
    stopping = EarlyStopping(patience=3, metric="score", mode=mode, min_delta=0.01)
    best = Run(cases.batch_norm, optimizer=torch.optim.Adam)
    best.fit(2)
    run = Run(cases.batch_norm, optimizer=torch.optim.Adam)
    history = run.fit(50, validation=scripted(scores), early_stopping=stopping)
    assert (len(history), history.stopped, history.best_epoch) == (5, "early_stopping", 2)
    assert cases.same(run.values(), best.values())


def test_the_best_is_restored_at_the_end_too():
    best, run = Run(cases.function), Run(cases.function)
    best.fit(1, optimizer=pyro.optim.Adam({"lr": 0.01}))
    expected = best.values()
    pyro.clear_param_store()
    history = run.fit(
        3,
        validation=scripted([1.0, 2.0, 3.0]),
        early_stopping=EarlyStopping(5, "score", mode="min"),
        optimizer=pyro.optim.Adam({"lr": 0.01}),
    )
    assert (history.stopped, history.best_epoch) == ("epochs", 1)
    assert cases.same(run.values(), expected)


def test_a_number_is_the_patience():
    run = Run()
    history = run.fit(100, validation=cases.data(), early_stopping=1, optimizer=lambda g: torch.optim.SGD(g, lr=0.0))
    assert (len(history), history.stopped, history.best_epoch) == (2, "early_stopping", 1)


def test_callbacks_see_the_history_and_can_stop():
    seen = []

    def callback(history):
        seen.append(len(history))
        history[-1]["mine"] = 1.0
        return len(history) == 3

    history = Run().fit(10, callbacks=[callback])
    assert seen == [1, 2, 3]
    assert history.stopped == "callback"
    assert history.to_pandas()["mine"].tolist() == [1.0] * 3


def test_a_loss_that_is_not_finite_names_the_site():
    run = Run()
    run.fit(1)
    run.source.y[5] = float("nan")
    with pytest.raises(ValueError, match=r"nan.*'y'"):
        run.fit(1)
    assert all(bool(v.isfinite().all()) for v in run.values().values())


@pytest.mark.parametrize("optimizer", ["default", "pyro"])
def test_a_different_elbo_that_is_not_finite(optimizer):
    from pyro.infer import Trace_ELBO

    run = Run()
    run.source.y[5] = float("inf")
    pyro.enable_validation(False)
    with pytest.raises(ValueError, match=r"loss.*(nan|inf)"):
        run.fit(1, elbo=Trace_ELBO(), optimizer=OPTIMIZERS[optimizer]())


def test_a_gradient_that_overflows_is_neither_saved_nor_returned(tmp_path):
    """The loss of a step is that of the parameters before it, so ``fit`` looks at the parameters (pyro#1755)."""
    run = Run(checkpoint=tmp_path / "run.ckpt")
    run.fit(1)
    step = torch.optim.SGD.step

    class Spoilt(torch.optim.SGD):
        def step(self, closure):
            step(self, closure)
            self.param_groups[0]["params"][0].data[0] = float("nan")

    with pytest.raises(ValueError, match=r"'theta\.net\.0\.weight'.*\b1 step"):
        Run(checkpoint=Checkpoint(tmp_path / "run.ckpt", resume=False)).fit(1, batch_size=24, optimizer=Spoilt)
    assert load_checkpoint(tmp_path / "run.ckpt")["step"] == 3


# ---- going on

RESUMED = [(source, "default") for source in SOURCES] + [("data", name) for name in OPTIMIZERS if name != "default"]


@pytest.mark.parametrize(("source", "optimizer"), RESUMED)
@pytest.mark.parametrize("stop", [3, 4, 7], ids=["epoch-end", "one-in", "all-but-one"])
def test_an_interrupted_run_goes_on_bit_for_bit(source, optimizer, stop, tmp_path):
    """Three steps to an epoch. Each run is in the state of a new process: fresh objects, an empty store."""
    options = {
        "checkpoint": tmp_path / "run.ckpt",
        "validation": cases.data(),
        "early_stopping": EarlyStopping(patience=9),
    }
    whole = Run(cases.batch_norm, source)
    expected = whole.fit(4, **{**options, "checkpoint": None}, optimizer=OPTIMIZERS[optimizer]())
    pyro.clear_param_store()
    first = Run(cases.batch_norm, source, elbo=interrupted_at(stop - 1))
    first.options["elbo"].kl_weight = with_warmup(first.options["elbo"].kl_weight)
    partial = first.fit(4, **options, optimizer=OPTIMIZERS[optimizer]())
    assert partial.stopped == "interrupt"
    assert len(partial) < 4
    pyro.clear_param_store()
    torch.manual_seed(123)
    second = Run(cases.batch_norm, source)
    history = second.fit(4, **options, optimizer=OPTIMIZERS[optimizer]())
    assert list(history) == list(expected)
    assert history.best_epoch == expected.best_epoch
    assert cases.same(second.values(), whole.values())


def with_warmup(press):
    warmup = vsd.infer.linear_warmup(9)

    def weight(step):
        press(step)
        return warmup(step)

    return weight


def test_between_epochs_the_batch_size_may_change(tmp_path):
    """The rest of an epoch is then that of the new size."""
    options = {"checkpoint": tmp_path / "run.ckpt", "seed": None}
    Run().fit(1, **options)
    assert Run(elbo=interrupted_at(5)).fit(3, **options, batch_size=6).stopped == "interrupt"
    with pytest.raises(ValueError, match=r"\bbatch_size\b"):
        Run().fit(3, **options)
    resumed = Run()
    assert len(resumed.fit(3, **options, batch_size=6)) == 3
    assert load_checkpoint(options["checkpoint"])["step"] == 3 + 4 + 4


def test_a_function_goes_on(tmp_path):
    options = {"checkpoint": tmp_path / "run.ckpt"}
    whole = Run(cases.function)
    whole.fit(4)
    expected = whole.values()
    for epochs in (1, 3, 4):
        pyro.clear_param_store()
        run = Run(cases.function)
        run.fit(epochs, **options)
    assert cases.same(run.values(), expected)


def test_a_finished_run_is_not_trained_again(tmp_path):
    run = Run(checkpoint=tmp_path / "run.ckpt")
    history = run.fit(3)
    before, saved = run.values(), os.stat(tmp_path / "run.ckpt").st_mtime_ns
    again = Run(checkpoint=tmp_path / "run.ckpt")
    assert list(again.fit(3)) == list(history)
    assert cases.same(again.values(), before)
    assert os.stat(tmp_path / "run.ckpt").st_mtime_ns == saved


def test_how_often_it_saves(tmp_path, monkeypatch):
    saved = []

    def save(path, *, epoch, step, **parts):
        saved.append((epoch, step))

    monkeypatch.setattr("pyro_vsd.training.fitting.save_checkpoint", save)
    Run().fit(5, checkpoint=Checkpoint(tmp_path / "a", every_epochs=2))
    assert saved == [(2, 6), (4, 12), (5, 15)]
    saved.clear()
    Run().fit(2, checkpoint=Checkpoint(tmp_path / "a", every_epochs=5, every_steps=2))
    assert saved == [(0, 2), (1, 4), (1, 6), (2, 6)]


def test_resume_false_begins_anew(tmp_path):
    path = tmp_path / "run.ckpt"
    Run().fit(2, checkpoint=path)
    assert len(Run().fit(1, checkpoint=Checkpoint(path, resume=False))) == 1
    assert load_checkpoint(path)["epoch"] == 1


RUN = ["settings", "settings.seed", "done", "history", "processes", "best", "best_epoch", "best_states"]
PROCESS = ["epoch_start", "epoch_start.rng", "epoch_start.loader", "means", "means.count"]
PROCESS += ["generators", "generators.rng", "generators.loader"]


@pytest.mark.parametrize("field", [*RUN, *(f"processes.0.{field}" for field in PROCESS)])
def test_a_checkpoint_without_a_field_changes_nothing(field, tmp_path):
    path = tmp_path / "run.ckpt"
    Run(elbo=interrupted_at(1), checkpoint=path).fit(2)  # in the middle of an epoch
    content = read_archive(path)
    *folders, last = field.split(".")
    state = content["extra"]["fit"]
    for folder in folders:
        state = state[int(folder) if folder == "0" else folder]
    del state[last]
    write_archive(path, content)
    run = Run(checkpoint=path)
    before, random = run.values(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"\bcheckpoint\b"):
        run.fit(2)
    assert cases.same(run.values(), before)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("field", ["generators", "epoch_start"])
def test_a_checkpoint_with_spoilt_generators_changes_nothing(field, tmp_path):
    path = tmp_path / "run.ckpt"
    Run(elbo=interrupted_at(1), checkpoint=path).fit(2)
    content = read_archive(path)
    (own,) = content["extra"]["fit"]["processes"]
    own[field]["rng"]["numpy"] = [1, 2]
    write_archive(path, content)
    run = Run(checkpoint=path)
    before = run.values()
    with pytest.raises(ValueError, match=r"\brng\b"):
        run.fit(2)
    assert cases.same(run.values(), before)


# ---- Ctrl-C


def test_ctrl_c_returns_the_history_and_saves(tmp_path):
    run = Run(elbo=interrupted_at(7), checkpoint=tmp_path / "run.ckpt")
    history = run.fit(100)
    assert (history.stopped, len(history)) == ("interrupt", 2)
    found = load_checkpoint(tmp_path / "run.ckpt")
    assert (found["epoch"], found["step"]) == (2, 8)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_without_a_checkpoint():
    history = Run(elbo=interrupted_at(0)).fit(100)
    assert (history.stopped, len(history)) == ("interrupt", 0)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    class Twice(Ctrl_C):
        def __call__(self, step):
            super().__call__(step)
            return super().__call__(step)

    with pytest.raises(KeyboardInterrupt):
        Run(elbo=vsd.VSD_ELBO(kl_weight=Twice(5)), checkpoint=tmp_path / "run.ckpt").fit(100)
    assert load_checkpoint(tmp_path / "run.ckpt")["step"] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_a_callback(tmp_path):
    def callback(history):
        raise KeyboardInterrupt

    history = Run(checkpoint=tmp_path / "run.ckpt").fit(9, callbacks=[callback])
    assert (history.stopped, len(history)) == ("interrupt", 1)


def test_a_handler_of_the_application_stays():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *args: pressed.append(1))
    try:
        assert Run(elbo=interrupted_at(2)).fit(2).stopped == "epochs"
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]


def test_in_a_second_thread():
    run, found = Run(), []
    thread = threading.Thread(target=lambda: found.append(run.fit(1)))
    thread.start()
    thread.join()
    assert len(found[0]) == 1


# ---- errors


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"seed": 0.5}, "seed"),
        ({"early_stopping": 3}, "early_stopping"),
        ({"early_stopping": 0, "validation": cases.data()}, "patience"),
        ({"early_stopping": EarlyStopping(metric="nll"), "validation": cases.data()}, "metric"),
        ({"early_stopping": EarlyStopping(metric="coverage"), "validation": cases.data()}, "mode"),
        ({"scheduler_interval": "day"}, "scheduler_interval"),
        ({"optimizer": pyro.optim.Adam({}), "scheduler": 1}, "scheduler"),
        ({"optimizer": torch.optim.Adam([torch.ones(1)])}, "optimizer"),
        ({"validation": [(torch.ones(2, 3),)]}, "validation"),
        ({"data": (torch.ones(3, 3), torch.ones(2))}, "data"),
        ({"data": (torch.ones(0, 3), torch.ones(0))}, "data"),
        ({"data": []}, "data"),
        ({"data": type("Empty", (), {"__iter__": lambda self: iter([])})()}, "data"),
    ],
)
def test_wrong_values(options, name):
    run = Run()
    options = {"epochs": 1, **options}
    run.source = options.pop("data", run.source)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        run.fit(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optimizer": "adam"}, "optimizer"),
        ({"early_stopping": "a"}, "early_stopping"),
        ({"validation": torch.ones(3)}, "validation"),
        ({"data": torch.ones(3)}, "data"),
        ({"data": iter([])}, "data"),
        ({"data": [torch.ones(3)]}, "data"),
    ],
)
def test_wrong_types(options, name):
    run = Run()
    run.source = options.get("data", run.source)
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        run.fit(1, **{k: v for k, v in options.items() if k != "data"})


def test_a_scheduler_of_a_different_optimizer():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)
    with pytest.raises(ValueError, match=r"\bscheduler\b"):
        Run().fit(1, scheduler=scheduler)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: EarlyStopping(patience=0), "patience"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta"),
        (lambda: EarlyStopping(mode="up"), "mode"),
        (lambda: Checkpoint("a", every_epochs=0), "every_epochs"),
        (lambda: Checkpoint("a", every_steps=0.5), "every_steps"),
    ],
)
def test_wrong_settings(make, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        make()


def test_resuming_something_else(tmp_path):
    path = tmp_path / "run.ckpt"
    run = Run(elbo=interrupted_at(1), checkpoint=path)
    run.fit(1)
    with pytest.raises(ValueError, match=r"\bseed\b"):
        Run(checkpoint=path).fit(1, seed=1)
    with pytest.raises(ValueError, match=r"\bbatch_size\b"):
        Run(checkpoint=path).fit(1, batch_size=5)
    with pytest.raises(ValueError, match=r"\bgenerators\b"):
        Run(source="generators", checkpoint=path).fit(1)
    save_checkpoint(path, model=run.model, guide=run.guide)
    with pytest.raises(ValueError, match=r"\bcheckpoint\b"):
        Run(checkpoint=path).fit(1)


def test_a_data_set_of_a_different_size():
    run = Run(lambda: cases.regressor(num_data=100))
    with pytest.warns(UserWarning, match="num_data=100 "):
        run.fit(1)


def test_the_history_is_short():
    history = Run().fit(2, validation=lambda *_: {"nll": 0.25})
    assert repr(history).startswith("History(epochs=2, loss=")
    assert repr(history).endswith("validation={nll=0.25}, stopped='epochs')")
    assert repr(History()) == "History(epochs=0, stopped='epochs')"


def test_pandas_is_needed_only_when_asked(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    history = History([{"loss": 1.0}])
    with pytest.raises(ImportError, match="to_pandas"):
        history.to_pandas()


def test_inputs_and_targets_that_are_not_one_tuple():
    model, data = cases.regressor(), cases.data()
    with pytest.raises(TypeError, match="epochs"):
        fit(model, vsd.VSDGuide(model), data.x, data.y)


def test_a_guide_in_place_of_the_model():
    model, data = cases.regressor(), cases.data()
    with pytest.raises(TypeError, match=r"\bmodel\b.*\bfit\(model, guide, data\)"):
        fit(vsd.VSDGuide(model), model, data, 1)
