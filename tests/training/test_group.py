"""``fit`` in two processes on the loopback interface, against one."""

import pytest
import torch

from pyro_vsd.training import fit, load_checkpoint
from tests.training import cases, workers
from tests.training.test_distributed import run, two_processes

pytestmark = [pytest.mark.slow, two_processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def pair(folder):
    """What both processes found; started once for all tests."""
    return run("fitting", folder)


def alone(**options):
    return workers.fitted(1e-24, optimizer=workers.sgd, **options)


def close(first, second):
    assert set(first) == set(second)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "quiet",
        "accumulated",
        "loader",
        "unseeded",
        "scaled",
        "measured",
        "callback",
        "early",
        "whole",
        "interrupted",
        "resumed",
    ],
)
def test_both_have_the_same_parameters_and_history(pair, name):
    first, second = (found[name] for found in pair)
    assert cases.same(first["values"], second["values"])
    for key in ("history", "stopped", "step", "best_epoch"):
        assert first[key] == second[key]


@pytest.mark.parametrize("name", ["loader", "unseeded", "callback", "whole"])
def test_each_has_its_own_rows_and_noise(pair, name):
    first, second = (found[name]["losses"] for found in pair)
    assert not (first == second).any()


def test_without_noise_it_is_one_process_with_batches_twice_as_large(pair):
    expected = alone(epochs=3, batch_size=12)
    close(pair[0]["quiet"]["values"], expected["values"])
    for found, record in zip(pair[0]["quiet"]["history"], expected["history"], strict=True):
        assert found["loss"] == pytest.approx(record["loss"], rel=1e-9)
        assert found["kl"] == pytest.approx(record["kl"], rel=1e-9)


def test_accumulation_is_shared_too(pair):
    """Two processes, two batches of three rows behind each step: twelve rows."""
    close(pair[0]["accumulated"]["values"], alone(epochs=3, batch_size=12)["values"])


def test_validation_is_over_the_rows_of_both(pair):
    """Thirteen rows and twelve: without noise the same numbers as in one process."""
    expected = alone(epochs=1, batch_size=24, validation=cases.data(25))["history"][0]["validation"]
    found = pair[0]["measured"]["history"][0]["validation"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_stops_one_stops_both(pair):
    assert [found["callback"]["stopped"] for found in pair] == ["callback"] * 2
    assert [len(found["callback"]["history"]) for found in pair] == [2, 2]


def test_early_stopping_is_agreed(pair):
    """The metric differs between the processes; the first one's counts."""
    for found in pair:
        assert (found["early"]["stopped"], found["early"]["best_epoch"]) == ("early_stopping", 1)
        assert found["early"]["history"][0]["validation"] == {"nll": 0.0}


def test_ctrl_c_in_one_ends_both_at_the_same_step(pair):
    assert [found["interrupted"]["stopped"] for found in pair] == ["interrupt"] * 2
    assert [found["interrupted"]["step"] for found in pair] == [8, 8]


def test_a_resumed_run_goes_on_bit_for_bit(pair):
    for found in pair:
        assert cases.same(found["resumed"]["values"], found["whole"]["values"])
        assert found["resumed"]["history"] == found["whole"]["history"]


def test_the_first_saves_and_shows(pair):
    assert pair[0]["saves"] == 5  # two epochs and the interrupt; what was left of the third, and the fourth
    assert pair[1]["saves"] == 0
    assert "fit: 100%" in pair[0]["shown"]
    assert pair[1]["shown"] == ""


def test_a_different_number_of_processes(pair, folder):
    model = cases.batch_norm()
    guide = workers.vsd.VSDGuide(model)
    with pytest.raises(ValueError, match=r"\bcheckpoint\b.*\bprocesses\b"):
        fit(model, guide, cases.data(), epochs=9, batch_size=4, checkpoint=folder / "run.ckpt", seed=0)
    assert load_checkpoint(folder / "run.ckpt", model=model, guide=guide)["epoch"] == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spoilt", {"'y'", "different process"}),  # the process of the row, and the other one
        ("uneven", {"data"}),
        ("plain", {"data"}),
        ("pyro", {"optimizer"}),
    ],
)
def test_errors_reach_both(pair, name, words):
    found = [each["errors"][name] for each in pair]
    assert all(any(word in text for word in words) for text in found), found
    assert all(any(word in text for text in found) for word in words), found
