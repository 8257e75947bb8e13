"""The page of trained networks made Bayesian, from stored results alone."""

from pathlib import Path

from benchmarks import from_trained

PAGE = Path(__file__).parents[2] / "docs" / "calibration_evidence.md"


def test_the_page_is_that_of_the_stored_results(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    from_trained.write(copy)
    assert copy.read_text() == PAGE.read_text()
