"""Weights and scores of members, read back from their artists."""

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd import plots
from tests.prediction import kinds


def stacking():
    members = [kinds.gaussians(3, 80) for _ in range(3)]
    return vsd.ensemble.stack(members, torch.randn(80))


def test_bars_and_scores():
    found = stacking()
    ax = plots.members(found, names=["a", "b", "c"])
    assert [bar.get_height() for bar in ax.patches] == found.weights.tolist()
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "c"]
    (scores,) = [other for other in ax.figure.axes if other is not ax]
    assert scores.lines[0].get_ydata().tolist() == found.scores.tolist()
    assert scores.lines[1].get_ydata()[0] == found.after


@pytest.mark.parametrize(
    ("thing", "options", "error"), [(3, {}, TypeError), (vsd.ensemble.Stacking.equal(2), {"names": ["a"]}, ValueError)]
)
def test_bad_input(thing, options, error):
    with pytest.raises(error, match=next(iter(options), "ensemble")):
        plots.members(thing, **options)
