"""Conformal intervals and sets by MAPIE around the estimators."""

import numpy as np
import pytest

pytest.importorskip("mapie.conformity_scores", reason="needs the extra conformal")

from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import StdConformityScore
from mapie.regression import SplitConformalRegressor

from pyro_vsd.sklearn import VSDClassifier, VSDRegressor


def waves(num_rows):
    """Targets whose noise is five times as large on the right."""
    random = np.random.default_rng(0)
    X = random.uniform(-2, 2, (num_rows, 1))
    sigma = np.where(X[:, 0] > 0, 0.5, 0.1)
    return X, np.sin(2 * X[:, 0]) + sigma * random.standard_normal(num_rows)


def test_intervals_cover_and_follow_the_standard_deviation():
    X, y = waves(2400)
    regressor = VSDRegressor((20,), noise="heteroscedastic", epochs=40, num_samples=30, random_state=0)
    regressor.fit(X[:400], y[:400])
    split = SplitConformalRegressor(
        regressor, confidence_level=0.9, conformity_score=StdConformityScore(), prefit=True
    ).conformalize(X[400:1400], y[400:1400])
    _, intervals = split.predict_interval(X[1400:])
    lower, upper = intervals[:, 0, 0], intervals[:, 1, 0]
    inside, right = (lower <= y[1400:]) & (y[1400:] <= upper), X[1400:, 0] > 0.2
    assert 0.86 < inside.mean() < 0.94
    # the score divides by the standard deviation, so all widths are the same multiple of it
    widths = (upper - lower) / regressor.predict(X[1400:], return_std=True)[1]
    np.testing.assert_allclose(widths, widths[0], rtol=1e-6)
    assert (upper - lower)[right].mean() > (upper - lower)[~right].mean()


def test_sets_cover():
    random = np.random.default_rng(0)
    y = random.integers(3, size=1800)
    X = np.eye(3)[y] + 0.6 * random.standard_normal((1800, 3))
    classifier = VSDClassifier((20,), epochs=20, random_state=0).fit(X[:300], y[:300])
    split = SplitConformalClassifier(classifier, confidence_level=0.9, prefit=True)
    split.conformalize(X[300:1050], y[300:1050])
    _, sets = split.predict_set(X[1050:])
    covered = sets[np.arange(750), y[1050:], 0]
    assert 0.86 < covered.mean() < 0.94
    assert sets.sum(1).mean() < 2
