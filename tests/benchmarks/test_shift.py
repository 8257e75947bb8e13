"""The benchmark of shifts: its data, its methods for a few steps, and the pages that its results are in."""

import dataclasses
import doctest
import json
import math

import pytest
import torch

from benchmarks import shift

DIGITS = shift.TASKS["digits"]


@pytest.fixture(scope="module")
def split():
    torch.set_default_dtype(torch.float32)
    return shift.Split(DIGITS, 0, None, epochs=1)


@pytest.mark.parametrize("path", shift.PAGES, ids=lambda path: path.name)
def test_pages_hold_what_the_results_say(path):
    text = path.read_text(encoding="utf-8")
    assert text == shift.page(text, shift.PAGES[path]()), "run: python -m benchmarks.shift --write"


def test_every_method_has_every_split():
    results = shift.stored("digits")
    assert list(results) == shift.methods_of("digits")
    assert {tuple(own) for own in results.values()} == {tuple(range(5))}


def test_figures_are_drawn_from_results(tmp_path):
    pytest.importorskip("matplotlib")
    made = shift.draw("digits", tmp_path)
    assert all((shift.FIGURES / path.name).exists() for path in made)
    assert all(path.stat().st_size > 10_000 for path in made)


def test_test_rows_choose_nothing(split):
    """Rows that choose are training rows, and no test row is among them."""
    rows = [{tuple(row) for row in part.x.tolist()} for part in (split.rest, split.held_out, split.train, split.test)]
    assert rows[0] | rows[1] == rows[2]
    assert not rows[2] & rows[3]
    assert len(split.rest) + len(split.held_out) == len(split.train) == 1442


@pytest.mark.parametrize("method", [name for name in shift.methods_of("digits") if not name.startswith("Laplace")])
def test_a_method_predicts_after_a_few_steps(method, split):
    torch.set_default_dtype(torch.float32)
    predict, _ = shift.METHODS[method](split)
    found = json.loads(json.dumps(shift.scores(predict, split)))
    assert found.keys() == next(iter(shift.stored("digits")[method].values())).keys() - {"method", "seed", "chosen"}
    assert all(math.isfinite(at["nll"]) for at in (found["clean"], *found["pixel noise"].values()))
    assert found["clean"]["error"] < 0.9


@pytest.fixture(scope="module")
def images():
    """A small task of the kind in which networks are not trained again on all rows, with rows of digits."""
    torch.set_default_dtype(torch.float32)
    shifts = {"pixel noise": (shift.pixel_noise, (0.2,)), "corruptions": (shift.corruption, ("fog", "stripe"))}
    task = dataclasses.replace(DIGITS, refit=False, pairs=False, samples=10, rows=50, plain=5, shifts=shifts)
    return shift.Split(task, 0, None, epochs=2)


@pytest.mark.parametrize("method", ["deep ensemble of 5, stacked", "MC dropout", "VSD", "VSD ensemble", "from_trained"])
def test_without_refit_no_network_sees_held_out_rows(method, images, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.delattr(images, "train")
    predict, _ = shift.METHODS[method](images)
    found = shift.scores(predict, images)
    assert found["corruptions"].keys() == {"fog", "stripe"}
    assert found["tempered"]["nll"] < found["clean"]["nll"] + 0.05
    assert found["clean"]["kept"] <= found["clean"]["error"]


def test_equivalents_are_those_of_the_stored_mixtures():
    """What another process compares with gives what ``metrics.deep_ensemble_equivalent`` gave."""
    for seed in range(5):
        plain = json.loads(shift.path_of("digits", "mixtures", seed).read_text())["plain networks"]
        for method, own in shift.stored("digits").items():
            found, stored = shift.equivalent(own[seed]["clean"]["nll"], plain), own[seed]["equivalent"]
            assert found == pytest.approx(math.inf if stored is None else stored, rel=0.02), (method, seed)


def test_mixtures_of_plain_networks(images):
    torch.set_default_dtype(torch.float32)
    found = shift.mixtures(images)
    assert len(found) == len(images.plain) == 5
    assert found[4] < found[0]


def test_dropout_is_in_front_of_linear_layers():
    net = shift.with_dropout(shift.TASKS["cifar"].network(), 0.5)
    names = [name for name, _ in net.named_children()]
    assert [name for name in names if name.startswith("dropout")] == ["dropout_fc1", "dropout_fc2"]
    assert names.index("dropout_fc1") == names.index("fc1") - 1


def test_one_temperature_repairs_probabilities_that_are_too_sure():
    torch.manual_seed(0)
    logits = torch.randn(2000, 3)
    y = torch.distributions.Categorical(logits=logits).sample()
    sure = shift.vsd.ClassificationPrediction.from_samples((2 * logits).softmax(-1).unsqueeze(0))
    found = shift.tempered(sure, shift.Rows(logits, y), sure, y)
    assert found["temperature"] == pytest.approx(2, rel=0.15)
    assert found["nll"] < shift.vsd.metrics.nll(sure, y)


def test_shifts():
    x = torch.rand(5, 64)
    noisy = shift.pixel_noise(x, 0.5)
    assert bool(((noisy >= 0) & (noisy <= 1)).all())
    assert torch.equal(noisy, shift.pixel_noise(x, 0.5))
    torch.testing.assert_close(shift.rotation(x, 90).reshape(-1, 8, 8), x.reshape(-1, 8, 8).rot90(1, (1, 2)))
    shuffled = shift.shuffled_pixels(x)
    assert torch.equal(shuffled.sort(-1).values, x.sort(-1).values)
    assert not torch.equal(shuffled, x)


def test_examples():
    pytest.importorskip("scipy")
    failed, tried = doctest.testmod(shift)
    assert failed == 0
    assert tried > 0
