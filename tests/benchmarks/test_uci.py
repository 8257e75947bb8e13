"""The UCI units on a made-up data set in the published folder format."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.paper import runner, store, uci
from benchmarks.paper.settings.uci import SETTINGS
from benchmarks.paper.uci_data import held_out, load_splits
from benchmarks.paper.uci_training import batch_size, best_sigma, mixture_log_likelihood

SPLITS, ROWS, TEST = 3, 60, 6
YACHT = SETTINGS[0]
VARIANTS = list(YACHT.variants)


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 rows, 4 inputs, 3 splits."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4))
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * rng.normal(size=(ROWS, 1))
    data = tmp_path / "data" / "UCI_Datasets" / "yacht" / "data"
    data.mkdir(parents=True)
    np.savetxt(data / "data.txt", np.hstack([x, 3 * y + 7]))
    np.savetxt(data / "index_features.txt", np.arange(4), fmt="%d")
    np.savetxt(data / "index_target.txt", [4], fmt="%d")
    for split in range(SPLITS):
        order = rng.permutation(ROWS)
        np.savetxt(data / f"index_test_{split}.txt", order[:TEST], fmt="%d")
        np.savetxt(data / f"index_train_{split}.txt", order[TEST:], fmt="%d")
    return tmp_path / "data"


def small(**changes):
    """The setting of Yacht, for a moment of training."""
    variants = {name: replace(one, samples=min(one.samples, 20)) for name, one in YACHT.variants.items()}
    return replace(YACHT, steps=20, num_splits=SPLITS, variants=variants, **changes)


def unit(variant="vsd_t2", seed=0, **changes):
    (found,) = [u for u in uci.units(small(**changes)) if u.variant == variant and u.seed == seed]
    return found


def without_times(result):
    return {key: value for key, value in result.items() if key != "seconds"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_numbers_for_all_splits(variant, folder, tmp_path):
    result = uci.run(unit(variant), folder, tmp_path)
    for group in result["groups"].values():
        for key in ("rmse", "log_likelihood", "coverage", "sigma", "chosen"):
            assert np.isfinite(group[key]).all()
            assert len(group[key]) == SPLITS
    assert result["metrics"]["rmse"] == pytest.approx(np.mean(result["groups"]["tuned"]["rmse"]), rel=1e-4)


def test_longer_training_fits_better(folder, tmp_path):
    short, long = (uci.run(unit("map"), folder, tmp_path, smoke=True), uci.run(replace_steps(400), folder, tmp_path))
    assert long["metrics"]["rmse"] < 0.7 * short["metrics"]["rmse"]
    assert long["history"][-1] < long["history"][0]


def replace_steps(steps):
    found = unit("map")
    return replace(found, setting=replace(found.setting, steps=steps))


@pytest.mark.parametrize("variant", ["vsd_t2", "mc_dropout", "deep_ensemble"])
def test_tuning_never_sees_the_test_rows(variant, folder, monkeypatch):
    setting = small()
    splits = load_splits("yacht", folder, SPLITS)
    poisoned = splits._replace(
        x_test=torch.full_like(splits.x_test, torch.nan), y_test=torch.full_like(splits.y_test, torch.nan)
    )
    # NaN would stop the last step, the scores
    scores = {key: [0.0] * SPLITS for key in ("rmse", "log_likelihood", "coverage")}
    monkeypatch.setattr(uci, "scored", lambda *arguments: dict(scores))
    clean, dirty = (uci.run_variant(s, setting, setting.variants[variant], 0, 20) for s in (splits, poisoned))
    for name, group in clean["groups"].items():
        assert dirty["groups"][name]["chosen"] == group["chosen"]
        assert dirty["groups"][name]["sigma"] == group["sigma"]
    assert dirty["held_out_log_likelihood"] == clean["held_out_log_likelihood"]


def test_a_choice_is_the_best_on_held_out_rows(folder, tmp_path):
    result = uci.run(unit(), folder, tmp_path)
    scores = np.array(result["held_out_log_likelihood"])
    assert result["groups"]["tuned"]["chosen"] == scores.argmax(1).tolist()
    weight = [i for i, one in enumerate(result["candidates"]) if one["per_weight"]]
    assert set(result["groups"]["weight"]["chosen"]) <= set(weight)
    assert len(set(result["groups"]["default"]["chosen"])) == 1


def test_a_unit_is_reproducible_and_its_seed_counts(folder, tmp_path):
    first, again, other = (uci.run(unit(seed=seed), folder, tmp_path) for seed in (0, 0, 1))
    assert without_times(first) == without_times(again)
    assert first["groups"]["tuned"]["rmse"] != other["groups"]["tuned"]["rmse"]


def test_finished_units_are_skipped(folder, tmp_path, monkeypatch):
    results, one = tmp_path / "results", unit("map")
    assert runner.missing([one], results) == [one]
    line = runner.run_unit(one, results, folder, tmp_path / "work")
    assert "rmse" in line
    assert runner.missing([one], results) == []
    monkeypatch.setattr(uci, "run_variant", None)
    assert runner.run_unit(one, results, folder, tmp_path / "work") == "uci_yacht/map-seed0: done"
    (stored,) = store.load(results, "uci_yacht")
    assert (stored["variant"], stored["seed"], stored["settings"]["steps"]) == ("map", 0, 20)


def test_held_out_parts_are_disjoint_parts_of_the_training_rows(folder):
    data = load_splits("yacht", folder, SPLITS)
    twins = held_out(data, 0.15, 2, seed=0)
    assert twins.x.shape == (2 * SPLITS, 46, 4)
    for split in range(SPLITS):
        first, second = (set(twins.y_held[2 * split + fold].tolist()) for fold in (0, 1))
        assert not first & second
        for fold in (0, 1):
            rows = torch.cat([twins.y[2 * split + fold], twins.y_held[2 * split + fold]])
            assert torch.equal(rows.sort().values, data.y[split].sort().values)


def test_more_held_out_parts_than_rows_are_refused(folder):
    with pytest.raises(ValueError, match="folds: expected at most 6 parts of 15% of the rows, got 7"):
        held_out(load_splits("yacht", folder, 1), 0.15, 7, seed=0)


def test_splits_of_different_length_are_refused(folder):
    path = folder / "UCI_Datasets" / "yacht" / "data" / "index_test_1.txt"
    path.write_text("\n".join(path.read_text().split()[:-1]))
    with pytest.raises(ValueError, match=r"yacht: expected splits of equal length, \(train, test\), got"):
        load_splits("yacht", folder, SPLITS)


def test_a_variant_may_have_its_own_steps_and_parts(folder, tmp_path):
    one = unit("map")
    variants = one.setting.variants | {"map": replace(one.setting.variants["map"], steps=7, folds=3)}
    result = uci.run(replace(one, setting=replace(one.setting, variants=variants)), folder, tmp_path)
    assert (result["settings"]["steps"], result["settings"]["folds"]) == (7, 3)


def test_a_run_needs_a_folder_and_the_cpu(folder, tmp_path):
    with pytest.raises(ValueError, match="data: expected the folder that holds UCI_Datasets, got none"):
        uci.run(unit(), None, tmp_path)
    with pytest.raises(ValueError, match="device: expected 'cpu' for the UCI sets, got 'cuda:0'"):
        uci.run(unit(), folder, tmp_path, device="cuda:0")


@pytest.mark.parametrize(("rows", "target", "size"), [(277, 128, 138), (235, 128, 117), (927, 128, 132), (50, 128, 50)])
def test_batches_have_equal_size(rows, target, size):
    assert batch_size(rows, target) == size
    assert rows - rows // size * size < rows // size + 1


def test_the_best_noise_is_the_one_of_the_residuals():
    y = 0.05 * torch.randn(2, 4000)
    log_sigma, score = best_sigma(torch.zeros(2, 1, 1, 4000), y)
    expected = y.square().mean(1).sqrt().log()
    assert ((log_sigma[:, 0] - expected).abs() < 0.03).all()
    assert torch.allclose(score[0], mixture_log_likelihood(y[0].square()[None, None], log_sigma[0]))
