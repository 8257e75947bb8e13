r"""Calibration of predicted class probabilities.

All three errors are :math:`\sum_m \frac{|B_m|}{N} |\mathrm{acc}(B_m) - \mathrm{conf}(B_m)|` over bins :math:`B_m`;
they differ in the binned values and in the edges of the bins. Lower is better, 0 at best, 1 at worst.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_vsd._utils import check_integer
from pyro_vsd.metrics.base import Classes, columns, correct, labelled, metric
from pyro_vsd.prediction.base import Array

__all__ = ["Bins", "adaptive_ece", "classwise_ece", "ece", "reliability_bins"]


class Bins(NamedTuple):
    """The numbers of a reliability diagram, ``(M,)`` each; accuracy and confidence of an empty bin are NaN."""

    edges: Tensor  # (M + 1,)
    size: Tensor
    accuracy: Tensor
    confidence: Tensor


@metric(
    "classes", "lower",
    lambda batch: _bin_sums(batch.confidence, batch.hits, _equal_width(batch.num_bins, batch.probs)),
    lambda sums, seen: _gap(sums),
)  # fmt: skip
def ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    r"""Expected calibration error of the largest probability, in bins :math:`(\frac{m-1}{M}, \frac{m}{M}]`.

    It depends on the number of bins: compare methods with the same.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=10), 4)
    0.15
    """
    probs, labels = labelled(prediction, y)
    return _gap(_bin_sums(probs.amax(-1), correct(probs, labels), _equal_width(num_bins, probs)))


@metric("classes", "lower", lambda batch: batch.ranked, lambda kept, seen: _adaptive_gap(*columns(kept), seen.num_bins))
def adaptive_ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    """Expected calibration error of the largest probability, in bins with equal numbers of rows: O(N log N).

    Rows of equal confidence stay in one bin, so the order of rows does not matter.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(adaptive_ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=2), 4)
    0.15
    """
    probs, labels = labelled(prediction, y)
    return _adaptive_gap(probs.amax(-1), correct(probs, labels), num_bins)


@metric(
    "classes", "lower",
    lambda batch: _classwise_sums(batch.probs, batch.labels, batch.num_bins),
    lambda sums, seen: _classwise_gap(sums),
)  # fmt: skip
def classwise_ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    """Expected calibration error of every class's probability, averaged over classes.

    It sees errors that the largest probability hides. With many classes it is near zero, as most entries are.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(classwise_ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=10), 4)
    0.15
    """
    return _classwise_gap(_classwise_sums(*labelled(prediction, y), num_bins))


def reliability_bins(prediction: Classes, y: Array, num_bins: int = 15) -> Bins:
    """Accuracy and mean confidence of the rows in each bin of the largest probability.

    >>> bins = reliability_bins(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]), num_bins=2)
    >>> bins.size, bins.accuracy
    (tensor([0., 2.]), tensor([   nan, 0.5000]))
    """
    probs, labels = labelled(prediction, y)
    edges = _equal_width(num_bins, probs)
    count, hits, confidence = _bin_sums(probs.amax(-1), correct(probs, labels), edges).to(probs.dtype)
    return Bins(torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)]), count, hits / count, confidence / count)


def _equal_width(num_bins: int, like: Tensor) -> Tensor:
    """Inner edges 1/M ... (M-1)/M, ``(M - 1,)``. As quotients, so that a confidence of 0.07 equals an edge of 0.07."""
    check_integer("num_bins", num_bins, 1)
    return torch.arange(1, num_bins, dtype=like.dtype, device=like.device) / num_bins


def _bin_sums(values: Tensor, hits: Tensor, edges: Tensor) -> Tensor:
    """Rows, hits and summed values of each bin, ``(3, M)`` in float64: sums over batches add up."""
    bins = torch.bucketize(values, edges)  # bin m holds edges[m - 1] < value <= edges[m]
    size = len(edges) + 1
    count = torch.bincount(bins, minlength=size).double()
    return torch.stack([count, *(torch.bincount(bins, weights=w.double(), minlength=size) for w in (hits, values))])


def _gap(sums: Tensor) -> float:
    """Weighted mean of |accuracy - confidence| from ``(3, M)`` sums."""
    count, hits, confidence = sums.unbind(-2)
    return float((hits - confidence).abs().sum(-1) / count.sum(-1))


def _adaptive_gap(confidence: Tensor, hits: Tensor, num_bins: int) -> float:
    """The gap in bins that end at the confidences of rank N/M, 2N/M, ..."""
    check_integer("num_bins", num_bins, 1)
    ranks = torch.arange(1, num_bins, device=confidence.device) * len(confidence) // num_bins
    edges = confidence.sort().values[(ranks - 1).clamp(min=0)]
    return _gap(_bin_sums(confidence, hits, edges))


def _classwise_sums(probs: Tensor, labels: Tensor, num_bins: int) -> Tensor:
    """Sums of each class's bins, ``(C, 3, M)``."""
    edges, columns = _equal_width(num_bins, probs), enumerate(probs.unbind(-1))
    return torch.stack([_bin_sums(p.contiguous(), (labels == c).to(probs.dtype), edges) for c, p in columns])


def _classwise_gap(sums: Tensor) -> float:
    """Mean over classes of the gap."""
    return sum(_gap(one) for one in sums) / len(sums)
