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


def test_a_member_far_below_the_others_does_not_stretch_the_axis():
    scores = torch.tensor([-1.0, -1.1, -0.9, -50.0])
    stacking = vsd.ensemble.Stacking(torch.full((4,), 0.25), torch.ones(4), 60, scores, -1.0, -0.8, True)
    ax = vsd.plots.members(stacking)
    (right,) = [one for one in ax.figure.axes if one is not ax]
    assert right.get_ylim()[0] > -5
    assert [text.get_text() for text in right.texts] == ["-50"]
