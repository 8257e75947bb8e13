"""What the observation models share: the network, the number of data, the plate, and the list of latent sites."""

import numbers
import warnings
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_vsd.distributions import WeightPrior
from pyro_vsd.distributions.lazy_weight import ParticleTensor

__all__ = ["ObservationModel"]

# How many batches of num_data rows are compared: two different ones by chance have the same labels, four hardly.
LOOKS = 4


class ObservationModel(PyroModule):
    r"""A Bayesian network with a likelihood: ``model(x, y)`` for training, ``model(x)`` for prediction.

    With ``y`` the log-likelihood of a batch of B rows is scaled to the whole data set,

    .. math:: \frac{N}{B} \sum_{n=1}^{B} \log p(y_n \mid x_n, W)

    for each batch, a short last one included. Without ``y`` there is no scale, and ``y`` is sampled. The observed
    site is ``"y"``, in a plate ``"data"`` at dimension -1.

    Where N is the size of a batch by mistake, N / B is 1 and training goes on, with a prior that weighs far too much.
    So the first batches of N rows are compared while training, and a warning says when they hold different targets.

    :param net: a network from :func:`bayesianize`, or another ``PyroModule`` with ``PyroSample`` weights. It is used,
        not copied.
    :param num_data: N, the number of rows of the whole training set.
    """

    net: nn.Module
    num_data: int
    _watch: "_BatchWatch"

    def __init__(self, net: nn.Module, num_data: int):
        _check_net(net)
        if not isinstance(num_data, numbers.Integral) or isinstance(num_data, bool):
            raise TypeError(
                f"num_data: expected the number of rows of the training set, an int, got {num_data!r}. The objective "
                "weighs the data against the prior with it, so there is no default."
            )
        if num_data < 1:
            raise ValueError(f"num_data: expected a positive number of rows, got {num_data}.")
        super().__init__()
        for module in net.modules():
            if isinstance(module, PyroModule):
                # A network that has run on its own may still become part of a model.
                module._pyro_context.used = False
        self.net = net
        self.num_data = int(num_data)
        self._watch = _BatchWatch()

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Runs the network and samples or scores ``y``.

        :param x: the network's input; a tuple for networks of several inputs.
        :param y: the targets of this batch, or ``None``.
        :returns: ``y``, or a draw of it.
        """
        if y is not None and not isinstance(y, Tensor):
            raise TypeError(f"y: expected a tensor of targets, got {type(y).__name__}.")
        output = self.net(*x) if isinstance(x, tuple) else self.net(x)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"net: expected a network that returns one tensor, got {type(output).__name__}. Wrap it in a module "
                "that picks the output."
            )
        # Subclasses that mark vectorised particles end here, and so does the low precision of autocast.
        if type(output) is not Tensor:
            if isinstance(output, ParticleTensor) and output.dim() == 2:
                output = output.unsqueeze(-1)  # particles in front of outputs (B,)
            output = output.as_subclass(Tensor)
        if output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()
        law, num_rows, y = self.likelihood(output, y)
        return self._observe(law, num_rows, y)

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        """The law of y given the network's output, the number of rows, and y as the law wants it."""
        raise NotImplementedError

    def _observe(self, law: Any, num_rows: int, y: Tensor | None) -> Tensor:
        if y is None:
            if num_rows == 0:
                raise ValueError("x: expected at least one row, got an input for which the network has no output.")
            plate = pyro.plate("data", num_rows, dim=-1)
        else:
            if num_rows == 0:
                raise ValueError("y: expected a batch of at least one row, got none. Leave empty batches out.")
            if num_rows > self.num_data:
                raise ValueError(
                    f"num_data: expected at least the {num_rows} rows of this batch, got num_data={self.num_data}. "
                    "It is the size of the whole training set, not of a batch."
                )
            if num_rows == self.num_data and self.training and torch.is_grad_enabled():
                self._watch.look(y, num_rows)
            # With indices given, Pyro does not draw a permutation of all data in each step.
            plate = pyro.plate("data", self.num_data, subsample=torch.arange(num_rows), dim=-1)
        with plate:
            observed: Tensor = pyro.sample("y", law, obs=y)
        return observed

    def latent_sites(self) -> dict[str, Any]:
        """All latent sites with their priors, by their names in a trace, a z before its weight.

        Made from the modules alone, without data: a guide can have its parameters from the start. The prior of a
        hierarchical weight is evaluated at z = 1. What a network draws by ``pyro.sample`` inside its ``forward`` is
        not listed.

        >>> import pyro_vsd as vsd
        >>> net = vsd.nn.bayesianize(nn.Linear(3, 2), vsd.nn.HierarchicalPrior())
        >>> list(vsd.nn.Classifier(net, num_data=100).latent_sites())
        ['net.weight_z', 'net.weight']
        """
        context = self._pyro_context
        used = context.used
        recorder = _PriorRecorder()
        with poutine.block(), recorder, context, torch.random.fork_rng(devices=[]):
            _, *below = self.modules()
            for module in [*below, self]:  # the network's sites come first in a trace
                if isinstance(module, PyroModule):
                    for name in _sample_names(module):
                        getattr(module, name)
        context.used = used
        return recorder.priors


class _BatchWatch:
    """Warns once where batches of ``num_data`` rows differ: then it is the size of a batch, not of the data.

    Targets are compared in sorted order, since a full batch may come shuffled, and inputs not at all, since they may
    be augmented. On a GPU each of the few looks waits for the device.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.of: Any = None
        self.first: Tensor | None = None

    def look(self, y: Tensor, num_data: int) -> None:
        if self.of != (num_data, y.dtype):  # the data has grown, as in active learning, or been cast
            self.looks, self.of, self.first = 0, (num_data, y.dtype), None
        if self.looks >= LOOKS or torch.compiler.is_compiling():
            return
        self.looks += 1
        # NaN, which may stand for missing targets, is equal to nothing.
        targets = y.detach().cpu().flatten().nan_to_num().sort().values
        if self.first is None:
            self.first = targets
        elif not torch.equal(self.first, targets):
            self.looks = LOOKS
            warnings.warn(
                f"num_data: expected the number of rows of the whole training set, got {num_data}, the size of a "
                "batch: batches of that size came with different targets. The prior then weighs as if there were no "
                "other data. Pass the size of the whole set: num_data=len(train).",
                stacklevel=2,
            )
        if self.looks >= LOOKS:
            self.first = None


class _PriorRecorder(Messenger):
    """Notes the prior of each site and gives it a value of its support without drawing, where that is easy."""

    def __init__(self) -> None:
        super().__init__()
        self.priors: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        law = msg["fn"]
        if msg["is_observed"]:
            return
        self.priors[msg["name"]] = law
        shape = law.batch_shape + law.event_shape
        support = law.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if isinstance(law, WeightPrior) and law.init is not None:
            value = law.init.expand(shape)
        elif support is constraints.real:
            value = law.mean if isinstance(law, WeightPrior) else law.sample().zero_()
        elif getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound"):
            value = law.sample().fill_(1.0)
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
        raise TypeError(f"net: expected a Bayesian network, a PyroModule, got {type(net).__name__}.")
    if not any(isinstance(module, PyroModule) and _sample_names(module) for module in net.modules()):
        raise ValueError(
            f"net: expected a network with random weights, got a {type(net).__name__} without any. Make it Bayesian "
            "first: vsd.nn.bayesianize(net)."
        )
