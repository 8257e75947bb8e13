"""The comparison with other libraries: its page, its scorer, and the methods that need no other package."""

import inspect
import json
import math

import pytest
import torch

from benchmarks import shift
from benchmarks.peers import quality, steps


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def test_the_page_holds_what_the_results_say():
    text = quality.PAGE.read_text(encoding="utf-8")
    assert text == shift.page(text, quality.tables()), "run: python -m benchmarks.peers.quality --write"


def test_rows_of_digits_are_complete():
    """Our rows and the baselines are the stored ones of shift.py."""
    results = quality.stored("digits")
    assert set(quality.ABOVE) | set(quality.OURS) <= set(results)
    for method in (*quality.ABOVE, *quality.OURS):
        assert results[method] == shift.stored("digits")[method]
        assert tuple(results[method]) == tuple(range(quality.SPLITS))


@pytest.mark.parametrize("task", quality.UCI)
def test_rows_of_a_uci_set_have_the_same_splits(task):
    assert len({tuple(own) for own in quality.stored(task).values()}) <= 1


def test_stored_results_are_finite():
    for path in quality.RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "method" in found:
            scores = found.get("clean", {key: found.get(key) for key in ("log_likelihood", "rmse")})
            assert all(math.isfinite(value) for value in scores.values()), path.name
            assert path == quality.path_of(path.name.split("-")[0], found["method"], found["seed"])


def test_plain_networks_train_and_predict():
    split = shift.Split(shift.TASKS["digits"], 0, None, epochs=3)
    predict, _ = quality.images(quality.plain, our_rate=True)(split)
    found = quality.shift.quality(predict, split)
    stored = next(iter(shift.stored("digits")["plain"].values()))
    assert found.keys() == stored.keys() - {"method", "seed", "chosen", "equivalent"}
    assert found["clean"]["error"] < 0.5


def test_lines_are_those_of_a_user():
    """A loss, its gradient, two calls of the optimiser, the network, the optimiser; a prediction has two more."""
    assert steps.num_lines(steps.plain) == 6
    assert steps.num_lines(quality.plain) == 8
    made = {function for _, function, _ in quality.IMAGES.values()} | {row[1] for row in quality.TABLES.values()}
    assert all(steps.num_lines(function) >= 5 for function in made if function is not None)


def test_figures_are_drawn_from_results(tmp_path):
    pytest.importorskip("matplotlib")
    made = quality.figures(tmp_path)
    assert {path.name for path in made} == {path.name for path in shift.FIGURES.glob("peers_*.png")}
    assert all(path.stat().st_size > 10_000 for path in made)
    assert all(path.name in quality.PAGE.read_text(encoding="utf-8") for path in made)


def test_packages_with_layers_of_their_own_are_not_on_convolutions():
    names = quality.rows_of_images("cifar")
    assert set(quality.IMAGES) - set(names) == {name for name in quality.IMAGES if name.startswith(("torch-", "blitz"))}


def test_other_packages_are_imported_inside_functions():
    source = inspect.getsource(quality)
    for package in ("ivon", "laplace", "vbll", "blitz", "bayesian_torch", "torch_uncertainty"):
        assert f"\nimport {package}" not in source
        assert f"\nfrom {package}" not in source
