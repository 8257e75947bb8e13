"""Calibration of a trained guide on held-out rows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_vsd._utils import check_integer
from pyro_vsd.infer import VSDGuide, predict
from pyro_vsd.prediction import Calibration, ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.prediction.base import check_labels
from pyro_vsd.training.data import all_rows, inputs_and_target

__all__ = ["FEWEST", "calibrate", "rows_of"]

# Fewer rows say next to nothing about three factors.
FEWEST = 30
# The pull of the factors towards 1: standard deviations of Normal priors on the log of the noise factor, of the
# temperature, and of the scale. In simulations of a calibrated classifier 30 rows then cost 0.004 nats a row on new
# ones, and 0.026 without the pull; from 300 rows on there is no difference, nor for temperatures of 1.5.
_PRIORS = {"noise": math.log(4.0), "temperature": 0.25, "scale": 0.25}
# First steps in the logs: a factor of two of the noise, ten per cent of the others; and how far the search goes.
_STEPS = {"noise": math.log(2.0), "temperature": 0.1, "scale": 0.1}
_FURTHEST = {"noise": math.log(256.0), "temperature": math.log(20.0), "scale": math.log(20.0)}


def calibrate(
    model: Any,
    guide: Any,
    validation: Any,
    *,
    num_samples: int = 100,
    noise: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> Calibration:
    r"""Chooses one factor on all noise variances, and a temperature (classes) or a scale of σ (regression).

    They maximise the log score of held-out rows plus a small pull towards 1,

    .. math:: \sum_n \log p(y_n \mid x_n; c, \tau) - \tfrac12 (\log c / \log 4)^2 - \tfrac12 (\log\tau / 0.25)^2,

    which decides where there are few rows and vanishes where there are many. Every candidate has the same draws of
    the noise, so that the score is a smooth function. For each noise factor, from 1 in steps of two, the temperature is
    fitted anew; parabolas refine both. Costs some six predictions; the samples of one are in memory.

    The weights, the noise and the model stay as they are: pass the result to
    ``vsd.predict(…, calibration=calibration)``. It is also kept as ``guide.calibration`` and saved with the guide's
    state. Likelihoods other than classes and Normals have the noise factor alone.

    :param model: a Pyro model.
    :param guide: its guide, trained.
    :param validation: rows that were *not* trained on, at least 30: ``vsd.datasets.Data``, a tuple ``(x, y)``, a dict
        with ``"labels"``, or a ``DataLoader`` of them.
    :param num_samples: draws per row; take as many as for the predictions to come.
    :param noise: whether to fit the noise factor; without it one prediction is enough.
    :param seed: of the draws.
    :param progress: a progress bar over predictions; by default in a terminal.

    >>> train, test = vsd.datasets.digits()
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 50, 10])), num_data=1000)
    >>> guide = vsd.VSDGuide(model)
    >>> history = vsd.fit(model, guide, (train.x[:1000], train.y[:1000]), epochs=5, progress=False)
    >>> calibration = vsd.calibrate(model, guide, (train.x[1000:], train.y[1000:]), num_samples=20)
    >>> calibration.scores["after"] > calibration.scores["before"]
    True
    >>> prediction = vsd.predict(model, guide, test.x, calibration=calibration)
    """
    check_integer("num_samples", num_samples, 1)
    check_integer("seed", seed)
    if noise and not isinstance(guide, VSDGuide):
        kind = type(guide).__name__
        raise TypeError(f"guide must be a VSDGuide to fit its noise, not a {kind}. Pass noise=False.")
    device = next((p.device for p in guide.parameters()), None) if isinstance(guide, nn.Module) else None
    inputs, y = rows_of(validation, "validation", device)
    if len(y) < FEWEST:
        raise ValueError(f"validation has {len(y)} rows. Hold out at least {FEWEST}: fewer say too little.")
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "progress": False}
    points: dict[float, _Point] = {}
    hidden = None if progress is None else not progress
    with tqdm(desc="calibrate", unit="prediction", leave=False, disable=hidden) as bar:

        def objective(log_noise: float) -> float:
            if log_noise not in points:
                factor = Calibration(noise=math.exp(log_noise))
                points[log_noise] = _fitted(predict(model, guide, *inputs, calibration=factor, **options), y)
                bar.update()
            return points[log_noise].objective + 0.5 * (log_noise / _PRIORS["noise"]) ** 2

        objective(0.0)
        if noise:
            objective(_descend(objective, "noise"))
    if not math.isfinite(points[0.0].plain):
        raise ValueError(f"validation has a log score of {points[0.0].plain}. Does it hold NaN or infinities?")
    log_noise = min(points, key=objective)
    first, best = points[0.0], points[log_noise]
    scores = {"before": first.plain, "noise": max(point.plain for point in points.values())}
    if first.kind is not None:
        scores[first.kind] = first.score
    scores["after"] = best.score
    factors = {"noise": math.exp(log_noise)} | ({best.kind: math.exp(best.log_factor)} if best.kind else {})
    calibration = Calibration(**factors, scores=scores, num_rows=len(y))
    if isinstance(guide, VSDGuide):
        guide.calibration = calibration
    return calibration


def rows_of(data: Any, name: str, device: torch.device | None) -> tuple[tuple[Any, ...], Tensor]:
    """All rows of ``(x, y)``, ``Data`` or a loader: the inputs of the model, and the targets."""
    inputs, y = inputs_and_target(all_rows(data, name), device)
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} must give inputs and targets, (x, y).")
    return inputs, y


class _Point(NamedTuple):
    """What one size of the noise gives: mean log scores, without and with the best second factor, whose log it has."""

    kind: str | None
    plain: float
    score: float
    log_factor: float
    objective: float


def _fitted(prediction: Prediction, y: Tensor) -> _Point:
    kind, score = _score(prediction, y)
    plain = score(0.0)
    if kind is None:
        return _Point(None, plain, plain, 0.0, -len(y) * plain)
    known = {0.0: plain}

    def objective(log_factor: float) -> float:
        if log_factor not in known:
            known[log_factor] = score(log_factor)
        return 0.5 * (log_factor / _PRIORS[kind]) ** 2 - len(y) * known[log_factor]

    objective(_descend(objective, kind))
    best = min(known, key=objective)
    return _Point(kind, plain, known[best], best, objective(best))


def _score(prediction: Prediction, y: Tensor) -> tuple[str | None, Callable[[float], float]]:
    """The second factor, and the mean log score as a function of its log."""
    log_samples = math.log(prediction.num_samples)
    if isinstance(prediction, ClassificationPrediction):
        assert prediction.samples is not None
        probs = prediction.samples
        labels = check_labels(y.long(), len(prediction), probs.shape[-1])  # yes or no may come as floats
        logits = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()  # (S, N, C)
        own = logits.gather(-1, labels.expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)

        def classes(log_temperature: float) -> float:
            beta = math.exp(-log_temperature)
            density = beta * own - (beta * logits).logsumexp(-1)
            return float((density.logsumexp(0) - log_samples).double().mean())

        return "temperature", classes
    if isinstance(prediction, RegressionPrediction):
        return "scale", lambda log_scale: _mean_log_prob(Calibration(scale=math.exp(log_scale)).apply(prediction), y)
    return None, lambda _: _mean_log_prob(prediction, y)


def _mean_log_prob(prediction: Prediction, y: Tensor) -> float:
    return float(prediction.log_prob(y).double().mean())


def _descend(function: Callable[[float], float], kind: str) -> float:
    """A minimum near 0, by steps and then by the parabola through the last three."""
    step, at = _STEPS[kind], 0
    values = {i: function(i * step) for i in (0, -1, 1)}
    while not {(at := min(values, key=lambda i: values[i])) - 1, at + 1} <= set(values):
        if abs(at) * step >= _FURTHEST[kind]:
            return at * step
        end = at + (1 if at > 0 else -1)
        values[end] = function(end * step)
    left, middle, right = (values[at + i] for i in (-1, 0, 1))
    bend = left - 2 * middle + right
    return step * (at + 0.5 * (left - right) / bend) if bend > 0 else step * at
