"""The UCI tables from stored results alone."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.paper import store, uci_results, uci_tables
from benchmarks.paper.settings.uci import SETTINGS
from benchmarks.paper.uci_published import PAPER

SPLITS = 20
NOISE = np.random.default_rng(0).normal(size=(2, SPLITS))


def group(rmse, ll):
    numbers = {"rmse": rmse, "log_likelihood": ll, "coverage": np.full(SPLITS, 0.94), "sigma": np.ones(SPLITS)}
    return {key: list(map(float, value)) for key, value in numbers.items()} | {"chosen": [0] * SPLITS}


def write(folder, variant, seed, shift=0.0, data="yacht", ll=-0.4):
    """Numbers that vary much from split to split and little between methods."""
    rmse = 0.6 + 0.1 * NOISE[seed] + shift + 0.01 * NOISE[1 - seed] * (shift != 0)
    one = group(rmse, ll + 0.0 * rmse)
    names = ("tuned", "unit", "weight", "default") if variant != "map" else ("tuned", "all")
    candidate = {"kl_weight": 0.2, "per_weight": 1.0, "init_alpha": 0.2} if variant != "map" else {"precision": 0.1}
    result = {"groups": dict.fromkeys(names, one), "candidates": [candidate], "metrics": {}}
    store.save(result, folder, f"uci_{data}", variant, seed)


@pytest.fixture
def folder(tmp_path):
    for seed in (0, 1):
        write(tmp_path, "vsd_t2", seed, shift=-0.05)
        write(tmp_path, "vd", seed)
    write(tmp_path, "map", 0)
    return tmp_path


def test_a_paired_difference_is_far_sharper_than_the_means(folder):
    results = uci_results.load(folder)
    mean, half, count = uci_results.paired(results, "yacht", ("vsd_t2", "tuned"), ("vd", "tuned"), "rmse")
    assert count == 40
    assert mean == pytest.approx(-0.05 + 0.01 * NOISE.mean(), abs=1e-12)
    errors = 0.01 * NOISE.mean(0)
    assert half == pytest.approx(stats.t.ppf(0.975, 19) * errors.std(ddof=1) / math.sqrt(SPLITS), rel=1e-9)
    assert half < uci_results.mean_and_error(uci_results.values(results, "yacht", "vd", "tuned", "rmse"))[1]


def test_a_difference_uses_the_seeds_that_both_have(folder):
    results = uci_results.load(folder)
    found = uci_results.paired(results, "yacht", ("vsd_t2", "tuned"), ("map", "tuned"), "rmse")
    assert found is not None
    assert found[2] == SPLITS


def test_nothing_to_compare_is_none(folder):
    results = uci_results.load(folder)
    assert uci_results.paired(results, "yacht", ("vsd_t8", "tuned"), ("vd", "tuned"), "rmse") is None


def test_the_standard_error_is_over_splits():
    mean, error, count = uci_results.mean_and_error({0: [1.0, 2.0], 1: [3.0, 4.0]})
    assert (mean, error, count) == (2.5, 0.5, 4)


@pytest.mark.parametrize(("ll", "good"), [(-0.4, True), (-1.14, True), (-1.17, False)])
def test_standing_counts_what_is_within_an_error_or_better(ll, good, tmp_path):
    write(tmp_path, "vsd_t2", 0, ll=ll)  # the paper's Yacht: 0.69 ± 0.06, -1.14 ± 0.02
    found = uci_tables.standing(uci_results.load(tmp_path))
    assert found == {"yacht": {"rmse": True, "log_likelihood": good}}


def test_the_second_round_is_told_apart_from_the_first(tmp_path):
    write(tmp_path, "vsd_t2", 0, ll=-1.5)
    write(tmp_path, "vsd_t2_again", 0, ll=-0.4)
    results = uci_results.load(tmp_path)
    rounds = [uci_tables.standing(results, last=last)["yacht"] for last in ("first", "second", "third")]
    assert [found["log_likelihood"] for found in rounds] == [False, True, True]
    page = uci_tables.tables(tmp_path)
    assert (
        "first round) within the paper's standard error of the paper's VSD or better in log-likelihood, to the paper's "
        "two decimals: 0 of 1" in page
    )
    assert "second round where there is one) within" in page
    assert "third round" not in page


def test_the_page_has_the_papers_numbers_beside_ours(folder):
    page = uci_tables.tables(folder)
    assert "| VSD, T = 2, tuned | paper | 0.69 ± 0.06 |" in page
    ours = [line for line in page.splitlines() if line.startswith("| VSD, T = 2, tuned | ours |")]
    assert len(ours) == 2
    assert ours[0].endswith("(40) |")
    assert "| VSD, T = 2 [tuned] − VD (VSD with T = 0) [tuned] | **-0.0" in page
    assert "λ 0.2 per weight: 40" in page
    assert "1 of 1 sets" in page


def test_the_page_depends_on_the_files_alone(folder):
    before = uci_tables.tables(folder)
    assert uci_tables.tables(folder) == before
    write(folder, "vsd_t2", 1, shift=0.1)
    assert uci_tables.tables(folder) != before


def test_an_empty_folder_gives_a_sentence(tmp_path):
    assert uci_tables.tables(tmp_path) == "No UCI results.\n"


def test_the_papers_table_is_complete():
    assert set(PAPER) == {setting.data for setting in SETTINGS}
    for columns in PAPER.values():
        assert set(columns) == {"BBB", "MCD", "VD", "D.E", "VSD"}
        assert columns["VSD"][0][0] <= columns["BBB"][0][0]


def test_the_committed_results_make_the_page():
    found = uci_results.load(store.RESULTS)
    page = uci_tables.tables(store.RESULTS)
    for data, variant, _ in found:
        assert data.capitalize() in page
        labels = {name: kind.label for setting in SETTINGS for name, kind in setting.variants.items()}
        assert labels[variant] in page


def test_a_single_bad_split_moves_the_mean_and_not_the_median(tmp_path):
    write(tmp_path, "vsd_t2", 0, ll=np.where(np.arange(SPLITS) == 3, -19.7, -0.25))
    page = uci_tables.tables(tmp_path)
    assert "| VSD, T = 2, tuned | ours | -1.222 ± 0.972 (20) |" in page
    assert "| VSD, T = 2, tuned | -0.250 |" in page
