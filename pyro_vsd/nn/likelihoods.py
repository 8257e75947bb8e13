"""Observation models: a Bayesian network with a likelihood for classes or numbers."""

import math
import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd._utils import BatchWatch, base_constraint, check_choice, check_integer, check_positive, is_capturing
from pyro_vsd.distributions.lazy_weight import ParticleTensor
from pyro_vsd.nn.bayesian_network import BayesianNetwork

__all__ = ["BinaryClassifier", "Classifier", "ObservationModel", "Regressor"]

# Outputs of so many batches are looked at.
_LOOKS = 4
# A root mean square of targets above this is far from the unit scale that the start of σ suits; of standardised
# targets it is 1.
_LARGE_TARGETS = 100.0
# Labels that count nothing where outputs have positions, as in torch's cross entropy.
_IGNORED = -100
_NOISES = ("learned", "latent", "heteroscedastic")
# Where log σ starts (learned) and has its median (latent): noise of about a third of standardised targets.
LOG_SIGMA = -1.0
# Log-variances stay within ± this: a variance below e⁻¹⁰ of standardised targets is a failure, not a fit.
_LOG_VARIANCE_BOUND = 10.0


class ObservationModel(PyroModule):
    r"""A Bayesian network with a likelihood: ``model(x, y)`` for training, ``model(x)`` for prediction.

    With ``y`` the log-likelihood of a batch of B rows is scaled to the whole data set,

    .. math:: \frac{N}{B} \sum_{n=1}^{B} \log p(y_n \mid x_n, W)

    for each batch, a short last one included. Without ``y`` there is no scale, and ``y`` is sampled. The observed
    site is ``"y"``, in a plate ``"data"`` at dimension -1.

    If N is the size of a batch by mistake, N / B is 1 and the prior weighs far too much. So the first batches of N rows
    are compared during training, and a warning appears where they hold different targets.

    **Several inputs** come as one argument: a tuple for ``net(*x)``, a dict for ``net(**x)``. A network may return an
    object with ``.logits``. With weights ``w`` the sum is that of :math:`w_n \log p`: the data then counts as many rows
    as the sum of all weights, beside the same KL.

    :param net: a network from :func:`bayesianize`, or a ``PyroModule`` with ``PyroSample`` weights. It is used, not
        copied.
    :param num_data: N, the number of rows of the whole training set.
    """

    #: several inputs are one argument, a tuple or a dict
    packs_inputs: ClassVar[bool] = True
    net: nn.Module
    num_data: int
    _watch: BatchWatch

    def __init__(self, net: nn.Module, num_data: int):
        _check_net(net)
        check_integer("num_data", num_data, 1)
        super().__init__()
        if not isinstance(net, PyroModule):
            net = BayesianNetwork(net)  # names the Pyro modules inside by their paths
        for module in net.modules():
            if isinstance(module, PyroModule):
                # A network that has run on its own may still become part of a model.
                module._pyro_context.used = False
        self.net = net
        self.num_data = int(num_data)
        self._watch, self._looks = BatchWatch(), 0

    def forward(self, x: Any, y: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Runs the network and samples or scores ``y``.

        :param x: the network's input; a tuple or a dict for networks of several inputs.
        :param y: the targets of this batch, or ``None``.
        :param weight: how often each row counts, ``(B,)``; by default once.
        :returns: ``y``, or a draw of it. Logits are the output of ``model.net``.
        """
        if y is not None and not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor of targets, not {type(y).__name__}. Pass several inputs as one tuple.")
        distribution, num_rows, y = self.likelihood(self._output(x), y)
        if weight is None or y is None:
            return self._observe(distribution, num_rows, y)
        if tuple(weight.shape) != (num_rows,):
            raise ValueError(f"weight must have one entry per row, ({num_rows},), not {tuple(weight.shape)}.")
        weight = weight if weight.is_floating_point() else weight.to(torch.get_default_dtype())
        with poutine.scale(scale=weight.clamp(min=torch.finfo(weight.dtype).tiny)):  # Pyro allows no scale of 0
            return self._observe(distribution, num_rows, y)

    def likelihood_given(self, values: dict[str, Tensor], x: Any) -> Any:
        """The distribution of y that :meth:`forward` samples from, given a value of each site of :meth:`latent_sites`;
        without Pyro's sample statements."""
        with self._pyro_context:
            for name, value in values.items():
                self._pyro_context.set(name, value)
            return self.likelihood(self._output(x), None)[0]

    def _output(self, x: Any) -> Tensor:
        """The network's output, a plain tensor of at least single precision."""
        output = network_output(self.net, x)
        # Subclasses that mark vectorised particles end here, and so does the low precision of autocast.
        particles = isinstance(output, ParticleTensor)
        if type(output) is not Tensor:
            if particles and output.dim() == 2:
                output = output.unsqueeze(-1)  # particles in front of outputs (B,)
            output = output.as_subclass(Tensor)
        if output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()
        if particles:
            output.particles = True  # type: ignore[attr-defined]  # which positions would look like
        return output

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        """The distribution of y given the network's output, the number of rows, and y as that distribution takes it."""
        raise NotImplementedError

    def _observe(self, distribution: Any, num_rows: int, y: Tensor | None) -> Tensor:
        if y is None:
            if num_rows == 0:
                raise ValueError("x has no rows.")
            plate = pyro.plate("data", num_rows, dim=-1)
        else:
            if num_rows == 0:
                raise ValueError("y has no rows. Leave empty batches out.")
            if num_rows > self.num_data:
                raise ValueError(
                    f"num_data={self.num_data} is less than the {num_rows} rows of this batch. It is the size of the "
                    "whole training set."
                )
            if num_rows == self.num_data and self.training and torch.is_grad_enabled():
                self._watch.look(
                    y,
                    f"num_data={num_rows} is the size of a batch: batches of that size came with different targets. "
                    "The prior then weighs as if there were no other data. Pass num_data=len(train), the whole set.",
                )
            # With indices given, Pyro does not draw a permutation of all data in each step.
            plate = pyro.plate("data", self.num_data, subsample=torch.arange(num_rows), dim=-1)
        with plate:
            observed: Tensor = pyro.sample("y", distribution, obs=y)
        return observed

    def _look(self, output: Tensor, looks_like: Any, name: str) -> None:
        """Warns once if the first outputs of a training run are probabilities."""
        if self._looks >= _LOOKS or is_capturing() or not output.numel() or not _checks_values():
            return
        self._looks += 1
        if looks_like(output.detach()):
            self._looks = _LOOKS
            low, high = (float(value) for value in output.detach().aminmax())
            warnings.warn(
                f"net: its outputs look like probabilities (from {low:.2g} to {high:.2g}), but are taken for logits: "
                f"predictions can never be sure. Leave out the {name} at the end of the network.",
                stacklevel=2,
            )

    def latent_sites(self) -> dict[str, dict[str, Any]]:
        """All latent sites by their names in a trace, a z before its weight, each with its prior (``"fn"``) and its
        ``"infer"`` dict.

        Made from the modules alone, without data: a guide can have its parameters from the start. The prior of a
        hierarchical weight is evaluated at z = 1. What a network draws by ``pyro.sample`` inside its ``forward`` is
        not listed.

        >>> net = vsd.nn.bayesianize(nn.Linear(3, 2), vsd.nn.HierarchicalPrior())
        >>> list(vsd.nn.Classifier(net, num_data=100).latent_sites())
        ['net.weight_z', 'net.weight']
        """
        context = self._pyro_context
        used = context.used
        recorder = _SiteRecorder()
        with poutine.block(), recorder, context, torch.random.fork_rng(devices=[]):
            _, *below = self.modules()
            for module in [*below, self]:  # the network's sites come first in a trace
                if isinstance(module, BayesianNetwork):
                    module.draw_weights()
                    module = module.network  # which may have sites of its own
                if isinstance(module, PyroModule):
                    for name in _sample_names(module):
                        getattr(module, name)
        context.used = used
        return recorder.sites


def network_output(net: Callable[..., Any], x: Any) -> Tensor:
    """What a network gives for an input, a tuple or a dict of several: a tensor, or the ``.logits`` of an object."""
    output = net(*x) if isinstance(x, tuple) else net(**x) if isinstance(x, Mapping) else net(x)
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"net must return one tensor or an object with .logits, not a {type(output).__name__}. Wrap it in a module "
            "that picks the output."
        )
    return logits


class _SiteRecorder(Messenger):
    """Notes each site and gives it a value of its support without drawing, where that is easy."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[str, dict[str, Any]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        prior = msg["fn"]
        if msg["is_observed"]:
            return
        self.sites[msg["name"]] = {"fn": prior, "infer": dict(msg["infer"])}
        init = msg["infer"].get("vsd", {}).get("init")
        support = base_constraint(prior.support)
        if init is not None:
            value = init.expand(prior.batch_shape + prior.event_shape)
        elif support is constraints.real:
            value = prior.sample().zero_()
        elif getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound"):
            value = prior.sample().fill_(1.0)
        else:
            return
        msg["value"], msg["done"] = value, True


def _sample_names(module: PyroModule) -> list[str]:
    """The names of a module's random attributes; those declared in its class exist only once they are read."""
    declared = [
        name for cls in type(module).__mro__ for name, value in vars(cls).items() if isinstance(value, PyroSample)
    ]
    return list(dict.fromkeys([*module._pyro_samples, *declared]))


def _check_net(net: Any) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a Bayesian network, not {type(net).__name__}.")
    random = any(
        (isinstance(module, BayesianNetwork) and module.weight_sites)
        or (isinstance(module, PyroModule) and _sample_names(module))
        for module in net.modules()
    )
    if not random:
        raise ValueError(f"net is a {type(net).__name__} without random weights. Use vsd.nn.bayesianize(net).")


class Classifier(ObservationModel):
    r"""One class of C per row, or for each position of a row.

    .. math:: y_n \sim \mathrm{Categorical}(\mathrm{softmax}(f_W(x_n)))

    Targets are integers from 0 to C - 1: ``(B,)`` for outputs ``(B, C)``, and ``(B, L)`` for the tokens of a sequence,
    outputs ``(B, L, C)``. ``num_data`` counts rows, not tokens.

    :param net: a Bayesian network with outputs (logits) ``(B, C)`` or ``(B, ..., C)``.
    :param num_data: the number of rows of the whole training set.
    :param class_weights: how often a target of each class counts, ``(C,)``. Probabilities are then those of data with
        such weights, and the KL weighs as for a data set of as many rows as the weights add up to.
    :param ignore_index: targets of this value count nothing; by default -100 where rows have positions.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 16, 3])), num_data=150)
    >>> model(torch.randn(10, 4)).shape  # classes drawn from the prior's predictions
    torch.Size([10])
    """

    def __init__(
        self, net: nn.Module, num_data: int, *, class_weights: Any = None, ignore_index: int | None = None
    ) -> None:
        super().__init__(net, num_data)
        if ignore_index is not None:
            check_integer("ignore_index", ignore_index)
        self.ignore_index = ignore_index
        if class_weights is not None:
            like = next(chain(net.parameters(), net.buffers()))
            class_weights = torch.as_tensor(class_weights, dtype=like.dtype, device=like.device)
            if class_weights.dim() != 1 or not bool((class_weights >= 0).all()):
                raise ValueError(f"class_weights must be one number >= 0 for each class, not {class_weights}.")
        self.register_buffer("class_weights", class_weights, persistent=False)

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        if output.dim() < 2 or output.shape[-1] < 2:
            raise ValueError(
                f"net must give outputs (B, C) for two or more classes, not {tuple(output.shape)}. For one output per "
                "row use BinaryClassifier."
            )
        num_classes, positions = output.shape[-1], _num_positions(output)
        shape = tuple(output.shape[-2 - positions : -1])
        categorical: Any = dist.Categorical(logits=output, validate_args=False)
        if y is not None:
            self._look(output, _sums_to_one, "softmax")
            y = _check_shape(y, shape, num_classes)
            ignored = _IGNORED if positions and self.ignore_index is None else self.ignore_index
            counted = None if ignored is None else y != ignored
            y = _check_labels(y if counted is None else torch.where(counted, y, torch.zeros_like(y)), num_classes)
            weight = self._weight_of(y, num_classes)
            if counted is not None:
                weight = counted if weight is None else counted * weight
            if weight is not None:
                categorical = _WeightedCategorical(output, weight)
        return (categorical.to_event(positions) if positions else categorical), shape[0], y

    def _weight_of(self, y: Tensor, num_classes: int) -> Tensor | None:
        weights = self._buffers["class_weights"]
        if weights is not None and len(weights) != num_classes:
            raise ValueError(f"class_weights must have {num_classes} entries, one for each output, not {len(weights)}.")
        return None if weights is None else weights[y]


def _sums_to_one(output: Tensor) -> bool:
    return bool((output >= 0).all() & ((output.sum(-1) - 1).abs() < 1e-4).all())


def _num_positions(output: Tensor) -> int:
    """Dimensions between the rows and the last one of outputs; those of vectorised particles come before the rows."""
    return max(output.dim() - 2 - int(getattr(output, "particles", False)), 0)


class _WeightedCategorical(dist.Categorical):
    """Log-densities times a weight for each entry."""

    def __init__(self, logits: Tensor, weight: Tensor):
        self.weight = weight
        super().__init__(logits=logits, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        density: Tensor = super().log_prob(value)
        return density * self.weight.to(density.dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "_WeightedCategorical":
        shape = torch.Size(batch_shape)
        return _WeightedCategorical(self.logits.expand(shape + self.logits.shape[-1:]), self.weight.expand(shape))


def _check_labels(y: Tensor, num_classes: int) -> Tensor:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must hold integer classes, not {y.dtype}. Use y.long().")
    if y.numel() and _checks_values():
        low, high = y.aminmax()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"y must hold classes from 0 to {num_classes - 1}, one for each output of the network; it has values "
                f"from {int(low)} to {int(high)}."
            )
    return y.long()


def _check_shape(y: Tensor, shape: tuple[int, ...], num_classes: int = 0) -> Tensor:
    """Targets in this shape; a last dimension of 1 more is dropped."""
    if tuple(y.shape) == shape:
        return y
    if tuple(y.shape) == (*shape, 1):
        return y.squeeze(-1)
    hint = ""
    if num_classes > 1 and tuple(y.shape) == (*shape, num_classes):
        hint = " Turn one-hot rows into classes, y.argmax(-1), or use BinaryClassifier for labels that are yes or no."
    elif len(shape) > 1 and y.dim() == 1:
        hint = " For one class per row, the network must give outputs (B, C)."
    raise ValueError(f"y must have the shape {shape} of the network's rows, not {tuple(y.shape)}.{hint}")


class BinaryClassifier(ObservationModel):
    r"""Yes or no, from one output per row; or for each of several labels per row.

    .. math:: y_n \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f_W(x_n)))

    :param net: a Bayesian network with outputs (logits) ``(B, 1)`` or ``(B,)``; ``(B, L)`` for L labels.
    :param num_data: the number of rows of the whole training set.

    Targets are ``(B,)``, or ``(B, L)`` for L labels, 0 or 1, of any dtype. Predictions have ``probs (B, 2)``, or
    ``(B, L, 2)``.

    >>> model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 16, 1])), num_data=150)
    >>> model(torch.randn(10, 4)).shape
    torch.Size([10])
    """

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        several = output.dim() > 1 and output.shape[-1] > 1
        if output.dim() > 1 and not several:
            output = output.squeeze(-1)
        shape = tuple(output.shape[-2:] if several else output.shape[-1:])
        bernoulli: Any = dist.Bernoulli(logits=output, validate_args=False)
        if y is not None:
            if several and y.dim() == 1:
                raise ValueError(
                    f"net must give one output per row, (B, 1) or (B,), for targets {tuple(y.shape)}, not "
                    f"{tuple(output.shape)}. For one of several classes use Classifier."
                )
            self._look(output, self._ends_in_sigmoid, "sigmoid")
            y = _check_shape(y, shape).to(output.dtype)
            if _checks_values() and not bool(((y == 0) | (y == 1)).all()):
                raise ValueError(f"y must hold labels 0 and 1, not values from {y.min().item()} to {y.max().item()}.")
        return (bernoulli.to_event(1) if several else bernoulli), shape[0], y

    def _ends_in_sigmoid(self, output: Tensor) -> bool:
        # numbers alone do not tell: the first logits of a network may all lie between 0 and 1
        *_, last = self.net.modules()
        return isinstance(last, nn.Sigmoid) and bool(((output >= 0) & (output <= 1)).all())


def _checks_values() -> bool:
    """Values are looked at while Pyro validates (its default); on a GPU each look waits for the device."""
    return bool(dist.is_validation_enabled())


class Regressor(ObservationModel):
    r"""Numbers with Gaussian noise.

    .. math:: y_n \sim \mathcal N(f_W(x_n), \sigma^2)

    ==============================  ==========================================================================
    ``noise``                       σ
    ==============================  ==========================================================================
    a number                        that number
    ``"learned"``                   a parameter ``log_sigma``, which starts at -1
    ``"latent"``                    a site ``sigma`` with the prior ``LogNormal(-1, 1)``
    ``"heteroscedastic"``           the network's: 2D outputs, D means, then D log-variances ρ; the variance is
                                    :math:`\exp(10 \tanh(\rho / 10))`, so that it can neither vanish nor explode
    ==============================  ==========================================================================

    The starts and the prior suit targets of unit scale: standardise.

    **Shapes.** Outputs ``(B, D)`` go with targets ``(B, D)``; a single output, ``(B, 1)`` or ``(B,)``, goes with
    targets ``(B,)`` or ``(B, 1)``, and predictions then are ``(B,)``.

    :param net: a Bayesian network.
    :param num_data: the number of rows of the whole training set.
    :param noise: see the table.
    :param num_outputs: for learned and latent noise: D, to give each output its own σ. By default all outputs share
        one.

    >>> model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 20, 1])), num_data=300, noise="latent")
    >>> list(model.latent_sites())
    ['net.0.weight', 'net.2.weight', 'sigma']
    >>> model(torch.randn(7, 3)).shape
    torch.Size([7])
    """

    log_sigma: Tensor
    sigma: Any

    def __init__(self, net: nn.Module, num_data: int, noise: float | str = 0.1, num_outputs: int | None = None):
        if isinstance(noise, str):
            check_choice("noise", noise, _NOISES)
        else:
            check_positive("noise", noise)
        if num_outputs is not None:
            check_integer("num_outputs", num_outputs, 1)
            if noise not in ("learned", "latent"):
                raise ValueError(f"num_outputs goes with learned or latent noise, not with noise={noise!r}.")
        super().__init__(net, num_data)
        self.noise = noise
        self.num_outputs = num_outputs
        like = next(chain(net.parameters(), net.buffers()))
        shape = () if num_outputs is None else (num_outputs,)
        start = torch.full(shape, LOG_SIGMA, dtype=like.dtype, device=like.device)
        if noise == "learned":
            # A row of one for a shared σ: torch's fully_shard cannot split a tensor without dimensions.
            self.log_sigma = nn.Parameter(start if start.dim() else start.reshape(1))
        elif noise == "latent":
            self.register_buffer("sigma_loc", start, persistent=False)
            self.sigma = PyroSample(_SigmaPrior())

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        mean, sigma, num_rows, single = self._moments(output)
        if y is not None:
            y = _check_targets(y, mean, single).to(mean.dtype)
            self._look_at_scale(y)
        normal: Any = dist.Normal(mean, sigma, validate_args=False)
        return (normal if single else normal.to_event(1)), num_rows, y

    def _look_at_scale(self, y: Tensor) -> None:
        """Warns once if the first targets of a training run are far from unit scale, and σ has to find theirs."""
        if self._looks >= _LOOKS or is_capturing() or not isinstance(self.noise, str) or not _checks_values():
            return
        if not (self.training and torch.is_grad_enabled() and y.numel()):
            return
        self._looks += 1
        size = float(y.detach().square().mean().sqrt())
        if _LARGE_TARGETS < size < math.inf:
            self._looks = _LOOKS
            warnings.warn(
                f"y: its root mean square is {size:.3g}, but σ starts for targets of unit scale. Standardise y, "
                "and convert predictions back with prediction.rescaled(std, mean).",
                stacklevel=2,
            )

    def _moments(self, output: Tensor) -> tuple[Tensor, Any, int, bool]:
        """Mean and σ of shape ``(..., B)`` where there is a single output, else ``(..., B, D)``."""
        if output.dim() == 1:
            output = output.unsqueeze(-1)
        sigma: Any
        if self.noise == "heteroscedastic":
            if output.shape[-1] % 2:
                raise ValueError(
                    "net must give an even number of outputs, means and log-variances, with noise='heteroscedastic', "
                    f"not {tuple(output.shape)}."
                )
            mean, sigma = split_moments(output)
        else:
            mean, sigma = output, self._shared_sigma(output)
        num_rows, num_outputs = mean.shape[-2:]
        if num_outputs != 1:
            return mean, sigma, num_rows, False
        if isinstance(sigma, Tensor) and sigma.dim():
            sigma = sigma.squeeze(-1)
        return mean.squeeze(-1), sigma, num_rows, True

    def _shared_sigma(self, output: Tensor) -> Any:
        """σ, broadcastable with outputs ``(..., B, D)``."""
        if self.num_outputs not in (None, output.shape[-1]):
            raise ValueError(f"net must give num_outputs={self.num_outputs} outputs, not {tuple(output.shape)}.")
        if self.noise == "learned":
            return self.log_sigma.exp()
        if self.noise == "latent":
            sigma = self.sigma
            # A draw for vectorised particles has their dimensions in front.
            return sigma.unsqueeze(-1) if self.num_outputs is None and sigma.dim() else sigma
        return self.noise


def split_moments(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and σ, each ``(..., D)``, from the 2D outputs of a network with heteroscedastic noise."""
    mean, raw = output.chunk(2, -1)
    return mean, (0.5 * _LOG_VARIANCE_BOUND * (raw / _LOG_VARIANCE_BOUND).tanh()).exp()


class _SigmaPrior:
    """The prior of a latent σ; a class, since Pyro renames functions it is given, which then cannot be pickled."""

    def __call__(self, model: PyroModule) -> Any:
        loc = model._buffers["sigma_loc"]
        assert loc is not None
        prior = dist.LogNormal(loc, torch.ones_like(loc), validate_args=False)
        return prior.to_event(1) if loc.dim() else prior


def _check_targets(y: Tensor, mean: Tensor, single: bool) -> Tensor:
    expected = tuple(mean.shape[-1:] if single else mean.shape[-2:])
    if tuple(y.shape) == expected:
        return y
    if single and tuple(y.shape) == (*expected, 1):
        return y.squeeze(-1)
    hint = ""
    if not single and y.dim() == 1:
        hint = f" The network has {expected[-1]} outputs per row: give it one, or y a column for each."
    raise ValueError(f"y must have the shape {expected} of the network's outputs, not {tuple(y.shape)}.{hint}")
