"""Elsewhere metrics were named but not implemented (torch-uncertainty#333), wrong in AUSE, FPR and Brier (#335), mutual
information wrong in rare cases (#45), and logarithms were taken of zero (scikit-activeml#344). Here each metric is
tested by hand and against a second library; its edges have known values.

More of it: ``tests/metrics`` (by hand, torchmetrics, scikit-learn, NumPy).
"""

import math

import pytest
import torch

import pyro_vsd as vsd

M = vsd.metrics
SURE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
TIED = torch.full((4, 2), 0.5)
RIGHT, WRONG = torch.tensor([0, 1, 0]), torch.tensor([1, 0, 1])

EDGES = {
    "one bin: the gap of all rows": (lambda: M.ece(TIED, torch.tensor([0, 0, 0, 1]), num_bins=1), 0.25),
    "zero probability, right": (lambda: M.nll(SURE, RIGHT), 0.0),
    "zero probability, wrong": (lambda: M.nll(SURE, WRONG), math.inf),
    "zero probability, entropy": (lambda: float(M.predictive_entropy(SURE).max()), 0.0),
    "sure and right": (lambda: M.brier(SURE, RIGHT), 0.0),
    "sure and wrong": (lambda: M.brier(SURE, WRONG), 2.0),
    "sure and wrong, calibration": (lambda: M.ece(SURE, WRONG), 1.0),
    "ties take the first class": (lambda: M.accuracy(TIED, torch.tensor([0, 0, 0, 1])), 0.75),
    "ties separate nothing": (lambda: M.auroc(torch.ones(5), torch.ones(3)), 0.5),
    "ties let all through": (lambda: M.fpr_at_95_tpr(torch.ones(5), torch.ones(3)), 1.0),
    "one class": (lambda: M.accuracy(torch.ones(3, 1), torch.zeros(3, dtype=torch.long)), 1.0),
    "one class, calibration": (lambda: M.ece(torch.ones(3, 1), torch.zeros(3, dtype=torch.long)), 0.0),
    "samples that agree": (lambda: float(M.mutual_information(SURE.expand(4, 3, 2)).max()), 0.0),
    "certain samples that differ": (
        lambda: float(M.mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))), math.log(2),
    ),
    "one score, all refused together": (
        lambda: float(M.risk_coverage(TIED, torch.tensor([0, 0, 0, 1])).risk[-1]), 0.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), EDGES.values(), ids=EDGES)
def test_edge(value, expected):
    assert value() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["entropy", "bald", "variation_ratio"])
def test_scores_of_sure_samples_are_numbers(kind):
    assert bool(M.acquisition(SURE.expand(4, 3, 2), kind).isfinite().all())
