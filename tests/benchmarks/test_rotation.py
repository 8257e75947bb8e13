"""The study of what the rotation buys: its searches, its networks, its tables."""

import inspect
import json

import pytest
import torch

import pyro_vsd as vsd
from benchmarks.paper import options_tables, rotation_tables, runner, store, uci
from benchmarks.paper.noise_study import compared, reach
from benchmarks.paper.reflections import best_reflections, family_objective, reflections_onto
from benchmarks.paper.rotation_images import noise_of, set_noise
from benchmarks.paper.rotation_uci import Studied
from benchmarks.paper.settings.options import VARIANTS
from pyro_vsd.datasets import Data
from pyro_vsd.diagnosis import best_covariance, best_droprates, noise_objective
from pyro_vsd.distributions import HouseholderNormal
from tests import dense

K = 6


def curved(K=K, rank=2, *batch):
    """Curvatures with a few strong directions."""
    B = torch.randn(*batch, K, rank)
    return 20 * B @ B.mT + torch.eye(K)


# ---- the search


@pytest.mark.parametrize("T", [0, 1, 3])
def test_the_familys_objective_is_that_of_its_covariance(T):
    log_alpha, vectors, A = torch.randn(K), torch.randn(T, K), curved()
    covariance = HouseholderNormal(1.0, log_alpha.exp(), vectors).covariance_matrix
    found = family_objective(log_alpha, vectors, A, 0.7)
    assert float(found) == pytest.approx(noise_objective(covariance, A, 0.7), rel=1e-9)


@pytest.mark.parametrize("T", [1, 2, 5])
def test_reflections_take_unit_vectors_to_the_directions(T):
    directions = torch.linalg.qr(torch.randn(4, K, K)).Q[..., :T]
    U = torch.stack([dense.reflections(vectors) for vectors in reflections_onto(directions)])
    overlap = (U.mT @ directions).abs()  # (4, K, T): each direction is one column of U, up to its sign
    torch.testing.assert_close(overlap.amax(-2), torch.ones(4, T))


def test_a_direction_along_a_coordinate_needs_no_reflection():
    U = dense.reflections(reflections_onto(torch.eye(K)[:, 2:3]))
    torch.testing.assert_close(U, torch.eye(K))


def test_without_reflections_the_best_droprates_are_found():
    A = curved()
    log_alpha, vectors = best_reflections(A, 0.5, 0)
    torch.testing.assert_close(log_alpha.exp(), best_droprates(A, 0.5))
    assert vectors.shape == (0, K)


def test_enough_reflections_reach_the_best_covariance():
    A = curved(rank=2)
    noise = best_reflections(A, 1.0, K - 1, polish=300)
    assert float(family_objective(*noise, A, 1.0)) == pytest.approx(
        noise_objective(best_covariance(A, 1.0), A, 1.0), abs=1e-2
    )


def test_the_search_beats_independent_noise_and_is_polished():
    A = curved(20, 3)
    independent = noise_objective(best_droprates(A, 1.0), A, 1.0)
    start, polished = (float(family_objective(*best_reflections(A, 1.0, 3, polish=n), A, 1.0)) for n in (0, 50))
    assert polished <= start < independent - 1


@pytest.mark.parametrize("T", [K - 1, K, K + 3])
def test_more_reflections_than_units_are_none(T):
    A = curved(K, 2, 2)
    log_alpha, vectors = best_reflections(A, 1.0, T)
    assert vectors.shape == (2, T, K)
    enough = family_objective(*best_reflections(A, 1.0, K - 1), A, 1.0)
    torch.testing.assert_close(family_objective(log_alpha, vectors, A, 1.0), enough, rtol=1e-3, atol=1e-3)


def test_a_batch_is_searched_as_its_matrices_are():
    A = curved(K, 2, 3)
    together = family_objective(*best_reflections(A, 2.0, 2), A, 2.0)
    alone = torch.stack([family_objective(*best_reflections(one, 2.0, 2), one, 2.0) for one in A])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_reach_never_falls_with_more_reflections():
    A = curved(12, 3, 2)
    found = reach(A, 1.0)
    independent = [noise_objective(best_droprates(one, 1.0), one, 1.0) for one in A]
    values = torch.tensor([independent, *found.values()])
    assert list(found) == ["reach1", "reach2", "reach5", "reach10"]
    assert bool((values.diff(dim=0) <= 1e-9).all())
    best = torch.tensor([noise_objective(best_covariance(one, 1.0), one, 1.0) for one in A])
    assert bool((values[-1] >= best - 1e-6).all())


def test_the_best_independent_noise_has_no_share_of_the_gain():
    A = curved()
    found = compared(A, best_droprates(A, 1.0).log(), torch.zeros(0, K), 1.0)
    assert found["trained"] == pytest.approx(found["independent"]) == found["sized"]
    assert found["best"] < found["independent"]


# ---- the networks


def studied(P=2, C=1, **options):
    numbers = {"kl_weight": torch.ones(P, C), "per_weight": torch.zeros(P, C), "init_alpha": torch.full((P, C), 0.2)}
    return Studied((3, 5, 1), numbers, torch.Generator().manual_seed(0), **options)


def test_mirrored_noise_has_the_mean_one_in_each_pair():
    net = studied(draws=2, mirrored=True)
    net.loss(torch.randn(2, 7, 3), torch.randn(2, 7), 7, torch.Generator().manual_seed(1))
    for noise in net.seen.values():
        first, second = noise.split(7, 2)
        torch.testing.assert_close(first + second, torch.full_like(first, 2.0))
    net(torch.randn(2, 7, 3), torch.Generator(), samples=2)  # predictions are not mirrored
    first, second = net.seen[0].split(7, 2)
    assert float((first + second - 2).detach().abs().max()) > 0.1


def test_two_draws_average_the_loss_of_each():
    net = studied(T=0, draws=2)
    for i in (0, 1):
        getattr(net, f"log_alpha{i}").data.fill_(-60.0)
    x, y = torch.randn(2, 7, 3), torch.randn(2, 7)
    twin = studied(T=0)
    twin.load_state_dict(net.state_dict())
    generator = torch.Generator()
    torch.testing.assert_close(net.loss(x, y, 7, generator), twin.loss(x, y, 7, generator), rtol=1e-5, atol=1e-5)


def test_mirrored_draws_are_two():
    with pytest.raises(ValueError, match="expected 2 mirrored ones, got 3"):
        studied(draws=3, mirrored=True)


def test_the_curvature_without_noise_is_the_explicit_one():
    net = studied(T=0)
    for i in (0, 1):
        getattr(net, f"log_alpha{i}").data.fill_(-60.0)
    x = torch.randn(2, 7, 3)
    A = net.curvature(x, torch.Generator())
    for p in range(2):
        hidden = (x[p] @ net.theta0[p, 0].mT + net.bias0[p, 0]).relu().detach()
        slopes = hidden * net.theta1[p, 0].detach()
        expected = (-2 * net.log_sigma[p, 0]).exp().detach() * slopes.mT @ slopes
        torch.testing.assert_close(A[1][p, 0], expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("closed", [True, False])
def test_halfway_the_noise_is_set_to_the_best(closed):
    net = studied(T=2, closed=closed)
    x, y = torch.randn(2, 30, 3), torch.randn(2, 30)
    optimizer = torch.optim.Adam(net.parameters())
    net.loss(x, y, 30, torch.Generator()).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.halfway(x, torch.Generator().manual_seed(2), optimizer)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == ({"log_alpha0", "log_alpha1", "vectors0", "vectors1"} if closed else set())
    assert (net.log_alpha0 in optimizer.state) is not closed
    assert net.theta0 in optimizer.state


def classifier(T):
    method = vsd.baselines.make_method("vsd", vsd.nn.mlp([4, 8, 3]), num_data=1000, num_reflections=T)
    data = Data(torch.randn(1000, 4), torch.randint(3, (1000,)))
    method.step(data.x[:100], data.y[:100])
    return method, data


def test_a_classifiers_noise_is_set_to_the_best():
    method, data = classifier(2)
    before = noise_of(method, data)
    set_noise(method, data)
    after = noise_of(method, data)
    assert list(after) == ["net.0.weight", "net.2.weight"]
    for site, layer in after.items():
        # the curvature is drawn anew at the new noise, so not to the last digit
        assert layer["trained"] - layer["best"] < 0.3 * (before[site]["trained"] - before[site]["best"])


def test_the_reach_is_measured_where_there_is_no_reflection():
    assert set(noise_of(*classifier(0))["net.2.weight"]) >= {"reach1", "reach2", "reach5"}


# ---- the tables


def test_a_share_is_a_part_of_the_gain(tmp_path):
    layer = {"trained": [9.0, 9.0], "sized": [8.5, 8.5], "independent": [10.0, 10.0], "best": [6.0, 8.0]}
    result = {"noise": {"default": {"layer0": layer}}, "groups": {}}
    store.save(result, tmp_path, "rotation_yacht", "t2", 0)
    (found,) = rotation_tables.layers(tmp_path)
    assert found.gain() == 3.0
    assert (found.share("trained"), found.share("sized")) == (pytest.approx(1 / 3), 0.5)
    assert "50%" in rotation_tables.render(tmp_path)


def test_without_results_there_are_no_tables(tmp_path):
    assert rotation_tables.render(tmp_path) == ""


def test_layers_of_classifiers_are_told_by_their_order(tmp_path):
    noise = {"a": {"trained": 2.0, "sized": 2.0, "independent": 3.0, "best": 1.0}}
    path = store.save({"noise": noise, "metrics": {}}, tmp_path, "rotation_mnist", "t2", 0)
    assert json.loads(path.read_text())["noise"] == noise
    assert rotation_tables.layers(tmp_path)[0].share("trained") == 0.5


# ---- the table of options


def test_the_options_are_compared_with_the_defaults(tmp_path):
    splits = {"rmse": [1.0, 2.0, 3.0], "log_likelihood": [0.0, 0.0, 0.1]}
    better = {"rmse": [0.5, 1.5, 2.6], "log_likelihood": [0.0, 0.0, 0.1]}
    store.save({"groups": {"λ = 1 per unit": splits, "λ = 3 per unit": better}}, tmp_path, "options_yacht", "lambda", 0)
    store.save({"groups": {"default": splits}}, tmp_path, "options_yacht", "spread_0", 0)
    text = options_tables.render(tmp_path)
    assert "| λ = 3 per unit | **-0.467 ± 0.143** (3) |" in text
    assert "| spread of log α 0 | +0.000 ± 0.000 (3) |" in text
    assert "| λ = 1 per unit |" not in text


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_else_is_as_the_guide_has_it(variant):
    guide = inspect.signature(vsd.VSDGuide).parameters
    assert VARIANTS[variant].options["T"] == guide["num_reflections"].default


@pytest.mark.parametrize("lr", [0.001, None])
def test_a_variant_may_have_its_own_learning_rate(lr, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(uci, "load_splits", lambda *args: None)
    monkeypatch.setattr(uci, "run_variant", lambda data, setting, *rest: seen.update(lr=setting.lr) or {})
    (unit,) = runner.selected(["options_yacht"], ["lr_0.001" if lr else "lambda"], [0])
    uci.run(unit, tmp_path, tmp_path)
    assert seen["lr"] == (lr or unit.setting.lr)
