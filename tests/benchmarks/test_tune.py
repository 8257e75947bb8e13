"""Searches: on validation rows alone, kept, taken up again, and used by the units."""

import json
from dataclasses import replace

import optuna
import pytest

from benchmarks.paper import data, images, tune
from benchmarks.paper.settings import digits
from benchmarks.paper.unit import Variant

VARIANTS = {
    "map": Variant("map", {}, tuned={"lr": ("log", 1e-5, 1e-1)}),
    "fixed": Variant("map", {}),
    "swag": Variant("swag", {"start": 2, "period": 0.5}, lr=0.05, tuned={"scale": ("linear", 0.1, 2.0)}),
}
SETTING = replace(digits.SETTINGS[0], variants=VARIANTS)


def search(folder, name="map", trials=4):
    return tune.tune(SETTING, name, None, folder / "work", folder / "results", num_trials=trials, epochs=1)


@pytest.fixture(autouse=True)
def quiet():
    before = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(before)


def test_the_best_trial_is_chosen_and_all_are_written(tmp_path):
    result = search(tmp_path)
    assert len(result["trials"]) == 4
    best = min(result["trials"], key=lambda trial: trial["nll"])
    assert result["chosen"] == {"lr": best["lr"]}
    assert json.loads(images.tuning_path(tmp_path / "results", "digits", "map").read_text()) == result


def test_a_search_that_was_ended_goes_on_with_the_same_proposals(tmp_path, monkeypatch):
    whole = search(tmp_path / "whole")
    scores, calls = tune.scores, []

    def end_in_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scores(*arguments)

    monkeypatch.setattr(tune, "scores", end_in_third)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "ended")
    monkeypatch.setattr(tune, "scores", scores)
    assert search(tmp_path / "ended")["trials"] == whole["trials"]


def test_a_search_that_is_done_is_not_repeated(tmp_path, monkeypatch):
    result = search(tmp_path)
    monkeypatch.delattr(tune, "train")
    assert search(tmp_path) == result


def test_test_rows_do_not_reach_a_search(tmp_path, monkeypatch):
    parts = data.load(SETTING, None)
    seen = []

    def scores(method, rows, *others):
        seen.append(rows)
        return None, {"nll": 1.0}

    monkeypatch.setattr(tune, "load", lambda *arguments: parts._replace(test=None, ood=None))
    monkeypatch.setattr(tune, "scores", scores)
    search(tmp_path, trials=1)
    assert len(seen) == 1
    assert seen[0] is parts.validation


def test_swag_takes_snapshots_in_the_same_share_of_a_shorter_training():
    short = images.shortened(VARIANTS["swag"], SETTING, 1)
    assert short.options == {"start": 0.5, "period": 0.125}
    assert short.epochs == 1


def test_units_take_the_values_that_were_chosen(tmp_path):
    chosen = search(tmp_path)["chosen"]
    variant, values = images.resolved(VARIANTS["map"], "digits", "map", tmp_path / "results")
    assert variant.lr == chosen["lr"]
    assert values == chosen


def test_without_a_search_a_unit_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="Run: python -m benchmarks.paper tune --task digits --only map"):
        images.resolved(VARIANTS["map"], "digits", "map", tmp_path)


def test_values_of_another_search_are_refused(tmp_path):
    path = images.tuning_path(tmp_path, "digits", "map")
    path.parent.mkdir()
    path.write_text('{"chosen": {"rate": 0.1}}')
    with pytest.raises(ValueError, match="expected values of lr, got rate"):
        images.resolved(VARIANTS["map"], "digits", "map", tmp_path)


def test_nothing_to_tune_is_refused(tmp_path):
    with pytest.raises(ValueError, match="digits/fixed: expected something to tune and validation rows, got none"):
        search(tmp_path, "fixed")
