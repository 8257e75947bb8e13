"""A trained network made Bayesian without training: noise in closed form from the curvature of its loss."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_vsd._utils import (
    check_choice,
    check_integer,
    check_positive,
    evaluation_mode,
    num_rows,
    take_rows,
)
from pyro_vsd.diagnosis import best_droprates, best_variances, leading_reflections
from pyro_vsd.diagnosis.gauss_newton import curvature_or_reason
from pyro_vsd.infer import VSDGuide, predict
from pyro_vsd.nn import BayesianNetwork, BinaryClassifier, Classifier, ObservationModel, Regressor, bayesianize
from pyro_vsd.nn.likelihoods import network_output
from pyro_vsd.posthoc.calibrating import FEWEST, rows_of
from pyro_vsd.prediction import Calibration
from pyro_vsd.prediction.base import check_target
from pyro_vsd.training.data import Batches, arguments, inputs_and_target, num_known

__all__ = ["from_trained"]

# Rows in a batch of the pass for the curvature, where nobody says: large enough to hide the cost of a call.
_BATCH_SIZE = 500
# Noise variance of the network as it was trained: draws differ from the weights by less than a millionth.
_NO_NOISE = 1e-12
# The search for the strength: from 1 by this factor, up to so many times, then halvings of the last interval, which
# leave it known to a factor of 1.2.
_FACTOR, _MOST, _HALVINGS = 4.0, 8, 3


def from_trained(
    net: nn.Module,
    train: Any,
    validation: Any,
    task: str = "classification",
    *,
    noise: float | str = "learned",
    num_reflections: int = 32,
    tolerance: float = 0.003,
    num_samples: int = 100,
    max_units: int = 2048,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **guide_options: Any,
) -> tuple[ObservationModel, VSDGuide]:
    r"""Gives a trained network the noise that its own loss can bear; the weights stay as they are, bit for bit.

    One pass over the training rows, with gradients of a label drawn for each row, gives the curvature A of the loss in
    the noise of each weight. The noise is the best one to second order
    (:func:`~pyro_vsd.diagnosis.leading_reflections`, :func:`~pyro_vsd.diagnosis.best_variances`),

    .. math:: \min_\Sigma\ \tfrac12 \operatorname{tr}(\Sigma A)
              + \tfrac c2 \bigl[\textstyle\sum_i \log(1 + \Sigma_{ii}) - \log\det\Sigma\bigr],

    with one strength c for all weights: the largest whose negative log-likelihood on the validation rows is within
    ``tolerance`` of the best. Directions in which the data holds the network firmly have little noise, directions
    that the data leaves open have much. An input from elsewhere meets the latter, and the draws disagree about it.

    Correlations are kept in the ``num_reflections`` directions of largest curvature: all of them in a weight of up to
    ``num_reflections + 1`` units. A weight of more than ``max_units`` units has independent noise; one whose noise is
    not drawn row by row (attention's ``out_proj``) has none, with a warning.

    Costs about one epoch of training, O(K³) for each weight, and some seven predictions of the validation rows.
    Training can go on from here: ``vsd.fit(model, guide, train, epochs=…)``.

    :param net: a trained network, which is copied. One from :func:`vsd.nn.bayesianize <pyro_vsd.nn.bayesianize>` is
        used as it is: this way ``include`` and ``exclude`` choose the weights.
    :param train: the rows it was trained on: ``vsd.datasets.Data``, a tuple ``(x, y)`` or a ``DataLoader``.
    :param validation: rows it was not trained on, at least 30.
    :param task: ``"classification"`` (outputs are logits; a single one means yes or no) or ``"regression"``.
    :param noise: σ for regression, as in :class:`vsd.nn.Regressor <pyro_vsd.nn.Regressor>`: a number,
        ``"heteroscedastic"``, or ``"learned"``, which starts at the root mean square error of each output on the
        validation rows.
    :param num_reflections: T of the guide.
    :param tolerance: a share of the best negative log-likelihood; for regression, nats.
    :param num_samples: draws for each validation row.
    :param max_units: the widest weight whose correlations are considered.
    :param batch_size: rows in a batch of the pass over ``train``.
    :param seed: of the drawn labels and of the noise.
    :param progress: progress bars; by default in a terminal.
    :param guide_options: further ones of :class:`~pyro_vsd.infer.VSDGuide`, such as ``conv_noise``.

    >>> train, test = vsd.datasets.digits()
    >>> net = vsd.nn.mlp([64, 50, 10])
    >>> optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    >>> for x, y in train.batches(100):
    ...     loss = nn.functional.cross_entropy(net(x), y)
    ...     optimizer.zero_grad(), loss.backward(), optimizer.step()
    (None, None, None)...
    >>> model, guide = vsd.from_trained(net, (train.x[:1000], train.y[:1000]), (train.x[1000:], train.y[1000:]))
    >>> torch.equal(guide.mean()["net.0.weight"], net[0].weight)
    True
    """
    check_choice("task", task, ("classification", "regression"))
    check_integer("num_reflections", num_reflections, 0)
    check_integer("num_samples", num_samples, 1)
    check_integer("max_units", max_units, 0)
    check_integer("seed", seed)
    check_positive("tolerance", tolerance)
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a trained nn.Module, not {type(net).__name__}.")
    batches = Batches(train, batch_size, "train")
    if batches.assumed:
        batches.batch_size = _BATCH_SIZE
    if batches.num_rows is None:
        raise ValueError("train does not know its number of rows, which the noise depends on: pass a list of batches.")
    like = next(iter((*net.parameters(), *net.buffers())), None)
    if like is None:
        raise ValueError("net has no parameters: it must be a trained network.")
    inputs, y = rows_of(validation, "validation", like.device)
    y = y.long() if task == "classification" else y  # yes or no may come as floats
    if len(y) < FEWEST:
        raise ValueError(f"validation has {len(y)} rows. Hold out at least {FEWEST}: fewer say too little.")
    if isinstance(batches.data, (tuple, dict)):
        twice = num_known(inputs_and_target(batches.data), (inputs, y))
        if twice > len(y) / 2:  # a few rows may well be equal by chance
            raise ValueError(f"validation: {twice} of its {len(y)} rows are those of train. Hold rows out.")
    bar: dict[str, Any] = {"leave": False, "disable": None if progress is None else not progress}
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), batches.generators_kept():
        torch.manual_seed(seed)
        model = _observation_model(net, task, noise, batches.num_rows, inputs, y)
        guide_options |= {"num_reflections": num_reflections, "init_alpha": _NO_NOISE, "init_alpha_spread": 0.0}
        guide_options["scale_vectors"] = False  # they come in closed form
        guide = VSDGuide(model, **guide_options)
        if isinstance(model, Regressor) and noise == "learned":
            plain = predict(model, guide, *inputs, num_samples=1, calibration=Calibration(noise=0.0), progress=False)
            error = plain.mean - check_target(y, tuple(plain.mean.shape))
            model.log_sigma.data.copy_(error.square().mean(0).sqrt().log())
        curvatures = _curvatures(model, guide, batches, max_units, seed, bar)
    make_noise = {name: _noise_maker(A, num_reflections) for name, A in curvatures.items()}
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "progress": False}
    with tqdm(desc="from_trained: strength", unit="prediction", **bar) as predictions:

        def nll(strength: float) -> float:
            if strength:
                _set_noise(guide, {name: make(strength) for name, make in make_noise.items()})
            predictions.update()
            return -float(predict(model, guide, *inputs, **options).log_prob(y).double().mean())

        strength = _largest_strength(nll, lambda best: best + tolerance * (best if task == "classification" else 1.0))
    _set_noise(guide, {name: make(strength) for name, make in make_noise.items()})
    return model, guide


def _observation_model(
    net: nn.Module, task: str, noise: float | str, num_data: int, inputs: tuple[Any, ...], y: Tensor
) -> ObservationModel:
    network = net if isinstance(net, BayesianNetwork) else bayesianize(net)
    if task == "classification":
        with torch.no_grad(), evaluation_mode(net):
            output = network_output(net, take_rows(inputs[0], slice(0, 2)))
        single = output.dim() == 1 or output.shape[-1] == 1
        return (BinaryClassifier if single else Classifier)(network, num_data)
    outputs = y.shape[-1] if y.dim() > 1 and y.shape[-1] > 1 and noise == "learned" else None
    return Regressor(network, num_data, noise=noise, num_outputs=outputs)


def _curvatures(
    model: Any, guide: VSDGuide, batches: Batches, max_units: int, seed: int, bar: dict[str, Any]
) -> dict[str, Tensor]:
    """A of each weight, ``(K, K)``; its diagonal, ``(K,)``, where the weight is wide."""
    device = next(guide.parameters()).device
    totals: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    seen = 0
    with tqdm(desc="from_trained: curvature", unit="row", total=batches.num_rows, **bar) as rows:
        for batch in batches.sample(seed, batches.num_rows):
            args, kwargs = arguments(batch, device, model)
            found, reasons = curvature_or_reason(model, guide, args, kwargs, max_units, num_labels=1, wide=True)
            count = num_rows(batch)
            seen += count
            for name, matrix in found.items():
                totals[name] = totals.get(name, 0.0) + count * matrix
            rows.update(count)
    if not totals:
        raise ValueError(f"net: no weight can have noise from its curvature: {reasons}.")
    if reasons:
        warnings.warn(f"weights without noise: {reasons}.", stacklevel=3)
    return {name: total / seen for name, total in totals.items()}


def _noise_maker(A: Tensor, num_reflections: int) -> Callable[[float], tuple[Tensor, Tensor]]:
    """Variances and vectors of a weight by strength."""
    if A.dim() == 1:
        none = A.new_zeros(num_reflections, len(A))
        return lambda strength: (best_droprates(A, strength), none)
    vectors = leading_reflections(A, num_reflections)
    return lambda strength: (best_variances(A, vectors, strength), vectors)


def _set_noise(guide: VSDGuide, noise: dict[str, tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for name, (alpha, vectors) in noise.items():
            guide.get_parameter(f"log_alpha.{name}").copy_(alpha.log())
            guide.get_parameter(f"vectors.{name}").copy_(vectors)


def _largest_strength(nll: Callable[[float], float], limit: Callable[[float], float]) -> float:
    """The largest strength whose negative log-likelihood is within the limit that belongs to the best one."""
    found = {0.0: nll(0.0)}

    def good(strength: float) -> bool:
        if strength not in found:
            found[strength] = nll(strength)
        return found[strength] <= limit(min(found.values()))

    low = high = 1.0
    steps = 0
    while good(high) and steps < _MOST:
        low, high, steps = high, high * _FACTOR, steps + 1
    while not good(low) and steps < _MOST:
        low, high, steps = low / _FACTOR, low, steps + 1
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    return max(c for c in found if c == low or (c > 0 and good(c)))
