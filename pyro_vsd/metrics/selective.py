"""Selective prediction: the loss on the rows that are kept when the least certain ones are rejected."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_vsd._utils import check_choice
from pyro_vsd.metrics.base import Classes, columns, correct, has_classes, labelled, metric, targets, vector
from pyro_vsd.metrics.out_of_distribution import SCORES, ood_score
from pyro_vsd.prediction import Prediction, RegressionPrediction
from pyro_vsd.prediction.base import Array

__all__ = ["RiskCoverage", "aurc", "risk_coverage"]

#: The ranking of rows: a name, or scores ``(N,)`` that are higher for more certain rows.
Certainty = Literal["max_probability", "entropy", "mutual_information", "stddev", "epistemic"] | Array
#: From a prediction and its targets to one loss for each row, ``(N,)``.
Loss = Callable[[Any, Any], Tensor]


class RiskCoverage(NamedTuple):
    """Mean loss of the kept rows as the threshold falls: one point for each distinct score, ``(M,)`` each.

    A row is kept where its score is at least the threshold. Rows of equal score are kept or rejected together, so the
    order of rows does not matter. The last point keeps all rows.

    >>> curve = RiskCoverage(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.25]), torch.tensor([0.9, 0.6]))
    >>> curve.at(0.8), curve.within(0.1)
    ((1.0, 0.25, 0.6), (0.5, 0.0, 0.9))
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor

    def at(self, coverage: float) -> tuple[float, float, float]:
        """Coverage, risk and threshold at the smallest coverage of at least this share of rows."""
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage must be above 0 and at most 1, not {coverage}.")
        # a share such as 0.3 of 10 rows may round to either side
        return self._point(int((self.coverage < coverage * (1 - 1e-12)).sum()))

    def within(self, risk: float) -> tuple[float, float, float]:
        """Coverage, risk and threshold at the largest coverage with at most this risk."""
        good = (self.risk <= risk).nonzero().flatten()
        if not len(good):
            raise ValueError(f"risk={risk} is below the smallest risk of the curve, {float(self.risk.min()):.4g}.")
        return self._point(int(good[-1]))

    def _point(self, index: int) -> tuple[float, float, float]:
        return float(self.coverage[index]), float(self.risk[index]), float(self.threshold[index])


def risk_coverage(
    prediction: Classes, y: Array, *, score: Certainty | None = None, loss: Loss | None = None
) -> RiskCoverage:
    r"""Mean loss of the rows that are kept, against their share. Costs one sort.

    .. math:: R(t) = E[\ell_n \mid s_n \ge t]

    :param prediction: any prediction, ``(N, C)`` probabilities or ``(S, N, C)`` samples of them.
    :param y: its targets.
    :param score: the ranking of rows. For classes ``"max_probability"`` (the default), or ``"entropy"`` or
        ``"mutual_information"`` with a minus sign. For regression minus the standard deviation, ``"stddev"`` (the
        default) or ``"epistemic"``; over several outputs it is the root of the mean variance. Or your own scores
        ``(N,)``, higher for more certain rows.
    :param loss: from prediction and y to one loss for each row. By default the error, 0 or 1, for classes, and the
        squared error, averaged over outputs, for regression.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    >>> curve = risk_coverage(probs, torch.tensor([0, 1, 0, 1]))
    >>> curve.coverage, curve.risk
    (tensor([0.2500, 0.5000, 1.0000]), tensor([0.0000, 0.0000, 0.2500]))
    """
    scores, losses = _scores(prediction, score), _losses(prediction, y, loss)
    size, total, threshold = _steps(scores, losses)
    return RiskCoverage(size / len(scores), total / size, threshold)


def _area_of_hits(confidence: Tensor, hits: Tensor) -> float:
    return _area(confidence, 1 - hits.double())


@metric("classes", "lower", lambda batch: batch.ranked, lambda kept, seen: _area_of_hits(*columns(kept)))
def aurc(prediction: Classes, y: Array, *, score: Certainty | None = None, loss: Loss | None = None) -> float:
    r"""Area under the risk–coverage curve. Lower is better.

    .. math:: \frac1N \sum_{k=1}^N R_k

    :math:`R_k` is the mean loss of the k most certain rows (Geifman, Uziel and El-Yaniv, 2019), averaged over all
    orders of rows with equal scores. A random score gets the mean loss of all rows; a perfect one does not reach zero.
    The parameters are those of :func:`risk_coverage`.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    >>> round(aurc(probs, torch.tensor([0, 1, 0, 1])), 6)  # (0 + 0 + 1/6 + 1/4) / 4
    0.104167
    """
    return _area(_scores(prediction, score), _losses(prediction, y, loss))


def _area(scores: Tensor, losses: Tensor) -> float:
    """Mean over k of the mean loss of the k best scores, ties averaged over their orders."""
    size, total, _ = _steps(scores, losses)
    start, before = torch.cat([size.new_zeros(1), size[:-1]]), torch.cat([total.new_zeros(1), total[:-1]])
    group = torch.repeat_interleave(torch.arange(len(size), device=size.device), (size - start).long())
    kept = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    each = ((total - before) / (size - start))[group]
    return float(((before[group] + (kept - start[group]) * each) / kept).mean())


def _steps(scores: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kept rows and the sum of their losses, in double precision, at every distinct score, falling."""
    ordered, order = scores.sort(descending=True)
    last = torch.cat([ordered[1:] != ordered[:-1], torch.ones_like(ordered[:1], dtype=torch.bool)])  # of equal scores
    total = losses[order].double().cumsum(0)[last]
    return last.nonzero().flatten().double() + 1, total, ordered[last]


def _num_rows(prediction: Classes) -> int:
    return len(prediction) if isinstance(prediction, Prediction) else prediction.shape[-2]


def _scores(prediction: Classes, score: Certainty | None) -> Tensor:
    """Score of every row, ``(N,)``, higher for more certain rows."""
    if score is not None and not isinstance(score, str):
        return vector("score", score, _num_rows(prediction))
    if has_classes(prediction):
        score = score or "max_probability"
        check_choice("score", score, SCORES)
        return ood_score(prediction, score)  # type: ignore[arg-type]
    assert isinstance(prediction, Prediction)
    epistemic = ("epistemic",) if isinstance(prediction, RegressionPrediction) else ()
    check_choice("score", score or "stddev", ("stddev", *epistemic))
    variance = getattr(prediction, "epistemic" if score == "epistemic" else "variance")
    return -vector("score", variance.flatten(1).mean(-1) if variance.dim() > 1 else variance).sqrt()


def _losses(prediction: Classes, y: Array, loss: Loss | None) -> Tensor:
    """Loss of every row, ``(N,)``."""
    if loss is not None:
        if not callable(loss):
            raise TypeError(f"loss must be a function of prediction and y that returns one loss per row, not {loss!r}.")
        return vector("loss", loss(prediction, y), _num_rows(prediction))
    if has_classes(prediction):
        return 1 - correct(*labelled(prediction, y))
    assert isinstance(prediction, Prediction)
    squared = (prediction.mean - targets(prediction.mean, y)).square()
    return squared.flatten(1).mean(-1) if squared.dim() > 1 else squared
