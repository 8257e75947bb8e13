"""vsd.Ensemble: members, training, stacking, predictions, states."""

import contextlib
import copy
import pickle
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.training import Checkpoint
from tests.training import cases

# equal batches: each new size is captured once more
QUICK = {"epochs": 2, "batch_size": 20, "progress": False}
ONCE = {**QUICK, "validation": None}


def rows(number=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, cases.D, generator=generator)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(number, generator=generator)


def classes(number=400):
    x, y = rows(number)
    return x, (y > 0).long() + (y > 0.7).long()


def classifier():
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([cases.D, 5, 3])), num_data=1)


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return vsd.Ensemble(cases.regressor, members=3, kl_weight=[0.1, 1.0, None], seed=3).fit(rows(), **QUICK)


# ---- members


def test_members_start_apart_and_torch_is_left_alone():
    model, state = cases.regressor(), torch.get_rng_state()
    ensemble = vsd.Ensemble(model, members=3, num_reflections=1)
    assert torch.equal(torch.get_rng_state(), state)
    starts = [guide.theta.net._modules["0"].weight for _, guide in ensemble.members]
    assert not torch.equal(starts[0], starts[1])
    assert [guide.num_reflections for _, guide in ensemble.members] == [1, 1, 1]
    assert len({id(model) for model, _ in ensemble.members}) == 3


def test_a_model_is_copied_and_left_alone():
    model = cases.regressor()
    before = cases.values(model)
    vsd.Ensemble(model, members=2).fit(rows(), **ONCE)
    assert cases.same(cases.values(model), before)
    assert model.num_data == cases.N


@pytest.mark.parametrize(
    ("members", "kl_weight", "expected"),
    [
        (5, "spread", [1.0, None, 0.1, 3.0, 0.01]),
        (9, "spread", [1.0, None, 0.1, 3.0, 0.01, 0.3, None, 0.03, 1.0]),
        (1, "spread", [1.0]),
        (2, 0.5, [0.5, 0.5]),
        (2, None, [None, None]),
        (2, (None, 0.5), [None, 0.5]),
        (2, np.array([0.1, 0.5]), [0.1, 0.5]),
        (2, torch.tensor([0.25, 0.5]), [0.25, 0.5]),
    ],
)
def test_weights_of_the_kl(members, kl_weight, expected):
    found = vsd.Ensemble(cases.regressor, members=members, kl_weight=kl_weight).kl_weight
    assert [w if w is None else round(w, 12) for w in found] == expected


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"members": 0}, "members"),
        ({"members": 2, "kl_weight": [1.0]}, "kl_weight"),
        ({"members": 2, "kl_weight": []}, "kl_weight"),
        ({"members": 2, "kl_weight": [1.0, -1.0]}, "kl_weight"),
        ({"kl_weight": "wide"}, "kl_weight"),
        ({"seed": 0.5}, "seed"),
        ({"num_reflections": -1}, "num_reflections"),
    ],
)
def test_bad_options(options, name):
    with pytest.raises(ValueError, match=name):
        vsd.Ensemble(cases.regressor, **options)


def test_bad_factories():
    model, net = cases.regressor(), vsd.nn.bayesianize(vsd.nn.mlp([cases.D, 5, 1]))
    with pytest.raises(ValueError, match="model_or_factory"):
        vsd.Ensemble(lambda: model)
    with pytest.raises(ValueError, match="model_or_factory"):
        vsd.Ensemble(lambda: vsd.nn.Regressor(net, num_data=3))
    with pytest.raises(TypeError, match="model_or_factory"):
        vsd.Ensemble(lambda: None)
    with pytest.raises(TypeError, match="model_or_factory"):
        vsd.Ensemble(3)


# ---- data


def test_validation_that_cannot_judge():
    ensemble, (x, y) = vsd.Ensemble(cases.regressor, members=2), rows()
    with pytest.raises(ValueError, match="validation"):
        ensemble.fit((x, y), validation=(x[:60], y[:60]), **QUICK)
    with pytest.raises(ValueError, match="validation"):
        ensemble.fit((x, y), validation=1.5, **QUICK)
    x, y = classes()
    missing = y[300:] != 2
    with pytest.raises(ValueError, match=r"validation.*\[2\]"):
        vsd.Ensemble(classifier).fit((x[:300], y[:300]), validation=(x[300:][missing], y[300:][missing]), **QUICK)


@pytest.mark.parametrize(
    ("data", "error", "name"),
    [
        (torch.zeros(3), TypeError, "data"),
        ((torch.zeros(0, cases.D), torch.zeros(0)), ValueError, "data"),
        ((torch.zeros(3, cases.D), torch.zeros(4)), ValueError, "data"),
    ],
)
def test_bad_data(data, error, name):
    with pytest.raises(error, match=name):
        vsd.Ensemble(cases.regressor, members=2).fit(data)


@pytest.mark.parametrize("kind", ["column", "dict", "Dataset", "DataLoader", "two inputs", "two inputs by name"])
@pytest.mark.filterwarnings("ignore:.*too few to fit")
def test_kinds_of_data(kind):
    x, y = rows(100)
    parts = {"u": x[:, :1], "v": x[:, 1:]}

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1, 4), nn.Linear(cases.D - 1, 4)

        def forward(self, u, v):
            return (self.first(u) + self.second(v)).tanh().sum(-1)

    data = {
        "column": (x, y.unsqueeze(-1)), "dict": {"x": x, "y": y}, "Dataset": TensorDataset(x, y),
        "DataLoader": DataLoader(TensorDataset(x, y), 30),
        "two inputs": (*parts.values(), y), "two inputs by name": (parts, y),
    }  # fmt: skip
    two = kind.startswith("two")

    def make():
        return vsd.nn.Regressor(vsd.nn.bayesianize(Both()), 1, noise="learned") if two else cases.regressor()

    options = {**QUICK, "validation": 0.2, "refit": False}
    inputs = (parts,) if two else (x,)
    plain = vsd.Ensemble(make, members=2).fit(((tuple(parts.values()), y) if two else (x, y)), **options)
    found = vsd.Ensemble(make, members=2).fit(data[kind], **options)
    assert cases.same(numbers(found), numbers(plain))
    assert_close(found.predict(*inputs, seed=1).mean, plain.predict(*inputs, seed=1).mean)
    assert found.diagnose(data[kind]).score == plain.diagnose(data[kind]).score


def test_named_inputs_of_validation_in_a_different_order():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, u, v):
            return self.layer(u - v)

    def fitted(validation):
        make = lambda: vsd.nn.Regressor(vsd.nn.bayesianize(Difference()), 1, noise="learned")  # noqa: E731
        options = {**QUICK, "batch_size": 25}
        return vsd.Ensemble(make, members=2).fit(({"u": u, "v": v}, y), validation=(validation, y[:50]), **options)

    x, y = rows(100)
    u, v, other = x[:, :1], x[:, 1:2], x[:50, 2:3]
    same, swapped = fitted({"u": other, "v": other + 1}), fitted({"v": other + 1, "u": other})
    assert cases.same(numbers(swapped), numbers(same))


@pytest.mark.parametrize(
    "change", [lambda x, y: (x[:, 1:], y), lambda x, y: (x.float(), y), lambda x, y: (x, y[:, None])]
)
def test_validation_unlike_the_data(change):
    x, y = rows(100)
    with pytest.raises(ValueError, match="validation"):
        vsd.Ensemble(cases.regressor, members=2).fit((x[:60], y[:60]), validation=change(x[60:], y[60:]), **QUICK)


@pytest.mark.filterwarnings("ignore:.*too few to fit")
def test_whole_numbers_are_no_labels_in_regression():
    x, _ = rows(100)
    y = torch.arange(100) % 9
    options = {**QUICK, "refit": False}
    found = vsd.Ensemble(cases.regressor, members=2).fit((x, y), validation=0.2, **options)
    assert found.stacking.num_rows == 20
    found = vsd.Ensemble(cases.regressor, members=2).fit((x[:60], y[:60]), validation=(x[60:], y[60:]), **options)
    assert found.stacking.num_rows == 40


def test_each_class_is_held_out():
    from pyro_vsd.ensemble.rows import split

    y = torch.cat([torch.zeros(95), torch.ones(3), torch.full((1,), 2.0), torch.full((2,), 3.0)]).long()
    train, held_out = split((torch.arange(101), y), 0.1, seed=0, labelled=True)
    assert sorted(held_out[1].unique().tolist()) == [0, 1, 3]  # the single row of class 2 is trained on
    assert sorted(train[1].unique().tolist()) == [0, 1, 2, 3]
    assert sorted(torch.cat([train[0], held_out[0]]).tolist()) == list(range(101))


# ---- training


@pytest.mark.parametrize(
    "make",
    [
        lambda: cases.regressor(noise="latent"),
        lambda: cases.regressor(prior=vsd.nn.HierarchicalPrior()),
    ],
)
def test_a_plain_member_has_no_noise_of_any_kind(make):
    ensemble = vsd.Ensemble(make, members=2, kl_weight=[1.0, None]).fit(rows(), **ONCE)
    first, second = (ensemble.member_predictions(rows()[0], seed=seed)[1] for seed in (1, 2))
    assert_close(first.mean, second.mean, rtol=0, atol=1e-6)
    assert_close(first.aleatoric, second.aleatoric, rtol=1e-6, atol=0)


def test_fit_is_reproducible_and_leaves_generators_alone(trained):
    state = torch.get_rng_state()
    again = vsd.Ensemble(cases.regressor, members=3, kl_weight=[0.1, 1.0, None], seed=3)
    first = [cases.values(*member) for member in again.fit(rows(), **QUICK).members]
    assert torch.equal(torch.get_rng_state(), state)
    for own, other in zip(first, trained.members, strict=True):
        assert cases.same(own, cases.values(*other))


def test_the_record(trained):
    assert trained.reason is None
    assert [record["refit"] for record in trained.history] == [False] * 2 + [True] * 2
    assert trained.history[1]["losses"][0] < trained.history[0]["losses"][0]
    assert trained.history[-1]["lr"] < trained.history[2]["lr"]
    assert trained.members[0][0].num_data == 400
    assert trained.stacking.num_rows == 60
    assert trained.stacking.fitted


def test_a_plain_member_has_no_noise(trained):
    model, guide = trained.members[2]
    samples = vsd.predict(model, guide, rows()[0], num_samples=3).samples
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(*vsd.predict(*trained.members[0], rows()[0], num_samples=2).samples)


def test_without_refit_the_held_out_rows_stay_out():
    ensemble = vsd.Ensemble(cases.regressor, members=2).fit(rows(), refit=False, **QUICK)
    assert ensemble.members[0][0].num_data == 340
    assert len(ensemble.history) == 2


def test_rows_of_their_own_join_for_the_refit():
    x, y = rows(500)
    ensemble = vsd.Ensemble(cases.regressor, members=2)
    ensemble.fit((x[:400], y[:400]), validation=vsd.datasets.Data(x[400:], y[400:]), **QUICK)
    assert ensemble.members[0][0].num_data == 500
    assert ensemble.stacking.num_rows == 100


def test_few_held_out_rows_mean_equal_weights_and_a_warning():
    with pytest.warns(UserWarning, match="equal"):
        ensemble = vsd.Ensemble(cases.regressor, members=2).fit(rows(200), refit=False, **QUICK)
    assert_close(ensemble.weights, torch.tensor([0.5, 0.5]))
    assert bool((ensemble.stacking.factors != 1).all())


def test_none_held_out():
    ensemble = vsd.Ensemble(cases.regressor, members=2).fit(rows(), **ONCE)
    assert ensemble.weights.tolist() == [0.5, 0.5]
    assert ensemble.stacking.factors.tolist() == [1.0, 1.0]


def test_networks_that_cannot_be_joint_say_so_once():
    with pytest.warns(UserWarning, match="one after the other") as said:
        ensemble = vsd.Ensemble(cases.batch_norm, members=2).fit(rows(), **QUICK)
    assert len(said) == 1
    assert ensemble.reason is not None
    before = ensemble.members[0][0].net[1].running_mean
    assert bool((before != 0).any())
    assert ensemble.predict(rows()[0], num_samples=4).mean.shape == (400,)


def test_schedules_count_the_steps():
    schedule = vsd.infer.linear_warmup(20)
    ensemble = vsd.Ensemble(cases.regressor, members=2, kl_weight=[schedule, 0.0])
    ensemble.fit(rows(), **ONCE)
    assert "schedule" in repr(ensemble)


def test_members_alone_and_together_learn():
    x, y = rows(600)
    ensemble = vsd.Ensemble(cases.regressor, members=3).fit((x[:500], y[:500]), progress=False, epochs=40)
    prediction = ensemble.predict(x[500:], seed=0)
    assert vsd.metrics.rmse(prediction, y[500:]) < 0.8 * float(y.std())
    assert ensemble.stacking.after >= ensemble.stacking.before


def test_a_loss_that_is_not_finite_names_the_member():
    x, y = rows()
    with pytest.raises(ValueError, match="member 0"):
        vsd.Ensemble(cases.regressor, members=2).fit((x, y * float("inf")), **ONCE)


# ---- predictions


def test_a_prediction_is_a_mixture(trained):
    x, y = rows(50, seed=1)
    found = trained.predict(x, num_samples=40, seed=0)
    assert isinstance(found, vsd.RegressionPrediction)
    assert found.num_samples == 40
    shares = trained.shares(40)
    assert shares[2] == 1
    assert sum(shares) == 40
    assert_close(found.aleatoric + found.epistemic, found.variance)
    parts = trained.member_predictions(x, num_samples=shares, seed=0)
    assert_close(found.log_prob(y), trained.stacking.mix(parts).log_prob(y))
    assert_close(found.weights[: shares[0]].sum(), trained.weights[0])
    short = trained.predict(x, num_samples=40, seed=0, keep_samples=False)
    assert short.samples is None
    assert_close(short.variance, found.variance)
    assert vsd.metrics.report(found, y)["crps"] > 0


def test_fewer_samples_than_members(trained):
    with pytest.raises(ValueError, match="num_samples"):
        trained.predict(rows()[0], num_samples=2)


def test_classes():
    x, y = classes(420)
    ensemble = vsd.Ensemble(classifier, members=2, kl_weight=[1.0, None]).fit((x, y), **QUICK)
    found = ensemble.predict(x, num_samples=10, seed=0)
    assert isinstance(found, vsd.ClassificationPrediction)
    assert_close(found.probs.sum(-1), torch.ones(420))
    assert bool((ensemble.stacking.factors != 1).all())
    again = vsd.ClassificationPrediction.from_samples(found.samples, found.weights)
    assert_close(again.probs, found.probs)


# ---- judging


def test_diagnose_says_what_each_contributes(trained):
    x, y = rows(60, seed=2)
    found = trained.diagnose((x, y), num_samples=20)
    assert [m["weight"] for m in found.members] == trained.weights.tolist()
    parts = trained.member_predictions(x, num_samples=20, seed=0)
    assert found.score == pytest.approx(float(trained.stacking.mix(parts).log_prob(y).mean()))
    assert "plain" in str(found)
    assert len(str(found).splitlines()) == 5


# ---- states


def test_state_dict_goes_through_a_file(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "ensemble.pt")
    other = vsd.Ensemble(cases.regressor, members=3, kl_weight=[0.1, 1.0, None], seed=9)
    other.load_state_dict(torch.load(tmp_path / "ensemble.pt", weights_only=True))
    x = rows(20)[0]
    assert_close(other.predict(x, seed=1).samples, trained.predict(x, seed=1).samples)
    assert_close(other.weights, trained.weights)
    with pytest.raises(ValueError, match="state"):
        vsd.Ensemble(cases.regressor, members=2).load_state_dict(trained.state_dict())
    with pytest.raises(ValueError, match="state.*kl_weight"):
        vsd.Ensemble(cases.regressor, members=3, kl_weight=1.0).load_state_dict(trained.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_copies_predict_the_same(trained, copied):
    x = rows(20)[0]
    assert_close(copied(trained).predict(x, seed=1).samples, trained.predict(x, seed=1).samples)


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("epochs", [(1, 40), (40, 1)])
def test_held_out_rows_choose_the_length(epochs, refit):
    held_out = rows(100, seed=1)
    ensemble = vsd.Ensemble(cases.regressor, members=2)
    ensemble.fit(rows(), validation=held_out, refit=refit, **{**QUICK, "epochs": epochs})
    assert ensemble.epochs == 40
    assert len(ensemble.history) == 41 + 40 * refit
    if not refit:  # the members are those of the better length
        mixed = ensemble.stacking.mix(ensemble.member_predictions(held_out[0], num_samples=100, seed=0))
        assert float(mixed.log_prob(held_out[1]).mean()) == pytest.approx(ensemble.stacking.after)


@pytest.mark.parametrize(("number", "lengths"), [(400, 2), (300, 1)])
def test_few_held_out_rows_do_not_choose(number, lengths, monkeypatch):
    monkeypatch.setattr("pyro_vsd.training.lengths._STEPS", 4)
    monkeypatch.setattr("pyro_vsd.training.lengths._LONG", 8)
    ensemble = vsd.Ensemble(cases.regressor, members=1).fit(rows(number), progress=False)
    assert len(ensemble.history) == (1 if lengths == 1 else 3) + ensemble.epochs


@pytest.mark.parametrize("epochs", [0, (3, 0), (1, 2.5), (1, 2), ()])
def test_bad_lengths(epochs):
    with pytest.raises(ValueError, match="epochs"):
        vsd.Ensemble(cases.regressor, members=1).fit(rows(), validation=None, epochs=epochs)


def numbers(ensemble):
    values = [cases.values(*member) for member in ensemble.members]
    return {f"{m}.{k}": v for m, own in enumerate(values) for k, v in own.items()} | {
        "weights": ensemble.weights,
        "factors": ensemble.stacking.factors,
    }


class StopError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:the members are trained one after the other")
@pytest.mark.parametrize(
    ("make", "stop", "options"),
    [
        (cases.regressor, 50, {}),
        (cases.batch_norm, 27, {}),
        (cases.regressor, 30, {"epochs": (1, 2)}),
        (cases.regressor, 60, {"epochs": (1, 2)}),
        (cases.regressor, 45, {"epochs": (2, 1), "refit": False}),
    ],
    ids=["joint", "in turn", "second length", "refit of several lengths", "no refit"],
)
def test_a_killed_run_is_continued_bit_for_bit(make, stop, options, tmp_path, monkeypatch):
    """Killed in the first training run and in later ones; fitted again, the finished run stays as it is."""
    from pyro_vsd.ensemble.training import Run

    # two epochs of 17 steps, and two of 20 on all rows
    options = {**QUICK, **options}
    whole = numbers(vsd.Ensemble(make, members=2).fit(rows(), **options))
    path, step, count = Checkpoint(tmp_path / "run", every_steps=1), Run._step, iter(range(1000))

    def dying(self, args, kwargs):
        if next(count) == stop:
            raise StopError
        step(self, args, kwargs)

    monkeypatch.setattr(Run, "_step", dying)
    with pytest.raises(StopError):
        vsd.Ensemble(make, members=2).fit(rows(), checkpoint=path, **options)
    monkeypatch.setattr(Run, "_step", step)
    resumed = vsd.Ensemble(make, members=2).fit(rows(), checkpoint=path, **options)
    assert cases.same(numbers(resumed), whole)
    assert len(resumed.history) == sum(np.atleast_1d(options["epochs"])) + options.get("refit", True) * resumed.epochs
    finished = vsd.Ensemble(make, members=2).fit(rows(), checkpoint=path, **options)
    assert cases.same(numbers(finished), whole)


def test_a_schedule_is_known_by_its_values(tmp_path):
    path = tmp_path / "run"

    def fit(slope):
        return vsd.Ensemble(cases.regressor, 2, [lambda step: slope * step, 1.0]).fit(rows(), checkpoint=path, **ONCE)

    first = fit(0.1)
    assert cases.same(numbers(fit(0.1)), numbers(first))
    with pytest.raises(ValueError, match=r"checkpoint.*kl_weight"):
        fit(0.2)


def test_a_checkpoint_of_a_different_run(tmp_path):
    path = tmp_path / "run"
    vsd.Ensemble(cases.regressor, members=2).fit(rows(), checkpoint=path, **ONCE)
    with pytest.raises(ValueError, match="checkpoint.*seed"):
        vsd.Ensemble(cases.regressor, members=2, seed=1).fit(rows(), checkpoint=path, **ONCE)
    vsd.save_checkpoint(path, model=cases.regressor(), guide=vsd.VSDGuide(cases.regressor()))
    with pytest.raises(ValueError, match="checkpoint"):
        vsd.Ensemble(cases.regressor, members=2).fit(rows(), checkpoint=path, **QUICK)


@pytest.mark.parametrize("validation", [0.15, (1, 2)])
def test_a_checkpoint_is_of_its_data(validation, tmp_path):
    options = {**QUICK, "checkpoint": tmp_path / "run"}
    if validation != 0.15:
        options["validation"] = rows(60, seed=1)
    vsd.Ensemble(cases.regressor, members=2).fit(rows(), **options)
    changed = {**options, "validation": rows(60, seed=2)} if validation != 0.15 else options
    with pytest.raises(ValueError, match="checkpoint.*data"):
        vsd.Ensemble(cases.regressor, members=2).fit(rows(seed=int(validation == 0.15)), **changed)


@contextlib.contextmanager
def pressed_after(steps, monkeypatch):
    """Ctrl-C after so many steps."""
    from pyro_vsd.ensemble.training import Run

    step, count = Run._step, iter(range(10_000))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it

    def pressing(self, args, kwargs):
        step(self, args, kwargs)
        if next(count) == steps:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "_step", pressing)
    yield
    monkeypatch.setattr(Run, "_step", step)
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(("epochs", "steps"), [(2, 40), ([2, 1], 40), ([2, 1], 60)], ids=["refit", "second", "last"])
def test_ctrl_c_keeps_the_best_ensemble_so_far(epochs, steps, monkeypatch):
    """Not its weights with members that have only begun to be trained anew."""
    whole = vsd.Ensemble(cases.regressor, members=2).fit(rows(), refit=False, **{**QUICK, "epochs": 2})
    with pressed_after(steps, monkeypatch):
        ensemble = vsd.Ensemble(cases.regressor, members=2).fit(rows(), **{**QUICK, "epochs": epochs})
    assert ensemble.history.stopped == "interrupt"
    assert ensemble.epochs == 2
    x = rows(20)[0]
    assert_close(ensemble.predict(x, seed=0).samples, whole.predict(x, seed=0).samples)
    assert_close(ensemble.weights, whole.weights)


def test_ctrl_c_saves_and_returns(tmp_path, monkeypatch):
    path = tmp_path / "run"
    ensemble = vsd.Ensemble(cases.regressor, members=2).fit(rows(), **ONCE)
    with pressed_after(5, monkeypatch):
        ensemble.fit(rows(), checkpoint=path, **ONCE)
    assert ensemble.history.stopped == "interrupt"
    assert ensemble.epochs is None
    assert path.exists()
    resumed = vsd.Ensemble(cases.regressor, members=2).fit(rows(), checkpoint=path, **ONCE)
    assert cases.same(numbers(resumed), numbers(vsd.Ensemble(cases.regressor, members=2).fit(rows(), **ONCE)))


def test_a_network_of_two_inputs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2 * cases.D, 1)

        def forward(self, a, b):
            return self.layer(torch.cat([a, b], -1))

    x, y = rows()
    ensemble = vsd.Ensemble(lambda: vsd.nn.Regressor(vsd.nn.bayesianize(Both()), num_data=1), members=2)
    ensemble.fit(((x, x), y), **ONCE)
    assert ensemble.predict((x, x), num_samples=4).mean.shape == (400,)


@pytest.mark.parametrize("change", [lambda state: None, lambda state: {}, lambda state: {"members": state["members"]}])
def test_a_state_of_something_else(change):
    ensemble = vsd.Ensemble(cases.regressor, members=2)
    with pytest.raises(ValueError, match="state"):
        ensemble.load_state_dict(change(ensemble.state_dict()))
