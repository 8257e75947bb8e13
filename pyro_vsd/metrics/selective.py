"""Decide or abstain: what loss remains on the rows that are kept when the least sure ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_vsd.metrics.classification import correct
from pyro_vsd.metrics.inputs import Array, Classes, labelled, targets, vector
from pyro_vsd.metrics.ood import ood_score
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["Loss", "RiskCoverage", "Sureness", "aurc", "risk_coverage"]

#: What rows are ranked by: a name, or numbers ``(N,)`` that are higher for surer rows.
Sureness = Literal["max_probability", "entropy", "mutual_information", "stddev", "epistemic"] | Array
#: From a prediction and its targets to one loss for each row, ``(N,)``.
Loss = Callable[[Any, Any], Tensor]


class RiskCoverage(NamedTuple):
    """Mean loss of the kept rows as the threshold falls: one point for each distinct score, ``(M,)`` each.

    A row is kept where its score is at least the threshold. Rows of equal score are kept or refused together, so the
    order of rows does not matter. The last point keeps all rows.
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor

    def at(self, coverage: float) -> tuple[float, float, float]:
        """Coverage, risk and threshold where at least this share of rows is kept, and no more than need be.

        >>> curve = RiskCoverage(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.25]), torch.tensor([0.9, 0.6]))
        >>> curve.at(0.8)
        (1.0, 0.25, 0.6)
        """
        if not 0 < coverage <= 1:
            raise ValueError(f"expected coverage above 0 and at most 1, got {coverage}.")
        # a share such as 0.3 of 10 rows may round to either side
        index = int((self.coverage < coverage * (1 - 1e-12)).sum())
        return self._point(index)

    def within(self, risk: float) -> tuple[float, float, float]:
        """Coverage, risk and threshold where most rows are kept at no more than this risk.

        >>> curve = RiskCoverage(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.25]), torch.tensor([0.9, 0.6]))
        >>> curve.within(0.1)
        (0.5, 0.0, 0.9)
        """
        good = (self.risk <= risk).nonzero().flatten()
        if not len(good):
            raise ValueError(
                f"expected a risk that some threshold keeps to, got {risk}, below the smallest, "
                f"{float(self.risk.min()):.4g}. Allow more, or refuse every row."
            )
        return self._point(int(good[-1]))

    def _point(self, index: int) -> tuple[float, float, float]:
        return float(self.coverage[index]), float(self.risk[index]), float(self.threshold[index])


def risk_coverage(
    prediction: Classes, y: Array, *, score: Sureness | None = None, loss: Loss | None = None
) -> RiskCoverage:
    r"""Mean loss of the rows that are kept, against their share: :math:`R(t) = E[\ell_n \mid s_n \ge t]`.

    Costs one sort.

    :param prediction: any prediction, ``(N, C)`` probabilities or ``(S, N, C)`` samples of them.
    :param y: its targets.
    :param score: what rows are ranked by. For classes ``"max_probability"`` (the default), or ``"entropy"`` or
        ``"mutual_information"``, both with a minus sign; for numbers ``"stddev"`` (the default) or ``"epistemic"``,
        standard deviations with a minus sign, several outputs of a row joined as root of the mean variance. Or own
        scores ``(N,)``, higher for surer rows.
    :param loss: from prediction and y to one loss for each row. By default the error, 0 or 1, for classes, and the
        squared error, averaged over outputs, for numbers.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    >>> curve = risk_coverage(probs, torch.tensor([0, 1, 0, 1]))
    >>> curve.coverage, curve.risk
    (tensor([0.2500, 0.5000, 1.0000]), tensor([0.0000, 0.0000, 0.2500]))
    """
    sure, losses = _sureness(prediction, score), _losses(prediction, y, loss)
    size, total, threshold = _steps(sure, losses)
    return RiskCoverage(size / len(sure), total / size, threshold)


def aurc(prediction: Classes, y: Array, *, score: Sureness | None = None, loss: Loss | None = None) -> float:
    r"""Area under the risk–coverage curve, :math:`\frac1N \sum_{k=1}^N R_k`. Lower is better.

    :math:`R_k` is the mean loss of the k surest rows (Geifman, Uziel and El-Yaniv, 2019). Among rows of equal score
    no order is right: theirs is the mean over all orders, in which each of them counts with their mean loss. A score
    that knows nothing gets the mean loss of all rows; a perfect one not zero, but what its wrong rows cost at the end.

    Arguments are those of :func:`risk_coverage`.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    >>> round(aurc(probs, torch.tensor([0, 1, 0, 1])), 6)  # (0 + 0 + 1/6 + 1/4) / 4
    0.104167
    """
    return area(_sureness(prediction, score), _losses(prediction, y, loss))


def area(sure: Tensor, losses: Tensor) -> float:
    """Mean over k of the mean loss of the k surest rows, ties averaged over their orders."""
    size, total, _ = _steps(sure, losses)
    start, before = torch.cat([size.new_zeros(1), size[:-1]]), torch.cat([total.new_zeros(1), total[:-1]])
    group = torch.repeat_interleave(torch.arange(len(size), device=size.device), (size - start).long())
    kept = torch.arange(1, len(sure) + 1, dtype=torch.float64, device=sure.device)
    each = ((total - before) / (size - start))[group]
    return float(((before[group] + (kept - start[group]) * each) / kept).mean())


def _steps(sure: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kept rows and the sum of their losses, in double precision, at every distinct score, falling."""
    ordered, order = sure.sort(descending=True)
    last = torch.cat([ordered[1:] != ordered[:-1], torch.ones_like(ordered[:1], dtype=torch.bool)])  # of equal scores
    total = losses[order].double().cumsum(0)[last]
    return last.nonzero().flatten().double() + 1, total, ordered[last]


def _sureness(prediction: Classes, score: Sureness | None) -> Tensor:
    """Score of every row, ``(N,)``, higher for surer ones."""
    numbers = isinstance(prediction, Prediction) and not isinstance(prediction, ClassificationPrediction)
    if score is None:
        score = "stddev" if numbers else "max_probability"
    if not isinstance(score, str):
        rows = len(prediction) if isinstance(prediction, Prediction) else prediction.shape[-2]
        scores = vector("score", score)
        if len(scores) != rows:
            raise ValueError(f"expected score of shape ({rows},), one for each row, got {tuple(scores.shape)}.")
        return scores
    if not numbers:
        if score not in ("max_probability", "entropy", "mutual_information"):
            raise ValueError(
                "expected score 'max_probability', 'entropy' or 'mutual_information' for class probabilities, got "
                f"{score!r}."
            )
        return ood_score(prediction, score)
    assert isinstance(prediction, Prediction)
    if score == "epistemic" and isinstance(prediction, RegressionPrediction):
        variance = prediction.epistemic
    elif score == "stddev":
        variance = prediction.variance
    else:
        raise ValueError(
            f"expected score 'stddev' or, for a RegressionPrediction, 'epistemic', got {score!r} for a "
            f"{type(prediction).__name__}."
        )
    return -vector("score", variance.flatten(1).mean(-1) if variance.dim() > 1 else variance).sqrt()


def _losses(prediction: Classes, y: Array, loss: Loss | None) -> Tensor:
    """Loss of every row, ``(N,)``."""
    if loss is not None:
        if not callable(loss):
            raise TypeError(
                f"expected loss as a function from prediction and y to one number for each row, got {loss!r}. The "
                "negative log-likelihood is loss=lambda prediction, y: -prediction.log_prob(y)."
            )
        rows = len(prediction) if isinstance(prediction, Prediction) else prediction.shape[-2]
        losses = vector("loss", loss(prediction, y))
        if len(losses) != rows:
            raise ValueError(f"expected a loss of shape ({rows},), one for each row, got {tuple(losses.shape)}.")
        return losses
    if isinstance(prediction, Prediction) and not isinstance(prediction, ClassificationPrediction):
        squared = (prediction.mean - targets(prediction.mean, y)).square()
        return squared.flatten(1).mean(-1) if squared.dim() > 1 else squared
    return 1 - correct(*labelled(prediction, y))
