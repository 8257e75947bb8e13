"""Detection of out-of-distribution inputs by a score that is higher in distribution.

In-distribution rows are the positives. A threshold accepts the scores at or above it. Equal scores are accepted or
rejected together, so the order of rows does not matter.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_vsd._utils import check_choice
from pyro_vsd.metrics.base import METRICS, Classes, metric, probabilities, vector, with_samples
from pyro_vsd.prediction.base import Array

__all__ = ["ROC", "aupr_in", "aupr_out", "auroc", "detection_error", "fpr_at_95_tpr", "ood", "ood_score", "roc_curve"]

Score = Literal["max_probability", "entropy", "mutual_information"]
SCORES = ("max_probability", "entropy", "mutual_information")


class ROC(NamedTuple):
    """Shares of accepted rows as the threshold falls, from ``(0, 0)`` to ``(1, 1)``."""

    fpr: Tensor  # of out-of-distribution rows
    tpr: Tensor  # of in-distribution rows


def ood(inside: Classes, outside: Classes, score: Score = "max_probability") -> dict[str, float]:
    """All five metrics of how well a score of the predictions detects out-of-distribution rows.

    :param inside: prediction on in-distribution inputs: an object, ``(N, C)`` or ``(S, N, C)``.
    :param outside: prediction on out-of-distribution inputs.
    :param score: what the rows are ranked by; the entropies with a minus sign.

    >>> ood(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.5, 0.5], [0.6, 0.4]]))["auroc"]
    1.0
    """
    return detection(ood_score(inside, score), ood_score(outside, score))


def ood_score(prediction: Classes, score: Score = "max_probability") -> Tensor:
    """Score of every row, ``(N,)``, higher in distribution.

    >>> ood_score(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), "entropy")
    tensor([-0.3251, -0.6931])
    """
    check_choice("score", score, SCORES)
    if score == "max_probability":
        return probabilities(prediction).amax(-1)
    if score == "entropy":
        return -torch.special.entr(probabilities(prediction)).sum(-1)
    return -with_samples(prediction, "score='mutual_information'").mutual_information


def _fpr_at_95_tpr(tp: Tensor, fp: Tensor) -> float:
    enough = 100 * tp >= 95 * tp[-1]  # in integers: 0.95 is no float
    return float(fp[enough][0].double() / fp[-1])


@metric("detection", "lower", compute=_fpr_at_95_tpr)
def fpr_at_95_tpr(inside: Array, outside: Array) -> float:
    """Share of out-of-distribution rows accepted where at least 95 % of in-distribution rows are. Lower is better.

    :param inside: scores of in-distribution rows, ``(N,)``.
    :param outside: scores of out-of-distribution rows, ``(M,)``.

    >>> fpr_at_95_tpr(torch.tensor([3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0]))
    0.5
    """
    return _fpr_at_95_tpr(*_accepted(inside, outside))


def _detection_error(tp: Tensor, fp: Tensor) -> float:
    return float((0.5 * (1 - tp.double() / tp[-1]) + 0.5 * fp.double() / fp[-1]).min())


@metric("detection", "lower", compute=_detection_error)
def detection_error(inside: Array, outside: Array) -> float:
    r"""Smallest probability of an error where both kinds are equally likely. Lower is better; from 0 to 1/2.

    .. math:: \min_\delta \tfrac12 P_{in}(s \le \delta) + \tfrac12 P_{out}(s > \delta)

    >>> detection_error(torch.tensor([3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0]))
    0.16666666666666669
    """
    return _detection_error(*_accepted(inside, outside))


def _auroc(tp: Tensor, fp: Tensor) -> float:
    twice_won = ((tp[1:] + tp[:-1]) * fp.diff()).sum()  # pairs, in integers
    return int(twice_won) / (2 * int(tp[-1]) * int(fp[-1]))


@metric("detection", "higher", compute=_auroc)
def auroc(inside: Array, outside: Array) -> float:
    """Probability that an in-distribution row outscores an out-of-distribution row; ties count half. Higher is better.

    >>> auroc(torch.tensor([3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0]))
    0.9166666666666666
    """
    return _auroc(*_accepted(inside, outside))


def _average_precision(tp: Tensor, fp: Tensor) -> float:
    precision = tp[1:].double() / (tp[1:] + fp[1:])
    return float((tp.diff() * precision).sum() / tp[-1])


@metric("detection", "higher", compute=_average_precision)
def aupr_in(inside: Array, outside: Array) -> float:
    r"""Average precision in finding in-distribution rows. Higher is better; a random score gets their share.

    .. math:: \sum_k (R_k - R_{k-1}) P_k

    >>> aupr_in(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.8333333333333333
    """
    return _average_precision(*_accepted(inside, outside))


def _aupr_out(tp: Tensor, fp: Tensor) -> float:
    # what is not accepted as inside is found as outside
    return _average_precision((fp[-1] - fp).flip(0), (tp[-1] - tp).flip(0))


@metric("detection", "higher", compute=_aupr_out)
def aupr_out(inside: Array, outside: Array) -> float:
    """Average precision in finding out-of-distribution rows, by the negative score. Higher is better.

    >>> aupr_out(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.8333333333333333
    """
    return _aupr_out(*_accepted(inside, outside))


def roc_curve(inside: Array, outside: Array) -> ROC:
    """The receiver operating characteristic, one point for every distinct score and the origin.

    >>> roc_curve(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 3.0]))
    ROC(fpr=tensor([0.0000, 0.0000, 0.5000, 1.0000]), tpr=tensor([0.0000, 0.5000, 1.0000, 1.0000]))
    """
    tp, fp = _accepted(inside, outside)
    return ROC(fp / fp[-1], tp / tp[-1])


def detection(inside: Array, outside: Array) -> dict[str, float]:
    """All detection metrics from two score vectors, with one sort."""
    accepted = _accepted(inside, outside)
    return {name: one.compute(*accepted) for name, one in METRICS.items() if one.kind == "detection"}


def _accepted(inside: Array, outside: Array) -> tuple[Tensor, Tensor]:
    """Accepted rows of each kind at every distinct threshold, falling, after a first one that accepts none."""
    positive = vector("inside", inside)
    negative = vector("outside", outside).to(positive.device)
    dtype = torch.promote_types(positive.dtype, negative.dtype)
    scores, order = torch.cat([positive.to(dtype), negative.to(dtype)]).sort(descending=True)
    tp = (order < len(positive)).long().cumsum(0)
    accepted = torch.arange(1, len(scores) + 1, device=scores.device)
    last = torch.cat([scores[1:] != scores[:-1], torch.ones_like(scores[:1], dtype=torch.bool)])  # of equal scores
    start = tp.new_zeros(1)
    return torch.cat([start, tp[last]]), torch.cat([start, (accepted - tp)[last]])
