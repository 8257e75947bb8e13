"""The runner: what is done is skipped, what was killed goes on, nobody works twice."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper import images, runner, store
from benchmarks.paper.settings import digits

ROOT = Path(__file__).resolve().parents[2]
UNITS = images.units(replace(digits.SETTINGS[0], epochs=1))
TIMES = {"train_seconds", "predict_seconds"}


def timeless(folder: Path) -> list[dict]:
    return [{key: value for key, value in one.items() if key not in TIMES} for one in store.load(folder, "digits")]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    # coverage of the shell's own settings would differ between machines
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")
@pytest.mark.parametrize("variant", ["vsd_t2", "swag"])
def test_a_unit_killed_again_and_again_gives_the_same_result(variant, tmp_path):
    out = command("-m", "tests.benchmarks.killed", str(tmp_path), variant).stdout
    kills, epochs = (int(word) for word in out.split() if word.isdigit())
    assert kills == 8
    assert epochs >= 5  # work was taken over
    assert timeless(tmp_path / "killed" / "results") == timeless(tmp_path / "whole" / "results") != []


def test_finished_units_are_skipped(tmp_path, monkeypatch):
    store.save({"metrics": {}}, tmp_path, "digits", "map", 0)
    assert [unit.variant for unit in runner.missing(UNITS, tmp_path)] == ["vsd_t2", "ard_vd", "swag"]

    def fail(*arguments, **options):
        raise AssertionError("run again")

    monkeypatch.setattr(images, "run", fail)
    done = next(unit for unit in UNITS if unit.variant == "map")
    assert runner.run_unit(done, tmp_path, None, tmp_path / "work") == "digits/map-seed0: done"


def test_a_unit_that_another_process_is_at_is_left_alone(tmp_path):
    unit = UNITS[0]
    with runner._lock(tmp_path / "digits" / f"{unit.variant}-seed0.lock") as mine:
        assert mine
        assert "another process is at it" in runner.run_unit(unit, tmp_path / "results", None, tmp_path)
    assert not store.done(tmp_path / "results", "digits", unit.variant, 0)


def test_the_record_of_a_unit(tmp_path):
    unit = next(unit for unit in UNITS if unit.variant == "vsd_t2")
    line = runner.run_unit(unit, tmp_path / "results", None, tmp_path)
    assert line.startswith("digits/vsd_t2-seed0: {'nll'")
    (result,) = store.load(tmp_path / "results", "digits")
    assert set(result["metrics"]) == set(result["validation"]) == {"nll", "error", "ece", "brier"}
    assert sum(result["reliability"]["size"]) == sum(result["entropy"]["test"]) == 355
    assert set(result["layers"]) == {"0", "2"}
    assert result["options"] == {"num_reflections": 2}
    assert len(result["history"]["loss"]) == result["training"]["epochs"] == 1
    assert set(result["versions"]) >= {"torch", "pyro", "pyro_vsd", "python"}
    assert not (tmp_path / "digits" / "vsd_t2-seed0.pt").exists()
    assert (tmp_path / "results" / "digits" / "vsd_t2-seed0.json").stat().st_size < 8000


def test_two_processes_do_all_units_once(tmp_path):
    units = [unit for unit in UNITS if unit.variant in ("map", "ard_vd")]
    runner.run(units, tmp_path / "both", None, tmp_path / "work", jobs=2)
    runner.run(units, tmp_path / "one", None, tmp_path / "work", jobs=1)
    assert timeless(tmp_path / "both") == timeless(tmp_path / "one")
    assert len(timeless(tmp_path / "both")) == 2


def test_the_command_line_runs_and_lists(tmp_path):
    options = ["--task", "digits", "--results", str(tmp_path / "results")]
    ran = command("-m", "benchmarks.paper", "run", *options, "--only", "map", "--work", str(tmp_path / "work"))
    assert "digits/map-seed0" in ran.stdout
    listed = command("-m", "benchmarks.paper", "list", *options).stdout.splitlines()
    assert listed == [
        "missing digits/vsd_t2-seed0",
        "missing digits/ard_vd-seed0",
        "done    digits/map-seed0",
        "missing digits/swag-seed0",
        "1 of 4 done",
    ]
