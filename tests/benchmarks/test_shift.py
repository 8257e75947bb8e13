"""The benchmark of shifts: its data, its methods for a few steps, and the pages that its results are in."""

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
    assert text == shift.page(text, shift.PAGES[path]()), "run: python benchmarks/shift.py --write"


def test_every_method_has_every_split():
    results = shift.stored("digits")
    assert list(results) == list(shift.METHODS)
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


@pytest.mark.parametrize("method", [name for name in shift.METHODS if not name.startswith("Laplace")])
def test_a_method_predicts_after_a_few_steps(method, split):
    torch.set_default_dtype(torch.float32)
    predict, _ = shift.METHODS[method](split)
    found = json.loads(json.dumps(shift.scores(predict, split)))
    assert found.keys() == next(iter(shift.stored("digits")[method].values())).keys() - {"method", "seed", "chosen"}
    assert all(math.isfinite(at["nll"]) for at in (found["clean"], *found["pixel noise"].values()))
    assert found["clean"]["error"] < 0.9


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
