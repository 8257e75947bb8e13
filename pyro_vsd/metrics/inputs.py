"""What a metric accepts, checked: predictions, probabilities or samples of them, as tensors or arrays."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.prediction.checks import check_labels, check_target, to_tensor

__all__ = ["Array", "Classes", "classes", "gaussians", "mean", "probabilities", "targets", "vector"]

Array = Tensor | NDArray[Any]
#: Class probabilities in any form: a prediction, ``(N, C)`` mean probabilities or ``(S, N, C)`` samples of them.
Classes = Prediction | Array


def as_tensor(name: str, value: Array) -> Tensor:
    """A detached float tensor; half precision becomes float32, whose sums can be trusted."""
    tensor = to_tensor(value)
    if tensor.is_complex():
        raise ValueError(f"expected real {name}, got {tensor.dtype}.")
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def probabilities(prediction: Classes) -> Tensor:
    """Mean probabilities ``(N, C)``, each row non-negative and summing to one."""
    if isinstance(prediction, ClassificationPrediction):
        return _checked(as_tensor("probs", prediction.probs))
    probs = _raw(prediction)
    # samples are checked as they are: a mean could hide a negative probability
    return _checked(probs) if probs.dim() == 2 else _checked(probs).mean(0)


def classes(prediction: Classes, needs: str) -> ClassificationPrediction:
    """A prediction that knows what its samples disagree about; ``needs`` names the metric that asks."""
    if isinstance(prediction, ClassificationPrediction):
        _checked(as_tensor("probs", prediction.probs))
        return prediction
    samples = _raw(prediction)
    if samples.dim() == 2:
        raise ValueError(
            f"expected samples for {needs}, got mean probabilities of shape {tuple(samples.shape)}. "
            "Give a ClassificationPrediction or every sample's probabilities, (S, N, C)."
        )
    return ClassificationPrediction.from_samples(_checked(samples))


def labelled(prediction: Classes, y: Array) -> tuple[Tensor, Tensor]:
    """Mean probabilities ``(N, C)`` and labels ``(N,)``."""
    probs = probabilities(prediction)
    return probs, check_labels(to_tensor(y, probs.device), *probs.shape)


def gaussians(prediction: Prediction, needs: str) -> RegressionPrediction:
    """A regression prediction with its samples; ``needs`` names the metric that asks."""
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"expected a RegressionPrediction for {needs}, got {type(prediction).__name__}.")
    prediction.require_samples(needs)
    _finite("prediction", prediction.mean)
    return prediction


def targets(mean: Tensor, y: Array) -> Tensor:
    """Real targets, shaped as the mean, finite."""
    _finite("prediction", mean)
    target = to_tensor(y, mean.device)
    check_target(target, tuple(mean.shape))
    _finite("y", target)
    return target.to(mean.dtype)


def vector(name: str, values: Array) -> Tensor:
    """A one-dimensional, non-empty tensor without NaN."""
    tensor = as_tensor(name, values)
    if tensor.dim() != 1 or not len(tensor):
        raise ValueError(f"expected {name} of shape (N,) with N of at least 1, got {tuple(tensor.shape)}.")
    if bool(tensor.isnan().any()):
        raise ValueError(f"expected {name} without NaN, got {int(tensor.isnan().sum())} NaN of {len(tensor)}.")
    return tensor


def mean(rows: Tensor) -> float:
    """Mean over all entries as a Python float, summed in double precision."""
    return float(rows.mean(dtype=torch.float64))


def _raw(prediction: Classes) -> Tensor:
    if isinstance(prediction, Prediction):
        raise TypeError(f"expected class probabilities, got a {type(prediction).__name__}.")
    return as_tensor("probabilities", prediction)


def _checked(probs: Tensor) -> Tensor:
    if probs.dim() not in (2, 3) or not probs.numel():
        raise ValueError(
            f"expected probabilities of shape (N, C) or samples (S, N, C), not empty, got {tuple(probs.shape)}."
        )
    sums = probs.sum(-1)
    if bool(sums.isnan().any()):
        raise ValueError(f"expected probabilities, got NaN in {int(sums.isnan().sum())} of {sums.numel()} rows.")
    # half precision rounds a probability by up to 0.004; float32 softmax is far inside
    if float(probs.min()) < 0 or float((sums - 1).abs().max()) > 0.01:
        raise ValueError(
            f"expected probabilities, got a smallest entry of {float(probs.min()):.3g} and rows that sum to "
            f"{float(sums.min()):.3g} to {float(sums.max()):.3g}. Use logits.softmax(-1)."
        )
    return probs


def _finite(name: str, values: Tensor) -> None:
    if not values.numel():
        raise ValueError(f"expected {name} with at least one row, got shape {tuple(values.shape)}.")
    if not bool(values.isfinite().all()):
        raise ValueError(f"expected finite {name}, got {int((~values.isfinite()).sum())} NaN or infinite entries.")
