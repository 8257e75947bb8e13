"""Quality and uncertainty of predicted class probabilities.

Every function takes a :class:`~pyro_vsd.prediction.ClassificationPrediction`, mean probabilities ``(N, C)`` or
samples of them ``(S, N, C)``, and labels ``y (N,)`` numbered from 0.
"""

from typing import Literal

import torch
from torch import Tensor

from pyro_vsd._utils import check_choice
from pyro_vsd.metrics.base import Classes, correct, labelled, mean, metric, probabilities, total, with_samples
from pyro_vsd.prediction.base import Array

__all__ = ["accuracy", "acquisition", "brier", "error_rate", "mutual_information", "nll", "predictive_entropy"]


@metric("classes", "higher", lambda batch: total(batch.hits))
def accuracy(prediction: Classes, y: Array) -> float:
    """Share of rows whose most probable class, of several the first, is the label. Higher is better, 1 at best.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    return mean(correct(*labelled(prediction, y)))


@metric("classes", "lower", lambda batch: total(batch.hits), lambda hits, seen: 1 - float(hits) / seen.num_rows)
def error_rate(prediction: Classes, y: Array) -> float:
    """One minus the accuracy. Lower is better, 0 at best.

    >>> error_rate(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1]))
    0.0
    """
    return mean(1 - correct(*labelled(prediction, y)))


@metric("classes", "lower", lambda batch: total(_row_nll(batch.probs, batch.labels)))
def nll(prediction: Classes, y: Array) -> float:
    r"""Negative log-likelihood in nats. Lower is better, 0 at best; infinite where a label had probability zero.

    .. math:: -\frac1N \sum_n \log \bar p_{n y_n}

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    return mean(_row_nll(*labelled(prediction, y)))


@metric("classes", "lower", lambda batch: total(_row_brier(batch.probs, batch.labels)))
def brier(prediction: Classes, y: Array) -> float:
    r"""Brier score. Lower is better; from 0 to 2, for two classes twice the one-sided score.

    .. math:: \frac1N \sum_n \sum_c (\bar p_{nc} - 1[y_n = c])^2

    >>> round(brier(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])), 4)
    0.37
    """
    return mean(_row_brier(*labelled(prediction, y)))


@metric("classes", "", lambda batch: total(torch.special.entr(batch.probs).sum(-1)))
def predictive_entropy(prediction: Classes) -> Tensor:
    r"""Entropy of every row in nats, ``(N,)``: total uncertainty, from 0 to :math:`\log C`.

    .. math:: -\sum_c \bar p_c \log \bar p_c

    The paper prints an extra factor :math:`1/C`; we use the usual definition.

    >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probabilities(prediction)).sum(-1)


@metric("class samples", "", lambda batch: total(with_samples(batch.prediction, "report").mutual_information))
def mutual_information(prediction: Classes) -> Tensor:
    r"""Epistemic uncertainty of every row in nats, ``(N,)``: 0 where all samples agree, and for a single sample.

    .. math:: H[\bar p] - \frac1S \sum_s H[p_s]

    >>> mutual_information(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
    tensor([0.6931, 0.0000])
    """
    return with_samples(prediction, "mutual_information").mutual_information


def acquisition(prediction: Classes, kind: Literal["entropy", "bald", "variation_ratio"]) -> Tensor:
    r"""Score of every candidate for labelling, ``(N,)``: label the highest.

    :param kind: ``"entropy"``: :math:`H[\bar p]`, total uncertainty. ``"bald"``: the mutual information between label
        and weights (Houlsby et al., 2011), without the uncertainty that no label can remove; it needs samples.
        ``"variation_ratio"``: :math:`1 - \max_c \bar p_c` (Gal et al., 2017). Rows are scored one by one.

    >>> acquisition(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), "variation_ratio")
    tensor([0.1000, 0.4000])
    """
    check_choice("kind", kind, ("entropy", "bald", "variation_ratio"))
    if kind == "entropy":
        return predictive_entropy(prediction)
    return mutual_information(prediction) if kind == "bald" else 1 - probabilities(prediction).amax(-1)


def _row_nll(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-probability of the label, ``(N,)``."""
    return -probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()


def _row_brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance to the one-hot label, ``(N,)``."""
    at_label = probs.gather(-1, labels.unsqueeze(-1))
    # the label's own term apart: (1 - p)^2 + sum of the others, without a copy of all probabilities
    others = probs.square().sum(-1) - at_label.squeeze(-1).square()
    return (1 - at_label.squeeze(-1)).square() + others.clamp(min=0)
