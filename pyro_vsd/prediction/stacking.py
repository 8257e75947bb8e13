"""Mixtures of predictions, and the weights with which they predict held-out rows best."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_vsd.prediction.base import Array, Prediction, check_labels, check_target, check_weights, not_kept, to_tensor
from pyro_vsd.prediction.classification import ClassificationPrediction
from pyro_vsd.prediction.regression import RegressionPrediction

__all__ = ["Stacking", "mixture", "stack", "with_base_rate"]

# With fewer held-out rows fitted weights are worse than equal ones.
FEWEST_FOR_WEIGHTS = 50
# With fewer not even the width of a member can be told.
_FEWEST_FOR_FACTORS = 10
# Bounds of a member's width, up and down: of its own on held-out rows as a multiple of the trained one (networks
# without noise overfit), and of that in the mixture as a multiple of its own.
_BOUND = 30.0
# The standard deviation of the log of the latter under its prior. Without one the width of a member that the mixture
# hardly uses runs away, and one far row then costs everything.
_SPREAD = 0.7
# The same of a temperature, and of that of a member alone around 1, as in `calibrate`.
_TEMPERATURE = 0.25
# Numbers in an evaluation of the score of classes.
_NUMBERS = 2**24


def mixture(predictions: Sequence[Prediction], weights: Array | Sequence[float] | None = None) -> Prediction:
    r"""The mixture of several predictions of the same rows, an ordinary prediction.

    .. math:: p(y \mid x) = \sum_m w_m\, p_m(y \mid x)

    Its moments, density, quantiles and scores are exact. What the members disagree on is epistemic. Samples are those
    of all members, with weights.

    :param predictions: M predictions of one kind.
    :param weights: positive, ``(M,)``; equal by default.

    >>> sure, unsure = (vsd.RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(s)) for s in (1.0, 3.0))
    >>> mixture([sure, unsure], [0.75, 0.25]).variance
    tensor([3.])
    """
    if not predictions:
        raise ValueError("predictions must hold at least one prediction; it is empty.")
    first, kinds, shapes = predictions[0], {type(p) for p in predictions}, {tuple(p.mean.shape) for p in predictions}
    if len(kinds) > 1 or len(shapes) > 1:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(f"predictions must be of one kind and shape; they are {names} of {sorted(shapes)}.")
    given = [1.0] * len(predictions) if weights is None else weights
    share = check_weights(torch.as_tensor(given, dtype=torch.float64), len(predictions))

    def average(name: str) -> Tensor:
        total = sum(w * getattr(p, name) for w, p in zip(share.tolist(), predictions, strict=True))
        assert isinstance(total, Tensor)
        return total

    options: dict[str, Any] = {"weights": torch.cat([w * _weights(p) for w, p in zip(share, predictions, strict=True)])}
    number = len(options["weights"])
    if all(p.samples is not None for p in predictions):
        options["samples"] = torch.cat([p.samples for p in predictions])  # type: ignore[misc]
        if isinstance(first, RegressionPrediction):
            options["scales"] = torch.cat([p.scales for p in predictions])  # type: ignore[attr-defined]
    mean = average("mean")
    if isinstance(first, ClassificationPrediction):
        return ClassificationPrediction(mean, average("expected_entropy"), number, **options)
    spread = sum(w * (p.mean - mean).square() for w, p in zip(share.tolist(), predictions, strict=True))
    if isinstance(first, RegressionPrediction):
        return RegressionPrediction(mean, average("aleatoric"), average("epistemic") + spread, number, **options)
    if all(p.components is not None for p in predictions):
        options["components"] = _Joined([p.components for p in predictions])
    return Prediction(mean, average("variance") + spread, number, **options)


def with_base_rate(prediction: Prediction, y: Array, share: float | None = None) -> Prediction:
    r"""The mixture of a prediction and the distribution of the targets alone, which knows nothing of the inputs.

    .. math:: (1 - \varepsilon)\, p(y \mid x) + \varepsilon\, p_0(y)

    Where all samples agree and are wrong, nothing else bounds the log-density. With a base rate of 1/(N + 1) such a row
    costs at most log(N + 1) more than knowing nothing, and a row that the prediction knows costs next to nothing.

    :math:`p_0` is the Normal with the mean and standard deviation of each output, or has the classes' frequencies, with
    one row added to each class.

    :param prediction: a prediction of numbers or classes.
    :param y: targets of training rows, ``(N,)``, or ``(N, D)`` for D outputs; in the prediction's units, that is,
        standardised if the network was trained on standardised targets.
    :param share: ε; 1/(N + 1) by default, as if one more row had been seen, and the network had not known it.

    >>> train, _ = vsd.datasets.cubic()
    >>> wrong = vsd.RegressionPrediction.from_samples(torch.zeros(1, 1), torch.tensor(0.01))
    >>> far = torch.tensor([2.0])
    >>> wrong.log_prob(far) < -1000, with_base_rate(wrong, train.y).log_prob(far) > -10
    (tensor([True]), tensor([True]))
    """
    y = to_tensor(y, prediction.mean.device)
    if not y.numel() or not bool(y.isfinite().all()):
        raise ValueError("y must hold targets of training rows, all of them finite.")
    share = 1 / (len(y) + 1) if share is None else share
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be above 0 and below 1.")
    if isinstance(prediction, RegressionPrediction):
        outputs = prediction.mean.shape[1:]
        values = check_target(y, (len(y), *outputs)).to(prediction.mean)
        if (values.amin(0) == values.amax(0)).any():
            raise ValueError("y has no spread: all targets are equal. Pass those of the training rows.")
        means, scales = (v.expand(1, *prediction.mean.shape) for v in (values.mean(0), values.std(0, correction=0)))
        base: Prediction = RegressionPrediction.from_samples(means, scales)
    elif isinstance(prediction, ClassificationPrediction):
        count = prediction.mean.shape[-1]
        frequencies = (torch.bincount(check_labels(y, len(y), count), minlength=count) + 1).to(prediction.mean)
        base = ClassificationPrediction.from_samples(
            (frequencies / frequencies.sum()).expand(1, *prediction.mean.shape)
        )
    else:
        raise TypeError(f"prediction must be one of numbers or classes, not a {type(prediction).__name__}.")
    return mixture([prediction, base], [1 - share, share])


def _weights(prediction: Prediction) -> Tensor:
    number = prediction.num_samples
    return torch.full((number,), 1 / number, dtype=torch.float64) if prediction.weights is None else prediction.weights


class _Joined(Distribution):
    """Components of several predictions, one after the other: batch shape ``(S, N)``."""

    arg_constraints: dict[str, Any] = {}

    def __init__(self, parts: list[Any]):
        self.parts = parts
        number = sum(part.batch_shape[0] for part in parts)
        shape = torch.Size((number, *parts[0].batch_shape[1:]))
        super().__init__(shape, parts[0].event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.cat([part.log_prob(value) for part in self.parts])


@dataclass(frozen=True)
class Stacking:
    """How the predictions of an ensemble's members are mixed: what :func:`stack` finds.

    :ivar weights: of the members, ``(M,)``; all positive, they add up to 1.
    :ivar factors: ``(M,)``. In regression each member's σ is multiplied by its factor. For classes it is a temperature:
        each sample's probabilities become :math:`p^{1/T}`, scaled to add up to 1. Other predictions have ones.
    :ivar num_rows: held-out rows behind it.
    :ivar scores: mean log-density of the held-out rows by each member alone, with its own best factor, ``(M,)``.
    :ivar before: the same of the mixture with equal weights, as trained.
    :ivar after: the same of the mixture as fitted.
    :ivar fitted: whether the weights were fitted, or are equal because there were too few rows.
    :ivar levels: the mean of log σ over the rows, of each member as trained, ``(M,)``.
    """

    weights: Tensor
    factors: Tensor
    num_rows: int = 0
    scores: Tensor | None = None
    before: float = math.nan
    after: float = math.nan
    fitted: bool = False
    levels: Tensor | None = None

    @classmethod
    def equal(cls, members: int) -> "Stacking":
        """Equal weights, all members as trained."""
        return cls(torch.full((members,), 1 / members, dtype=torch.float64), torch.ones(members, dtype=torch.float64))

    def mix(self, predictions: Sequence[Prediction]) -> Prediction:
        """The mixture of the members' predictions, each with its factor."""
        if len(predictions) != len(self.weights):
            raise ValueError(f"predictions must be {len(self.weights)}, one of each member, not {len(predictions)}.")
        pairs = zip(predictions, self.factors.tolist(), strict=True)
        return mixture([with_factor(p, f) for p, f in pairs], self.weights)

    def carried_over(self, predictions: Sequence[Prediction]) -> "Stacking":
        """The stacking for members that were trained again: each σ stays where it was fitted, on average over rows.

        :param predictions: the members' predictions of the rows that :func:`stack` had.
        """
        levels = torch.stack([_level(p) for p in predictions])
        before = levels if self.levels is None else self.levels
        return replace(self, factors=self.factors * (before - levels).exp(), levels=levels)


def _level(prediction: Prediction) -> Tensor:
    """The mean of log σ; zero where there is none."""
    if not isinstance(prediction, RegressionPrediction):
        return torch.zeros((), dtype=torch.float64)
    return prediction.require_samples("stacking")[1].double().log().mean().cpu()


def with_factor(prediction: Prediction, factor: float) -> Prediction:
    """The prediction with its σ multiplied by the factor; of classes, at that temperature."""
    if factor == 1 or not isinstance(prediction, (ClassificationPrediction, RegressionPrediction)):
        return prediction
    if isinstance(prediction, RegressionPrediction):
        scales = None if prediction.scales is None else prediction.scales * factor
        moments = prediction.mean, prediction.aleatoric * factor**2, prediction.epistemic
        kept = prediction.samples
        return RegressionPrediction(
            *moments, prediction.num_samples, samples=kept, scales=scales, weights=prediction.weights
        )
    if prediction.samples is None:
        raise not_kept("a temperature")
    tempered = (prediction.samples.clamp(min=torch.finfo(prediction.samples.dtype).tiny).log() / factor).softmax(-1)
    return ClassificationPrediction.from_samples(tempered, prediction.weights)


def stack(predictions: Sequence[Prediction], y: Array) -> Stacking:
    r"""Weights and factors of the members, with which their mixture gives held-out rows the highest density.

    .. math:: \max_{w, f} \sum_n \log \sum_m w_m\, p_m(y_n \mid x_n; f_m) + \tfrac1M \sum_m \log w_m
              - \tfrac12 \sum_m \Bigl(\frac{\log f_m - \log \hat f_m}{s}\Bigr)^2

    The second term is one pseudo-observation: a pull to equal weights, which keeps each above zero. The last one pulls
    each factor to :math:`\hat f_m`, the best for its member alone. For a σ s is 0.7. For a temperature it is 0.25, and
    :math:`\hat f_m` is itself pulled to 1 as in :func:`~pyro_vsd.posthoc.calibrate`: where all held-out rows are
    classified correctly, nothing else keeps it from zero. With fewer than 50 rows the weights are equal, with fewer
    than 10 the factors are 1.

    :param predictions: one of each member, of the same rows, none of which it was trained on; with samples.
    :param y: their targets.

    >>> wrong, right = (vsd.RegressionPrediction.from_samples(m * torch.ones(1, 60), torch.ones(1)) for m in (9.0, 0.0))
    >>> stack([wrong, right], torch.randn(60)).weights.argmax()
    tensor(1)
    """
    before = mixture(predictions)
    target, M = to_tensor(y, before.mean.device), len(predictions)
    start = float(before.log_prob(target).double().mean())
    found = Stacking.equal(M)
    rows, factors = len(target), isinstance(before, (ClassificationPrediction, RegressionPrediction))
    fitted = rows >= FEWEST_FOR_WEIGHTS and M > 1
    densities, own = [_densities(p, target) for p in predictions], torch.zeros(M, dtype=torch.float64)
    if fitted or (factors and rows >= _FEWEST_FOR_FACTORS):
        weights, widths, own = _fit(densities, factors, fitted, isinstance(before, ClassificationPrediction))
        found = Stacking(weights, widths)
    scores = torch.stack([density(u).mean() for density, u in zip(densities, own, strict=True)])
    after = float(found.mix(predictions).log_prob(target).double().mean())
    levels = torch.stack([_level(p) for p in predictions])
    return Stacking(found.weights, found.factors, rows, scores, start, after, fitted, levels)


def _fit(
    densities: list[Callable[[Tensor], Tensor]], factors: bool, fitted: bool, classes: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and factors of the mixture, and the log of the best factor of each member alone."""
    M, spread = len(densities), _TEMPERATURE if classes else _SPREAD
    own = torch.zeros(M, dtype=torch.float64)

    def alone(density: Callable[[Tensor], Tensor], log_factor: Tensor) -> Tensor:
        return density(log_factor).sum() - (0.5 * (log_factor / _TEMPERATURE).square() if classes else 0.0)

    if factors:
        for m, density in enumerate(densities):
            u = torch.zeros((), dtype=torch.float64)
            _maximise(lambda u, f=density: alone(f, math.log(_BOUND) * u.tanh()), [u])
            own[m] = math.log(_BOUND) * u.tanh()
    logits, u = torch.zeros(M, dtype=torch.float64), torch.zeros(M, dtype=torch.float64)

    def log_factors(u: Tensor) -> Tensor:
        return own + math.log(_BOUND) * (u / math.log(_BOUND)).tanh()

    def score(logits: Tensor, u: Tensor) -> Tensor:
        log_weights, each = logits.log_softmax(-1), log_factors(u)
        table = torch.stack([f(each[m]) for m, f in enumerate(densities)])  # (M, N)
        prior = log_weights.mean() - 0.5 * ((each - own) / spread).square().sum()
        return (log_weights[:, None] + table).logsumexp(0).sum() + prior

    if fitted and factors:
        _maximise(score, [logits, u])
    elif fitted:
        _maximise(lambda logits: score(logits, u), [logits])
    else:
        _maximise(lambda u: score(logits, u), [u])
    return logits.softmax(-1), log_factors(u).exp() if factors else torch.ones_like(own), own


def _maximise(function: Callable[..., Tensor], variables: list[Tensor]) -> None:
    """L-BFGS from where the variables are; they are changed in place."""
    for variable in variables:
        variable.requires_grad_()
    options: dict[str, Any] = {"max_iter": 100, "line_search_fn": "strong_wolfe", "tolerance_change": 1e-7}
    optimizer = torch.optim.LBFGS(variables, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -function(*variables)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    for variable in variables:
        variable.requires_grad_(False)


def _densities(prediction: Prediction, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The log-density of each row as a function of the log of the member's factor, ``() -> (N,)``."""
    weights = _weights(prediction).log()
    if isinstance(prediction, RegressionPrediction):
        samples, scales = prediction.require_samples("stack")
        loc, log_scale = samples.double().cpu(), scales.double().cpu().log()
        error = (check_target(y, tuple(prediction.mean.shape)).double().cpu() - loc).square()
        shape, outputs = (-1, *[1] * (loc.dim() - 1)), 1 if loc.dim() == 2 else loc.shape[-1]
        constant = weights.reshape(shape) / outputs - 0.5 * math.log(2 * math.pi)

        def of_numbers(log_factor: Tensor) -> Tensor:
            width = log_scale + log_factor
            joint = constant - width - 0.5 * error * (-2 * width).exp()
            return (joint if loc.dim() == 2 else joint.sum(-1)).logsumexp(0)

        return of_numbers
    if isinstance(prediction, ClassificationPrediction):
        if prediction.samples is None:
            raise not_kept("stack")
        labels = check_labels(y, len(prediction), prediction.probs.shape[-1])
        # every k-th sample where all are too many numbers
        step = max(1, prediction.samples.numel() // _NUMBERS)
        logits = prediction.samples[::step].clamp(min=torch.finfo(prediction.samples.dtype).tiny).log().cpu()
        weights = weights[::step].log_softmax(0).to(logits.dtype)
        index = labels.cpu()[None, :, None].expand(len(logits), -1, 1)
        chosen = logits.gather(-1, index).squeeze(-1)

        def of_classes(log_factor: Tensor) -> Tensor:
            inverse = (-log_factor).exp().to(logits.dtype)
            log_probs = inverse * chosen - (inverse * logits).logsumexp(-1)
            return (weights[:, None] + log_probs).logsumexp(0).double()

        return of_classes
    fixed = prediction.log_prob(y).double().cpu()
    return lambda log_factor: fixed
