"""From a trained method to the numbers of the record: measures, detection, and the bins that figures are made of."""

import inspect
import math
import time
from typing import Any

import torch
from torch import nn

import pyro_vsd as vsd
from benchmarks.paper.data import Parts
from benchmarks.paper.store import rounded
from pyro_vsd.baselines import GuideMethod, Method
from pyro_vsd.datasets import Data

__all__ = ["evaluate", "layer_sizes", "mean_network", "predicted", "scores"]

_BINS = 50
# Of a pass that estimates the statistics of batch norms.
_ROWS = 500


def predicted(method: Any, data: Data, num_samples: int, seed: int, train: Data | None = None) -> Any:
    """The prediction; SWAG's draws of a network with batch norms have their statistics from the training rows."""
    more: dict[str, Any] = {}
    normed = any(isinstance(module, nn.BatchNorm2d) for module in method.modules())
    if train is not None and normed and "batch_norm_data" in inspect.signature(method.predict).parameters:
        more["batch_norm_data"] = train.x.split(_ROWS)
    return method.predict(data.x, num_samples, seed=seed, **more).to("cpu")


def scores(
    method: Method, data: Data, num_samples: int, seed: int, train: Data | None = None
) -> tuple[Any, dict[str, float]]:
    """The prediction, and NLL, error rate (a share), ECE, Brier score."""
    prediction = predicted(method, data, num_samples, seed, train)
    y = data.y.cpu()
    metrics = vsd.metrics
    return prediction, {
        "nll": metrics.nll(prediction, y),
        "error": metrics.error_rate(prediction, y),
        "ece": metrics.ece(prediction, y),
        "brier": metrics.brier(prediction, y),
    }


def evaluate(method: Method, parts: Parts, num_samples: int, seed: int) -> dict[str, Any]:
    """All that the record keeps of a trained method."""
    start = time.perf_counter()
    prediction, metrics = scores(method, parts.test, num_samples, seed, parts.train)
    bins = vsd.metrics.reliability_bins(prediction, parts.test.y.cpu())
    full = bins.size > 0
    result: dict[str, Any] = {
        "metrics": metrics,
        "num_samples": prediction.num_samples,
        "reliability": {
            "num_bins": len(bins.size),
            "bin": full.nonzero().flatten().tolist(),
            "size": [int(n) for n in bins.size[full]],
            "accuracy": bins.accuracy[full].tolist(),
            "confidence": bins.confidence[full].tolist(),
        },
        "entropy": {"max": math.log(prediction.probs.shape[-1]), "test": _histogram(prediction)},
        "ood": {},
    }
    if len(parts.validation):
        result["validation"] = scores(method, parts.validation, min(num_samples, 20), seed, parts.train)[1]
    for name, data in parts.ood.items():
        outside = predicted(method, data, num_samples, seed, parts.train)
        result["ood"][name] = {
            score: vsd.metrics.ood(prediction, outside, score)
            for score in ("max_probability", "entropy", "mutual_information")
            if score != "mutual_information" or prediction.num_samples > 1
        }
        result["entropy"][name] = _histogram(outside)
    result["predict_seconds"] = time.perf_counter() - start
    return rounded(result, 5)


def _histogram(prediction: Any) -> list[int]:
    """Rows by predictive entropy, in bins of equal width from 0 to that of equally probable classes."""
    top = math.log(prediction.probs.shape[-1])
    entropy = prediction.entropy.double().clamp(0, top)
    return [int(n) for n in torch.histc(entropy, _BINS, 0, top)]


def layer_sizes(method: Method) -> dict[str, dict[str, float]]:
    """Spectral norm and stable rank of every layer of the mean network."""
    return {
        name or "0": {
            "spectral_norm": vsd.metrics.spectral_norm(layer),
            "stable_rank": vsd.metrics.stable_rank(layer),
        }
        for name, layer in mean_network(method).named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    }


def mean_network(method: Any) -> nn.Module:
    """The network at the posterior mean; of an ensemble its first member."""
    if isinstance(method, GuideMethod) and hasattr(method.guide, "mean"):
        return vsd.nn.mean_network(method.model, method.guide)
    for path in ("average.module", "nets.0", "net", "model"):
        try:
            found: nn.Module = method.get_submodule(path)
        except AttributeError:
            continue
        return found
    raise TypeError(f"method: expected one that has a network, got {type(method).__name__}.")
