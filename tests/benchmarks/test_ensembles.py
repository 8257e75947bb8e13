"""The page of ensembles from stored results alone."""

from pathlib import Path

import pytest

from benchmarks import ensembles

PAGE = Path(__file__).parents[2] / "docs" / "ensembles_evidence.md"


def test_the_page_is_that_of_the_stored_results(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    ensembles.write(copy)
    assert copy.read_text() == PAGE.read_text()


def test_differences_are_paired():
    runs = [{ensembles.OURS: {"rmse": 1.0 + n}, "single": {"rmse": 1.5 + n}} for n in range(3)]
    assert ensembles._cell(runs, "single", "rmse") == "2.500 (+0.500 ± 0.000)"
    assert ensembles._cell(runs, ensembles.OURS, "rmse") == "**2.000**"
    assert ensembles._cell(runs, "mc_dropout", "rmse") == "–"


def test_one_sigma_is_the_best_for_all():
    torch = pytest.importorskip("torch")
    import pyro_vsd as vsd

    y = torch.randn(200, generator=torch.Generator().manual_seed(0))
    predictions = [vsd.RegressionPrediction.from_samples(torch.zeros(1, 200), torch.tensor([s])) for s in (0.2, 3.0)]
    levels = torch.tensor([0.2, 3.0]).log().double()
    found = ensembles.one_sigma(predictions, y, levels)
    assert (found.factors * levels.exp()).tolist() == pytest.approx([float(y.std())] * 2, rel=0.1)
