"""Who owns a parameter: copies, pickles, two guides and two models in one process, Pyro's store on and off."""

import copy
import math
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models

MODELS = {
    "regressor": models.regressor,
    "hand_written": models.HandWritten,
    "latent": lambda: models.regressor(noise="latent"),
    "hierarchical": lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()),
    "learned": lambda: models.regressor(noise="learned"),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
local = pytest.mark.parametrize("local", [False, True], ids=["store", "module_local"])


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def together(model, guide):
    return copy.deepcopy((model, guide))


# ---- copies


@every_model
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copying_leaves_the_live_guide_as_it_was(make, duplicate, trained):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    if trained:
        models.train(model, guide, x, y)
    before, keys = models.snapshot(guide), set(guide.__dict__)
    other = duplicate(guide)
    assert guide.model is model
    assert set(guide.__dict__) == keys
    assert not models.moved(before, guide)
    assert not models.moved(before, other)
    assert other.sites == guide.sites
    models.train(model, guide, x, y)
    assert models.moved(before, guide) == set(before)
    assert not models.moved(before, other)


@every_model
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_train_on_their_own(make, duplicate):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    models.train(model, guide, x, y)
    other = duplicate(guide)
    before = models.snapshot(guide)
    models.train(model, other, x, y)
    assert not models.moved(before, guide)
    assert models.moved(before, other) == set(before)
    assert all(p.grad is None or not p.grad.any() for p in guide.parameters())


@every_model
def test_a_copied_guide_predicts_the_same(make):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    models.train(model, guide, x, y)
    first = vsd.predict(model, guide, x, num_samples=5, seed=0).samples
    for other in (copy.deepcopy(guide), pickled(guide)):
        assert torch.equal(vsd.predict(model, other, x, num_samples=5, seed=0).samples, first)


def test_model_and_guide_copied_together_belong_together():
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    model_2, guide_2 = together(model, guide)
    assert guide_2.model is model_2
    before, before_2 = models.snapshot(model), models.snapshot(model_2)
    models.train(model_2, guide_2, x, y)
    assert not models.moved(before, model)
    assert models.moved(before_2, model_2) == {"net.0.bias", "net.2.bias"}


def test_a_guide_before_its_set_up_can_be_copied():
    model, (x, y) = models.HandWritten(), models.data()
    other = copy.deepcopy(vsd.VSDGuide(model))
    assert all(map(math.isfinite, models.train(other.model, other, x, y)))


# ---- two of them


def both_move(pairs, x, y, step):
    """Trains several (model, guide) in turn; every parameter of each moves, by its own steps alone."""
    for model, guide in pairs:
        own = [models.snapshot(m) for pair in pairs for m in pair]
        step(model, guide)
        for (other_model, other_guide), (old_model, old_guide) in zip(
            pairs, zip(own[::2], own[1::2], strict=True), strict=True
        ):
            mine = other_guide is guide
            assert models.moved(old_guide, other_guide) == (set(old_guide) if mine else set())
            assert models.moved(old_model, other_model) == (set(old_model) if other_model is model else set())


@every_model
def test_two_guides_of_one_model(make):
    model, (x, y) = make(), models.data()
    guides = [vsd.VSDGuide(model).setup(x, y) for _ in range(2)]
    svis = {id(g): SVI(model, g, pyro.optim.Adam({"lr": 0.01}), vsd.VSD_ELBO()) for g in guides}
    both_move([(model, g) for g in guides * 2], x, y, lambda m, g: svis[id(g)].step(x, y))


@every_model
def test_two_models_of_the_same_names(make):
    x, y = models.data()
    pairs = []
    for _ in range(2):
        model = make()
        pairs.append((model, vsd.VSDGuide(model).setup(x, y)))
    svis = {id(g): SVI(m, g, pyro.optim.Adam({"lr": 0.01}), vsd.VSD_ELBO()) for m, g in pairs}
    both_move(pairs * 2, x, y, lambda m, g: svis[id(g)].step(x, y))


@every_model
def test_gradients_stay_with_their_model(make):
    """A step of one model is the same whether or not a second one trains beside it."""
    x, y = models.data()

    def run(beside):
        pyro.clear_param_store()
        torch.manual_seed(0)
        first, second = make(), make()
        guide, other = vsd.VSDGuide(first).setup(x, y), vsd.VSDGuide(second).setup(x, y)
        svi = SVI(first, guide, pyro.optim.Adam({"lr": 0.01}), vsd.VSD_ELBO())
        svi_2 = SVI(second, other, pyro.optim.Adam({"lr": 0.01}), vsd.VSD_ELBO())
        for step in range(3):
            torch.manual_seed(step)
            svi.step(x, y)
            if beside:
                svi_2.step(x, y)
        return {**models.snapshot(first), **models.snapshot(guide)}

    alone, beside = run(False), run(True)
    for name, value in alone.items():
        assert_close(value, beside[name], rtol=0, atol=0)


@local
def test_two_models_in_module_form(local):
    x, y = models.data()
    pyro.settings.set(module_local_params=local)
    pairs = []
    for _ in range(2):
        model = models.regressor(noise="learned")
        pairs.append((model, vsd.VSDGuide(model)))
    losses = {id(g): vsd.VSD_ELBO()(m, g) for m, g in pairs}
    optimizers = {key: torch.optim.Adam(loss.parameters(), lr=0.01) for key, loss in losses.items()}

    def step(model, guide):
        optimizers[id(guide)].zero_grad()
        losses[id(guide)](x, y).backward()
        optimizers[id(guide)].step()

    both_move(pairs * 2, x, y, step)


@local
@every_model
def test_the_module_form_trains_every_parameter(make, local):
    pyro.settings.set(module_local_params=local)
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    loss = vsd.VSD_ELBO()(model, guide)
    before = models.snapshot(loss)
    assert set(before) == {f"model.{n}" for n, _ in model.named_parameters()} | {
        f"guide.{n}" for n, _ in guide.named_parameters()
    }
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=0.01, vectors=0.05))
    for _ in range(2):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    assert models.moved(before, loss) == set(before)


@local
def test_saving_works_with_either_setting(local):
    pyro.settings.set(module_local_params=local)
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    loss = vsd.VSD_ELBO()(model, guide)
    loss(x, y).backward()
    again = vsd.VSDGuide(model)
    again.load_state_dict(guide.state_dict())
    first, second = (vsd.predict(model, g, x, num_samples=5, seed=0).samples for g in (guide, again))
    assert torch.equal(first, second)


def test_training_goes_on_after_the_store_is_cleared():
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    pyro.clear_param_store()
    before, biases = models.snapshot(guide), models.snapshot(model)
    models.train(model, guide, x, y)
    assert models.moved(before, guide) == set(before)
    assert models.moved(biases, model) == set(biases)


def test_names_in_the_store():
    model, (x, y) = models.regressor(), models.data()
    models.train(model, vsd.VSDGuide(model), x, y, steps=1)
    first = set(pyro.get_param_store())
    assert {"VSDGuide.theta.net.0.weight", "VSDGuide.log_alpha.net.2.weight", "net.0.bias"} <= first
    models.train(model, vsd.VSDGuide(model), x, y, steps=1)
    assert "VSDGuide.theta.net.0.weight__1" in set(pyro.get_param_store())
    assert "net.0.bias__1" not in set(pyro.get_param_store())


def test_parameters_of_a_function_model_are_reported():
    """A function that calls a module: a second module of the same names would not be trained, which is said."""
    x, y = models.data()

    def make():
        layer = pyro.nn.PyroModule[torch.nn.Linear](3, 1)
        layer.weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

        def model(x, y):
            mean = layer(x).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

        return model

    first, second = make(), make()
    models.train(first, vsd.VSDGuide(first), x, y)
    with pytest.warns(UserWarning, match=r"\bbias\b"):
        models.train(second, vsd.VSDGuide(second), x, y, steps=1)


def test_constrained_parameters_of_two_models():
    """Pyro itself ties ``PyroParam`` s of equal names through its store."""

    class Noisy(PyroModule):
        def __init__(self):
            super().__init__()
            self.sigma = PyroParam(torch.tensor(0.5), dist.constraints.positive)

        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), self.sigma), obs=y)

    x, y = models.data()
    pyro.settings.set(module_local_params=True)
    pairs = []
    for _ in range(2):
        model = Noisy()
        pairs.append((model, vsd.VSDGuide(model).setup(x, y)))
    losses = {id(g): vsd.VSD_ELBO()(m, g) for m, g in pairs}

    def step(model, guide):
        optimizer = torch.optim.SGD(losses[id(guide)].parameters(), lr=1e-3)
        optimizer.zero_grad()
        losses[id(guide)](x, y).backward()
        optimizer.step()

    both_move(pairs * 2, x, y, step)


# ---- threads elsewhere: a store that several guides share, parameters that come late, copies that spoil the original


# Users clear the store between runs (pyro#2912) or switch sharing off (pyro#3149).
@local
@pytest.mark.parametrize("make", [models.regressor, models.HandWritten], ids=["listed", "hand_written"])
def test_two_guides_of_one_model_in_module_form(make, local):
    pyro.settings.set(module_local_params=local)
    model, (x, y) = make(), models.data()
    guides = [vsd.VSDGuide(model).setup(x, y) for _ in range(2)]
    losses = [vsd.VSD_ELBO()(model, guide) for guide in guides]
    optimizers = [torch.optim.Adam(loss.parameters(), lr=0.01) for loss in losses]
    for turn in (0, 1, 0):
        before = [models.snapshot(guide) for guide in guides]
        optimizers[turn].zero_grad()
        losses[turn](x, y).backward()
        optimizers[turn].step()
        assert models.moved(before[turn], guides[turn]) == set(before[turn])
        assert models.moved(before[1 - turn], guides[1 - turn]) == set()


def test_a_second_guide_under_svi_starts_where_it_was_made():
    """Without ``pyro.clear_param_store()`` between the two."""
    model, (x, y) = models.regressor(), models.data()
    models.train(model, vsd.VSDGuide(model), x, y)
    guide = vsd.VSDGuide(model, num_reflections=0)
    before = models.snapshot(guide)
    models.train(model, guide, x, y, steps=1, lr=1e-3)
    after = models.snapshot(guide)
    for name, value in before.items():  # one step of Adam moves each number by its rate
        if value.numel():
            assert 0 < float((after[name] - value).abs().max()) < 2e-3, name


# pyro#2470: there two ways of reading a parameter give its constrained and its unconstrained value.
def test_the_store_and_the_guide_give_the_same_numbers():
    model, (x, y) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    own = dict(guide.named_parameters())
    stored = {name: pyro.param(f"VSDGuide.{name}") for name in own}
    assert all(torch.equal(own[name], value) for name, value in stored.items())


# scvi-tools#1845: there an optimiser made too early trains nothing.
def test_an_optimiser_made_before_the_first_step_trains_everything():
    model, (x, y) = models.regressor(noise="latent"), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    before = models.snapshot(loss)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    loss(x, y).backward()
    optimizer.step()
    assert set(dict(loss.named_parameters())) == set(before)
    assert models.moved(before, loss) == set(before)


def mixed():
    """Norms, and a latent scale beside the weights."""
    return vsd.nn.Regressor(
        vsd.nn.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1))),
        num_data=models.N,
        noise="latent",
    )


# pyro#3430: there serialising a guide spoils the original. Laplace#159: hooks cannot be pickled.
@pytest.mark.parametrize("trained", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [models.regressor, models.HandWritten, mixed])
def test_a_copied_pair_predicts_the_same_and_the_original_trains_on(make, duplicate, trained):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    if trained:
        models.train(model, guide, x, y)
    other_model, other = duplicate((model, guide))
    assert guide.model is model
    pairs = (model, guide), (other_model, other)
    first, second = (vsd.predict(m, g, x, num_samples=3, seed=0).samples for m, g in pairs)
    assert torch.equal(first, second)
    before, copied = models.snapshot(guide), models.snapshot(other)
    models.train(model, guide, x, y)
    assert models.moved(before, guide) == set(before)
    assert models.moved(copied, other) == set()


def test_spawned_workers():
    """One worker, which starts from nothing, predicts as this process does, before and after training here."""
    model, (x, y) = models.regressor(prior=vsd.nn.HierarchicalPrior()), models.data()
    guide = vsd.VSDGuide(model)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(2):
            before = models.snapshot(guide)
            there = pool.submit(vsd.predict, model, guide, x, num_samples=3, seed=0).result()
            assert_close(there.samples, vsd.predict(model, guide, x, num_samples=3, seed=0).samples)
            models.train(model, guide, x, y)
            assert models.moved(before, guide) == set(before)
