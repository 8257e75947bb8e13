"""How good, how sure and how noisy the predictions on held-out rows are."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from pyro_vsd import metrics
from pyro_vsd.diagnosis.rows import Rows, concatenated, count_rows
from pyro_vsd.infer import predict
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.training.data import arguments

__all__ = ["measure_prediction", "samples_needed"]

# A log-likelihood is stable where bias and spread over draws are below this, in nats per datum.
TOLERANCE = 0.01


def measure_prediction(
    model: Any, guide: Any, rows: Rows, num_samples: int, seed: int, at_most: int, device: torch.device
) -> dict[str, Any] | str:
    """Measures by name; or in words why there are none."""
    batches = list(rows.batches(seed, at_most))
    args, kwargs = arguments(concatenated(batches), device)
    if kwargs or len(args) < 2:
        return "batches are not tuples (x, y) that end with the targets"
    *inputs, y = args
    try:
        inspect.signature(model.forward if isinstance(model, nn.Module) else model).bind(*inputs)
    except TypeError as error:
        return f"the model cannot be called without its targets ({error})"
    prediction = predict(model, guide, *inputs, num_samples=num_samples, seed=seed, progress=False)
    if isinstance(prediction, ClassificationPrediction):
        y = y.long()
        entropy = float(prediction.entropy.mean())
        values: dict[str, Any] = {
            "nll": metrics.nll(prediction, y),
            "error_rate": metrics.error_rate(prediction, y),
            "ece": metrics.ece(prediction, y),
            "epistemic_share": float(prediction.mutual_information.mean()) / entropy if entropy > 0 else 0.0,
        }
    elif isinstance(prediction, RegressionPrediction):
        values = {
            "nll": -metrics.log_likelihood(prediction, y),
            "rmse": metrics.rmse(prediction, y),
            "coverage": metrics.coverage(prediction, y),
            "epistemic_share": float(prediction.epistemic.mean() / prediction.variance.mean()),
        }
    else:
        assert prediction.samples is not None
        spread = prediction.samples.var(0, correction=0).mean()
        values = {
            "nll": -metrics.log_likelihood(prediction, y),
            "epistemic_share": float(spread / prediction.variance.mean()),
        }
    densities = _log_densities(prediction, y)
    needed, curve = samples_needed(densities)
    by_row = densities.logsumexp(0)
    standard_error = float(by_row.std()) / math.sqrt(len(by_row)) if len(by_row) > 1 else math.inf
    values |= {"nll_error": standard_error, "samples_needed": needed, "nll_by_samples": curve}
    return {"rows": count_rows(y), "num_samples": num_samples, **values}


def _log_densities(prediction: Prediction, y: Tensor) -> Tensor:
    """Log-likelihood of each row under each sample, ``(S, N)``."""
    if isinstance(prediction, ClassificationPrediction):
        assert prediction.samples is not None
        index = y.reshape(1, -1, 1).expand(len(prediction.samples), -1, 1)
        return prediction.samples.gather(-1, index).squeeze(-1).double().log()
    if isinstance(prediction, RegressionPrediction):
        samples, scales = prediction.require_samples("samples_needed")
        density = Normal(samples.double(), scales.double(), validate_args=False).log_prob(y.double())
        return density.reshape(*density.shape[:2], -1).sum(-1)
    assert prediction.components is not None
    return prediction.components.log_prob(y).double()


def samples_needed(log_densities: Tensor, tolerance: float = TOLERANCE) -> tuple[int, dict[int, float]]:
    r"""How many posterior samples make the predictive log-likelihood stable, and its value by number of samples.

    From groups of the samples at hand: the bias of :math:`\log \frac1S \sum_s p_s` falls like 1/S and its spread over
    draws like :math:`1/\sqrt S`; the number is where both are below ``tolerance``, in nats per datum. An estimate:
    beyond the samples at hand it extrapolates.

    :param log_densities: log-likelihood of each row under each sample, ``(S, N)``, S of at least 4.

    >>> samples_needed(torch.zeros(20, 5))[0]
    1
    """
    S = len(log_densities)
    if S < 4:
        raise ValueError(f"expected at least 4 samples, got {S}.")
    curve = {}
    sizes = sorted({n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n <= S // 2} | {S})
    for size in sizes:
        curve[size] = float(_by_group(log_densities, size).mean())
    part = max(1, S // 4)
    groups = _by_group(log_densities, part)
    bias = max(0.0, float(groups.mean()) - curve[S]) / (1 / part - 1 / S)
    few = max(1, S // 10)
    spread = float(_by_group(log_densities, few).std()) * math.sqrt(few)
    needed = max(1.0, bias / tolerance, (spread / tolerance) ** 2)
    return (math.ceil(needed) if math.isfinite(needed) else 10**9), curve


def _by_group(log_densities: Tensor, size: int) -> Tensor:
    """Negative log-likelihood per datum of each group of so many samples."""
    count = len(log_densities) // size
    groups = log_densities[: count * size].reshape(count, size, -1)
    return -(groups.logsumexp(1) - math.log(size)).mean(-1)
