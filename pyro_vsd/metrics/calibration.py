r"""Whether predicted class probabilities come true as often as they say.

All three errors are :math:`\sum_m \frac{|B_m|}{N} |\mathrm{acc}(B_m) - \mathrm{conf}(B_m)|` over bins :math:`B_m`;
they differ in what is put into bins, and where the bins end. Lower is better, 0 at best, 1 at worst.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_vsd.metrics.classification import correct
from pyro_vsd.metrics.inputs import Array, Classes, labelled

__all__ = ["Bins", "adaptive_ece", "classwise_ece", "ece", "reliability_bins"]


class Bins(NamedTuple):
    """A reliability diagram in numbers, ``(M,)`` each; accuracy and confidence of an empty bin are NaN."""

    edges: Tensor  # (M + 1,)
    size: Tensor
    accuracy: Tensor
    confidence: Tensor


def ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    r"""Expected calibration error of the largest probability, in bins :math:`(\frac{m-1}{M}, \frac{m}{M}]`.

    The definition of the paper's appendix. It depends on the number of bins: compare methods with the same.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=10), 4)
    0.15
    """
    probs, labels = labelled(prediction, y)
    return gap(bin_sums(probs.amax(-1), correct(probs, labels), equal_width(num_bins, probs)))


def adaptive_ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    """Expected calibration error of the largest probability, in bins of equally many rows.

    Rows of equal confidence stay in one bin, so the order of rows does not matter. All confidences have to be known
    before the bins are: O(N log N).

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(adaptive_ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=2), 4)
    0.15
    """
    probs, labels = labelled(prediction, y)
    return adaptive_gap(probs.amax(-1), correct(probs, labels), num_bins)


def classwise_ece(prediction: Classes, y: Array, num_bins: int = 15) -> float:
    """Expected calibration error of every class's probability, averaged over classes.

    Sees what the largest probability hides; with many classes most entries are near zero and so is the error.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> round(classwise_ece(probs, torch.tensor([0, 0, 0, 1]), num_bins=10), 4)
    0.15
    """
    probs, labels = labelled(prediction, y)
    return classwise_gap(classwise_sums(probs, labels, equal_width(num_bins, probs)))


def reliability_bins(prediction: Classes, y: Array, num_bins: int = 15) -> Bins:
    """Accuracy and mean confidence of the rows in each bin of the largest probability.

    >>> bins = reliability_bins(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]), num_bins=2)
    >>> bins.size, bins.accuracy
    (tensor([0., 2.]), tensor([   nan, 0.5000]))
    """
    probs, labels = labelled(prediction, y)
    edges = equal_width(num_bins, probs)
    count, hits, confidence = bin_sums(probs.amax(-1), correct(probs, labels), edges).to(probs.dtype)
    return Bins(torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)]), count, hits / count, confidence / count)


def equal_width(num_bins: int, like: Tensor) -> Tensor:
    """Inner edges 1/M ... (M-1)/M, ``(M - 1,)``. As quotients, so that a confidence of 0.07 meets an edge of 0.07."""
    if num_bins < 1:
        raise ValueError(f"expected num_bins of at least 1, got {num_bins}.")
    return torch.arange(1, num_bins, dtype=like.dtype, device=like.device) / num_bins


def bin_sums(values: Tensor, hits: Tensor, edges: Tensor) -> Tensor:
    """Rows, hits and summed values of each bin, ``(3, M)`` in float64: sums over batches add up."""
    bins = torch.bucketize(values, edges)  # bin m holds edges[m - 1] < value <= edges[m]
    size = len(edges) + 1
    count = torch.bincount(bins, minlength=size).double()
    return torch.stack([count, *(torch.bincount(bins, weights=w.double(), minlength=size) for w in (hits, values))])


def gap(sums: Tensor) -> float:
    """Weighted mean of |accuracy - confidence| from ``(3, M)`` sums."""
    count, hits, confidence = sums.unbind(-2)
    return float((hits - confidence).abs().sum(-1) / count.sum(-1))


def adaptive_gap(confidence: Tensor, hits: Tensor, num_bins: int) -> float:
    """The gap in bins that end at the confidences of rank N/M, 2N/M, ..."""
    num_bins = len(equal_width(num_bins, confidence)) + 1
    ranks = torch.arange(1, num_bins, device=confidence.device) * len(confidence) // num_bins
    edges = confidence.sort().values[(ranks - 1).clamp(min=0)]
    return gap(bin_sums(confidence, hits, edges))


def classwise_sums(probs: Tensor, labels: Tensor, edges: Tensor) -> Tensor:
    """Sums of each class's bins, ``(C, 3, M)``."""
    per_class = (
        bin_sums(column.contiguous(), (labels == index).to(probs.dtype), edges)
        for index, column in enumerate(probs.unbind(-1))
    )
    return torch.stack(list(per_class))


def classwise_gap(sums: Tensor) -> float:
    """Mean over classes of the gap."""
    return sum(gap(one) for one in sums) / len(sums)
