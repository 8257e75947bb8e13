"""The store of results: whole files or none, found again by their key."""

import json

import pytest

from benchmarks.paper import store


def test_saved_results_are_loaded_in_order_of_their_names(tmp_path):
    for seed in (1, 0):
        store.save({"metrics": {"nll": 0.5 + seed}}, tmp_path, "mnist", "vsd_t2", seed)
    found = store.load(tmp_path, "mnist")
    assert [(one["task"], one["variant"], one["seed"], one["metrics"]["nll"]) for one in found] == [
        ("mnist", "vsd_t2", 0, 0.5),
        ("mnist", "vsd_t2", 1, 1.5),
    ]


def test_a_task_without_results_is_empty(tmp_path):
    assert store.load(tmp_path, "mnist") == []


def test_done(tmp_path):
    assert not store.done(tmp_path, "mnist", "map", 0)
    store.save({}, tmp_path, "mnist", "map", 0)
    assert store.done(tmp_path, "mnist", "map", 0)


@pytest.mark.parametrize("name", ["../up", "Upper", "a-b", "", "with space"])
def test_names_that_are_no_file_names_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="variant: expected lower-case letters, digits, dots and underscores"):
        store.save({}, tmp_path, "mnist", name, 0)


def test_numbers_that_are_none_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.save({"nll": float("nan")}, tmp_path, "mnist", "map", 0)
    assert not list(tmp_path.rglob("*"))


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = store.save({"nll": 1.0}, tmp_path, "mnist", "map", 0)

    def fail(*paths):
        raise OSError("full")

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        store.save({"nll": 2.0}, tmp_path, "mnist", "map", 0)
    assert json.loads(path.read_text())["nll"] == 1.0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_half_written_file_of_a_killed_process_is_no_result(tmp_path):
    store.save({"nll": 1.0}, tmp_path, "mnist", "map", 0)
    (tmp_path / "mnist" / ".map-seed1.json.x.tmp").write_text("{")
    assert len(store.load(tmp_path, "mnist")) == 1
    assert not store.done(tmp_path, "mnist", "map", 1)


def test_lists_of_numbers_take_one_line_and_strings_stay(tmp_path):
    result = {"counts": [1, 2, 3], "text": "a  b [ 1 ]", "names": ["x", "y"]}
    path = store.save(result, tmp_path, "mnist", "map", 0)
    assert '"counts": [1, 2, 3]' in path.read_text()
    loaded = store.load_one(path)
    assert {key: loaded[key] for key in result} == result


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"task": "mnist", "vari', "\x00"])
def test_a_damaged_result_is_named_and_counts_as_missing(text, tmp_path):
    path = store.save({}, tmp_path, "mnist", "map", 0)
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: expected a result"):
        store.load(tmp_path, "mnist")
    with pytest.warns(UserWarning, match=f"{path}.*counts as missing"):
        assert not store.done(tmp_path, "mnist", "map", 0)
