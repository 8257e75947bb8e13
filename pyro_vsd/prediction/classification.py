"""The prediction of classes."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_vsd.prediction.base import (
    IGNORED,
    Array,
    Prediction,
    check_floats,
    check_labels,
    check_shape,
    check_target,
    not_kept,
    to_tensor,
)

__all__ = ["ClassificationPrediction"]


class ClassificationPrediction(Prediction):
    r"""Predicted classes: mean probabilities and the two parts of their entropy, in nats.

    .. math:: \bar p = \frac1S \sum_s p_s, \qquad H[\bar p] = \frac1S \sum_s H[p_s] + I

    ``entropy`` is the total. ``expected_entropy`` is aleatoric. ``mutual_information`` is epistemic: the samples
    disagree.

    Rows of several classes have further dimensions: ``(N, L, C)`` for the tokens of a sequence, ``(N, L, 2)`` for L
    labels that are yes or no. Labels, confidences and entropies then are ``(N, L)``. Metrics count each entry, without
    those whose target is -100.

    :param probs: mean probabilities, ``(N, C)`` or ``(N, ..., C)``.
    :param expected_entropy: mean over samples of the entropy, ``(N,)`` or ``(N, ...)``.
    :param num_samples: number ``S`` of posterior samples.
    :param samples: each sample's probabilities, ``(S, N, C)`` or ``(S, N, ..., C)``.
    :param weights: the weight of each sample, ``(S,)``, where they differ.

    >>> agree, differ = torch.tensor([0.5, 0.5]), torch.eye(2)
    >>> prediction = ClassificationPrediction.from_samples(torch.stack([agree.expand(2, 2), differ], 1))
    >>> prediction.entropy
    tensor([0.6931, 0.6931])
    >>> prediction.mutual_information
    tensor([0.0000, 0.6931])
    """

    def __init__(
        self,
        probs: Tensor,
        expected_entropy: Tensor,
        num_samples: int,
        *,
        samples: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if probs.dim() < 2:
            raise ValueError(f"probs must have shape (N, C) or (N, ..., C), not {tuple(probs.shape)}.")
        super().__init__(probs, probs * (1 - probs), num_samples, samples=samples, weights=weights)
        #: mean over samples of the entropy in nats, ``(N,)``: aleatoric uncertainty
        self.expected_entropy = check_shape("expected_entropy", expected_entropy, probs.shape[:-1])

    @classmethod
    def from_samples(cls, samples: Tensor, weights: Tensor | None = None) -> "ClassificationPrediction":
        """From each sample's probabilities ``(S, N, ..., C)``, which are kept, and weight ``(S,)``."""
        check_floats("samples", samples)
        if samples.dim() < 3 or len(samples) < 1:
            raise ValueError(f"samples must have shape (S, N, C) with S of at least 1, not {tuple(samples.shape)}.")
        samples = samples.detach()
        # sample by sample: the entropy terms of all at once would double the memory
        entropies = torch.stack([torch.special.entr(probs).sum(-1) for probs in samples])  # (S, N)
        found = cls(samples.mean(0), entropies.mean(0), len(samples), samples=samples, weights=weights)
        if weights is not None:
            found.mean, found.expected_entropy = found.average(samples), found.average(entropies)
            found.variance = found.mean * (1 - found.mean)
        return found

    @property
    def probs(self) -> Tensor:
        """Mean probabilities, ``(N, C)``."""
        return self.mean

    @property
    def labels(self) -> Tensor:
        """Most probable class, ``(N,)``; the first of equals."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Largest mean probability, ``(N,)``."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities in nats, ``(N,)``: total uncertainty."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy, ``(N,)``: epistemic uncertainty. Rounding below zero is cut off."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def log_prob(self, y: Array) -> Tensor:
        """Log of the mean probability of class ``y (N,)``, one value per row; needs no samples.

        For targets ``(N, ...)`` that of all classes of a row together, which needs samples.
        """
        y = to_tensor(y, self.mean.device)
        if self.probs.dim() == 2:
            labels = check_labels(y, len(self), self.probs.shape[-1])
            return self.probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
        if self.samples is None:
            raise not_kept("log_prob")
        y = check_target(y, tuple(self.probs.shape[:-1]))
        counted = y != IGNORED
        labels = check_labels((y * counted).flatten(), y.numel(), self.probs.shape[-1]).reshape(1, *y.shape, 1)
        by_entry = self.samples.gather(-1, labels.expand(self.num_samples, *labels.shape[1:])).squeeze(-1).log()
        by_row = torch.where(counted, by_entry, torch.zeros_like(by_entry)).flatten(2).sum(-1)
        return by_row.logsumexp(0) - math.log(self.num_samples)

    def by_entry(self, y: Array | None = None) -> "tuple[ClassificationPrediction, Any]":
        """Each entry of rows of several classes as a row ``(M, C)`` of its own, with its target ``(M,)``; without those
        whose target is -100."""
        flat = ClassificationPrediction(
            self.probs.flatten(0, -2), self.expected_entropy.flatten(), self.num_samples,
            samples=None if self.samples is None else self.samples.flatten(1, -2),
        )  # fmt: skip
        if y is None:
            return flat, None
        target = check_target(to_tensor(y, self.mean.device), tuple(self.probs.shape[:-1])).flatten()
        counted = target != IGNORED
        return (flat, target) if bool(counted.all()) else (flat[counted], target[counted])

    def _columns(self) -> dict[str, Tensor]:
        columns = {"label": self.labels, "confidence": self.confidence, "entropy": self.entropy}
        return columns | {"mutual_information": self.mutual_information, "probs": self.probs}
