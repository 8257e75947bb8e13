"""How many plain networks a prediction is worth."""

import math
from collections.abc import Sequence

from pyro_vsd.metrics.regression import log_likelihood
from pyro_vsd.prediction import Prediction, mixture
from pyro_vsd.prediction.base import Array

__all__ = ["deep_ensemble_equivalent"]


def deep_ensemble_equivalent(prediction: Prediction, plain: Sequence[Prediction], y: Array) -> float:
    """How many plain networks, mixed with equal weights, reach the log-likelihood of a prediction.

    The mixture of m of M networks has the mean log-likelihood of the M neighbouring choices, and between whole numbers
    it is interpolated. 1 where one network is as good, infinite where all of them together are not.

    Ashukha et al., "Pitfalls of In-Domain Uncertainty Estimation and Ensembling in Deep Learning", 2020.

    :param prediction: of the same rows; for any method.
    :param plain: the prediction of each plain network, at its best σ or temperature for a fair comparison.
    :param y: targets.

    >>> unsure, wrong = (torch.full((1, 1), p) for p in (0.6, 0.4))
    >>> plain = [vsd.ClassificationPrediction.from_samples(torch.stack([1 - p, p], -1)) for p in (wrong, unsure)]
    >>> round(deep_ensemble_equivalent(plain[1], plain, torch.ones(1).long()), 2)
    inf
    """
    if len(plain) < 2:
        raise ValueError(f"plain must hold the predictions of at least two networks, not {len(plain)}.")
    number, score = len(plain), log_likelihood(prediction, y)
    before = -math.inf
    for size in range(1, number + 1):
        starts = range(number if size < number else 1)
        choices = [[plain[(start + i) % number] for i in range(size)] for start in starts]
        now = math.fsum(log_likelihood(mixture(chosen), y) for chosen in choices) / len(choices)
        if now >= score:
            return float(size) if before == -math.inf else size - 1 + (score - before) / (now - before)
        before = max(now, before)
    return math.inf
