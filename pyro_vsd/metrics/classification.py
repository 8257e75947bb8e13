"""How good predicted class probabilities are, and how sure.

Every function takes a :class:`~pyro_vsd.prediction.ClassificationPrediction`, mean probabilities ``(N, C)`` or
samples of them ``(S, N, C)``, as tensors or arrays, and labels ``y (N,)`` numbered from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_vsd.metrics.inputs import Array, Classes, classes, labelled, mean, probabilities

__all__ = ["accuracy", "brier", "error_rate", "mutual_information", "nll", "predictive_entropy"]


def accuracy(prediction: Classes, y: Array) -> float:
    """Share of rows whose most probable class is the right one. Higher is better, 1 at best.

    Of equally probable classes the first counts as predicted.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    return mean(correct(*labelled(prediction, y)))


def error_rate(prediction: Classes, y: Array) -> float:
    """One minus the accuracy. Lower is better, 0 at best.

    >>> error_rate(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1]))
    0.0
    """
    return mean(1 - correct(*labelled(prediction, y)))


def nll(prediction: Classes, y: Array) -> float:
    r"""Negative log-likelihood :math:`-\frac1N \sum_n \log \bar p_{n y_n}` in nats. Lower is better, 0 at best.

    Infinite where a class of predicted probability zero turned out right: nothing is clipped.

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    return mean(row_nll(*labelled(prediction, y)))


def brier(prediction: Classes, y: Array) -> float:
    r"""Brier score :math:`\frac1N \sum_n \sum_c (\bar p_{nc} - 1[y_n = c])^2`. Lower is better; from 0 to 2.

    Summed over classes: for two classes this is twice the one-sided score.

    >>> round(brier(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])), 4)
    0.37
    """
    return mean(row_brier(*labelled(prediction, y)))


def predictive_entropy(prediction: Classes) -> Tensor:
    r"""Entropy :math:`-\sum_c \bar p_c \log \bar p_c` of every row in nats, ``(N,)``: total uncertainty.

    From 0 to :math:`\log C`. Low is right on familiar inputs, high on unfamiliar ones. The paper prints a factor
    :math:`1/C`, which the usual definition, ours, has not.

    >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probabilities(prediction)).sum(-1)


def mutual_information(prediction: Classes) -> Tensor:
    r"""Entropy of the mean minus mean of the entropies, :math:`H[\bar p] - \frac1S \sum_s H[p_s]`, ``(N,)`` in nats.

    Epistemic uncertainty: what the samples disagree about. 0 where all agree, and for a single sample.

    >>> mutual_information(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
    tensor([0.6931, 0.0000])
    """
    return classes(prediction, "mutual_information").mutual_information


def correct(probs: Tensor, labels: Tensor) -> Tensor:
    """1 where the most probable class is the label, else 0, ``(N,)``."""
    return (probs.argmax(-1) == labels).to(probs.dtype)


def row_nll(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-probability of the label, ``(N,)``."""
    return -probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()


def row_brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance to the one-hot label, ``(N,)``."""
    at_label = probs.gather(-1, labels.unsqueeze(-1))
    # the label's own term apart: (1 - p)^2 + sum of the others, without a copy of all probabilities
    others = probs.square().sum(-1) - at_label.squeeze(-1).square()
    return (1 - at_label.squeeze(-1)).square() + others.clamp(min=0)
