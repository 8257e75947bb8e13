"""Whatever gives batches: fit, predict, diagnose and VSDModule take the same, and give the same."""

import warnings
from collections import UserDict

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.training.data import Batches
from tests.training import cases

N, D = cases.N, cases.D


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 2)

    def forward(self, x, gate):
        return self.linear(x * gate)


class Rows(Dataset):
    """A map-style data set of rows."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.row(i)


def tensors():
    x, y = cases.classes().x, cases.classes().y
    return x, (x > 0).to(x), y


def parts(keys=None, kind=dict):
    """Batches of ten in order, as a loader gives them."""
    x, gate, y = tensors()
    cut = [slice(0, 8), slice(8, 16), slice(16, 24)]
    return [t if keys is None else kind(zip(keys, t, strict=True)) for t in ((x[c], gate[c], y[c]) for c in cut)]


KEYS = ("x", "gate", "labels")
FORMS = {
    "tensors": tensors,
    "TensorDataset": lambda: TensorDataset(*tensors()),
    "Dataset": lambda: Rows(lambda i: tuple(t[i] for t in tensors())),
    "Dataset of dicts": lambda: Rows(lambda i: {k: t[i] for k, t in zip(KEYS, tensors(), strict=True)}),
    "dict": lambda: dict(zip(KEYS, tensors(), strict=True)),
}
LOADERS = {
    "tuples": lambda: parts(),
    "dicts": lambda: parts(KEYS),
    "mappings": lambda: parts(KEYS, UserDict),
    "DataLoader": lambda: DataLoader(FORMS["Dataset of dicts"](), batch_size=8),
}


def gated(seed=0):
    torch.manual_seed(seed)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(Gated()), num_data=N)
    return model, vsd.VSDGuide(model)


def trained(data, **options):
    model, guide = gated()
    history = vsd.fit(model, guide, data, 2, validation=data, seed=0, **options)
    return cases.values(model, guide), history


@pytest.mark.parametrize("form", FORMS)
def test_fit(form):
    found, history = trained(FORMS[form](), batch_size=8)
    expected, other = trained(tensors(), batch_size=8)
    assert cases.same(found, expected)
    assert history[-1]["validation"] == pytest.approx(other[-1]["validation"])


@pytest.mark.parametrize("form", LOADERS)
def test_fit_of_batches(form):
    found, history = trained(LOADERS[form]())
    # a DataLoader draws a number for its workers
    expected, other = trained(DataLoader(TensorDataset(*tensors()), batch_size=8) if form == "DataLoader" else parts())
    assert cases.same(found, expected)
    assert history[-1]["validation"] == pytest.approx(other[-1]["validation"])


def test_the_key_of_the_target():
    data = dict(zip(("x", "gate", "answer"), tensors(), strict=True))
    assert cases.same(trained(data, target="answer")[0], trained(tensors())[0])
    with pytest.raises(ValueError, match=r"\btarget\b"):
        trained(data)


def test_a_dict_of_x_is_the_input():
    """Whatever the network calls it."""
    data, models = cases.classes(), []
    for form in ((data.x, data.y), {"x": data.x, "y": data.y}):
        torch.manual_seed(0)
        model = cases.classifier()
        models.append((model, vsd.VSDGuide(model)))
        vsd.fit(*models[-1], form, 1, seed=0)
    assert cases.same(*(cases.values(*pair) for pair in models))


@pytest.mark.parametrize("form", [*FORMS, *LOADERS])
def test_predict(form):
    """All of them leave the targets out; a row's prediction does not depend on its batch."""
    model, guide = gated()
    x, gate, _ = tensors()
    expected = vsd.predict(model, guide, x, gate, num_samples=5, seed=0)
    data = {**FORMS, **LOADERS}[form]()
    if form == "tensors":
        found = vsd.predict(model, guide, data[:2], num_samples=5, seed=0)
    elif form == "dict":
        found = vsd.predict(model, guide, {k: v for k, v in data.items() if k != "labels"}, num_samples=5, seed=0)
    else:
        data = DataLoader(data, batch_size=None) if isinstance(data, list) else data
        found = vsd.predict(model, guide, data, num_samples=5, seed=0)
    torch.testing.assert_close(found.probs, expected.probs)
    torch.testing.assert_close(found.samples, expected.samples)


def test_predictions_of_a_loader_without_targets():
    model, (x, _) = cases.regressor(), (cases.data().x, None)
    guide = vsd.VSDGuide(model)
    expected = vsd.predict(model, guide, x, num_samples=5, seed=0).mean
    for data in (TensorDataset(x), Rows(lambda i: x[i])):
        loader = DataLoader(data, batch_size=7)
        torch.testing.assert_close(vsd.predict(model, guide, loader, num_samples=5, seed=0).mean, expected)
    by_row = vsd.predict(model, guide, loader, num_samples=5, seed=0, coherent=False, keep_samples=True)
    assert not torch.equal(by_row.samples[:, 0], by_row.samples[:, 7])  # each batch has noise of its own
    with pytest.raises(ValueError, match=r"\binputs\b"):
        vsd.predict(model, guide, DataLoader(TensorDataset(x[:0]), batch_size=7))


def by_name(x, gate, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([D, 1]).to_event(2))
    with pyro.plate("data", N, subsample=torch.arange(len(x))):
        return pyro.sample("y", dist.Normal(((x * gate) @ w).squeeze(-1), 1.0), obs=y)


def test_hand_written_models_get_their_own_names():
    data = dict(zip(("x", "gate", "y"), (*tensors()[:2], cases.data().y), strict=True))
    guide = vsd.VSDGuide(by_name)
    history = vsd.fit(by_name, guide, data, 1, validation=data, seed=0)
    assert "rmse" in history[-1]["validation"]
    inputs = {k: v for k, v in data.items() if k != "y"}
    found = vsd.predict(by_name, guide, inputs, num_samples=4, seed=0)
    expected = vsd.predict(by_name, guide, *inputs.values(), num_samples=4, seed=0)
    torch.testing.assert_close(found.mean, expected.mean)


@pytest.mark.parametrize("form", [*FORMS, *LOADERS])
def test_diagnose(form):
    model, guide = gated()
    data = {**FORMS, **LOADERS}[form]()
    options = {"num_samples": 4, "batch_size": 8, "kl_weight": 0.5}
    report = vsd.diagnose(model, guide, data, data, **options)
    assert "error_rate" in report.prediction
    assert report.objective["kl_weight"] == 0.5


@pytest.mark.parametrize(
    "data",
    [torch.ones(3), "data", iter([]), type("Endless", (IterableDataset,), {"__iter__": lambda self: iter([])})()],
)
def test_what_has_no_batches(data):
    with pytest.raises(TypeError, match=r"\bdata\b"):
        Batches(data)


def test_arrays_are_turned_into_tensors_by_their_owner():
    with pytest.raises(ValueError, match=r"torch\.as_tensor"):
        Batches((np.ones((3, 2)), np.ones(3)))


# ---- options of fit


def test_rate_and_weight():
    data = cases.classes()

    def run(**options):
        torch.manual_seed(0)
        model = cases.classifier()
        guide = vsd.VSDGuide(model)
        return vsd.fit(model, guide, data, 2, seed=0, **options), cases.values(model, guide)

    history, found = run(lr=0.03, kl_weight=3.0)
    assert history[-1]["kl_weight"] == 3.0
    expected = run(
        optimizer=lambda g: torch.optim.Adam(g, lr=0.03, fused=True), elbo=vsd.VSD_ELBO(kl_weight=3.0),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, len(history)),
    )[1]  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    assert run(lr=0.03, optimizer=torch.optim.SGD)[0][-1]["lr"] == 0.03
    assert run(kl_weight=vsd.infer.linear_warmup(10))[0][-1]["kl_weight"] < 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": 0.1, "optimizer": pyro.optim.Adam({"lr": 0.1})}, "lr"),
        ({"kl_weight": 1.0, "elbo": vsd.VSD_ELBO()}, "kl_weight"),
        ({"sample_weight": torch.ones(3)}, "sample_weight"),
    ],
)
def test_options_that_do_not_go_together(options, name):
    model = cases.classifier()
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        vsd.fit(model, vsd.VSDGuide(model), cases.classes(), 1, **options)


def test_weights_of_rows():
    """Rows of weight 0 do not matter, in tensors as in a loader's dicts; a weight is twice the row."""
    data = cases.classes()
    weight = (torch.arange(N) < 12).double() * 2
    wrong = torch.where(weight > 0, data.y, 1 - data.y)

    def run(form, **options):
        torch.manual_seed(0)
        model = cases.classifier()
        guide = vsd.VSDGuide(model)
        vsd.fit(model, guide, form, 2, seed=0, batch_size=8, **options)
        return cases.values(model, guide)

    found = run((data.x, data.y), sample_weight=weight)
    assert cases.same(found, run((data.x, wrong), sample_weight=weight))
    assert not cases.same(found, run((data.x, data.y)))
    named = {"x": data.x, "y": data.y, "sample_weight": weight}
    assert cases.same(found, run(named))
    with pytest.raises(ValueError, match=r"\bsample_weight\b"):
        vsd.fit(by_name, vsd.VSDGuide(by_name), named, 1, sample_weight=weight)


# ---- a short last batch


def test_a_short_last_batch():
    data = cases.data(25)

    def run(loader):
        model = cases.regressor(25)
        vsd.fit(model, vsd.VSDGuide(model), loader, 2)

    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=8, shuffle=True)  # 8, 8, 8, 1
    with pytest.warns(UserWarning, match=r"1 row\b.*drop_last=True") as caught:
        run(loader)
    assert len(caught) == 1
    run(DataLoader(TensorDataset(data.x, data.y), batch_size=8, drop_last=True))
    run(DataLoader(TensorDataset(data.x, data.y), batch_size=9))  # 9, 9, 7
    run(TensorDataset(data.x, data.y))


# ---- the scale of the likelihood


def plated(size):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([D, 1]).to_event(2))
        with pyro.plate("data", size or len(x), subsample_size=len(x)):
            return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 1.0), obs=y)

    return model


def test_a_plate_of_the_size_of_a_batch():
    data = cases.data()
    with pytest.warns(UserWarning, match=r"batch of 8 rows has scale 1 .*\b24\b.*3 times") as caught:
        vsd.fit(plated(None), vsd.VSDGuide(plated(None)), data, 2, batch_size=8)
    assert len(caught) == 1
    vsd.fit(plated(N), vsd.VSDGuide(plated(N)), data, 1, batch_size=8)
    vsd.fit(plated(None), vsd.VSDGuide(plated(None)), data, 1, batch_size=N)


@pytest.mark.parametrize("num_data", [N, 8])
def test_the_scale_of_a_loader(num_data):
    data, model = cases.data(), cases.regressor(num_data)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vsd.fit(model, vsd.VSDGuide(model), loader, 1)
    assert any("num_data" in str(w.message) for w in caught) == (num_data != N)


def test_a_sampler_takes_a_part_of_its_data():
    data, model = cases.data(), cases.regressor(12)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=6, sampler=SubsetRandomSampler(range(12)))
    vsd.fit(model, vsd.VSDGuide(model), loader, 1)


def test_a_loss_per_row_is_no_mistake():
    """Model and guide scaled alike: likelihood and KL keep their ratio."""
    scaled = pyro.poutine.scale(plated(N), 1 / N)
    guide = vsd.VSDGuide(plated(N)).setup(*(t[:8] for t in (cases.data().x, cases.data().y)))
    elbo = vsd.VSD_ELBO()
    elbo.differentiable_loss(scaled, pyro.poutine.scale(guide, 1 / N), cases.data().x[:8], cases.data().y[:8])
    assert elbo.likelihood_scale == pytest.approx(3.0)


# ---- frozen layers


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_statistics_do_not_move(frozen):
    backbone = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.ReLU())
    for parameter in backbone.parameters():
        parameter.requires_grad_(not frozen)
    net = vsd.nn.bayesianize(nn.Sequential(backbone, nn.Linear(5, 1)), include=["1"])
    model, data = vsd.nn.Regressor(net, N), cases.data()
    before = {k: v.clone() for k, v in net.network[0].state_dict().items()}
    vsd.fit(model, vsd.VSDGuide(model), data, 2)
    moved = {k for k, v in net.network[0].state_dict().items() if not torch.equal(v, before[k])}
    assert ({"1.running_mean", "1.running_var"} <= moved) != frozen
    assert not frozen or not moved
