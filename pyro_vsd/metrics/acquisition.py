"""Which inputs to label next."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pyro_vsd.metrics.classification import mutual_information, predictive_entropy
from pyro_vsd.metrics.inputs import Classes, probabilities

__all__ = ["acquisition"]


def acquisition(prediction: Classes, kind: Literal["entropy", "bald", "variation_ratio"]) -> Tensor:
    r"""Score of every candidate, ``(N,)``: label the highest.

    ``"entropy"``: :math:`H[\bar p]`, total uncertainty. ``"bald"``: the mutual information between label and weights
    (Houlsby et al., 2011), which leaves out what no label can settle; rows are scored one by one, not as a batch.
    ``"variation_ratio"``: :math:`1 - \max_c \bar p_c` (Gal et al., 2017), the chance that the predicted label is wrong.

    :param prediction: a ClassificationPrediction, ``(N, C)`` probabilities or ``(S, N, C)`` samples of them.
    :param kind: the score; ``"bald"`` needs samples.

    >>> import torch
    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    >>> acquisition(probs, "variation_ratio")
    tensor([0.1000, 0.4000])
    >>> acquisition(probs, "entropy").argmax().item()
    1
    """
    if kind == "entropy":
        return predictive_entropy(prediction)
    if kind == "bald":
        return mutual_information(prediction)
    if kind == "variation_ratio":
        return 1 - probabilities(prediction).amax(-1)
    raise ValueError(f"expected kind 'entropy', 'bald' or 'variation_ratio', got {kind!r}.")
