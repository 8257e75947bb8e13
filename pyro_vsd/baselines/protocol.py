"""What every method is: built from a network, trained step by step, asked for predictions, saved and loaded.

A method's file has four parts in this order: the text (posterior, reference, cost, when to prefer it), ``build`` with
its options, ``loss`` or ``step``, ``draw`` or ``predict``. Its class derives from :class:`Method` (a network and a rule
to draw one), :class:`GuideMethod` (a Pyro model, a guide and an ELBO), a base in ``layers.py``, or a similar method.
"""

import copy
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_vsd._utils import check_choice, check_integer, evaluation_mode, num_rows, take_rows
from pyro_vsd.infer import predict as predict_by_guide
from pyro_vsd.nn import Classifier, ObservationModel, Regressor
from pyro_vsd.nn.bayesian_network import Selector
from pyro_vsd.prediction import Prediction
from pyro_vsd.prediction.base import check_labels, check_target
from pyro_vsd.prediction.collect import Collector, make_collector

__all__ = ["GuideMethod", "KLWeight", "Method", "Observation", "call", "gaussian_penalty"]

#: a factor of the KL: a number, or a schedule ``step -> weight``
KLWeight = float | Callable[[int], float]
# Rows per pass of a prediction: enough to keep matrix products busy, little enough for a ResNet's activations.
ROWS = 512
# Where log σ starts: noise of about a third of standardised targets.
LOG_SIGMA = -1.0


class Method(nn.Module):
    """A way to learn a distribution over networks. The network given is copied, never changed.

    A method is a module: ``state_dict()`` holds parameters, buffers, the optimiser's state and the number of steps, all
    of which ``torch.load(…, weights_only=True)`` reads. Training continues after ``load_state_dict`` as if it had not
    stopped. Nothing is left in Pyro's global parameter store. A subclass's ``build`` calls :meth:`use`.

    :param net: the network, on its device and in its dtype.
    :param num_data: number of rows of the whole training set.
    :param task: ``"classification"`` (outputs are logits ``(B, C)``, targets integers ``(B,)``) or ``"regression"``
        (outputs are means; a single output, ``(B, 1)`` or ``(B,)``, goes with targets ``(B,)``, else ``(B, D)``).
    :param lr: learning rate of the :attr:`optimizer`, which any scheduler of torch takes.
    :param noise: in regression the standard deviation of the targets' noise: ``"learned"``, or a number.
    :param include: which layers are Bayesian, see :func:`~pyro_vsd.nn.bayesianize`; the others are point estimates. Not
        for MAP, deep ensembles and SWAG, which treat the network as a whole.
    :param exclude: which layers are not.
    :param options: those of the method's ``build``.
    """

    default_lr = 1e-3
    #: whether there are options ``include`` and ``exclude``
    chooses_layers = True
    #: the networks there are to predict with, where their number is fixed (MAP: 1); ``None``: as many as asked for
    max_samples: int | None = None
    #: makes the modules from the copied network and the options: ``build(net, *, option=…)``
    build: Callable[..., None]
    optimizer: torch.optim.Optimizer
    net: nn.Module
    observation: "Observation"

    def __init__(
        self,
        net: nn.Module,
        *,
        num_data: int,
        task: str = "classification",
        lr: float | None = None,
        noise: float | str = "learned",
        include: Selector | None = None,
        exclude: Selector | None = None,
        **options: Any,
    ):
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net must be an nn.Module, not a {type(net).__name__}.")
        check_integer("num_data", num_data, 1)
        check_choice("task", task, ("classification", "regression"))
        if noise != "learned" and not (isinstance(noise, numbers.Real) and 0 < noise < math.inf):
            raise ValueError(f"noise must be 'learned' or a positive number, not {noise!r}.")
        known = self.options()
        selection = {"include": include, "exclude": exclude}
        chosen = [name for name, value in selection.items() if value is not None and not self.chooses_layers]
        if unknown := sorted(set(options) - set(known)) + chosen:
            names = ", ".join(["lr", "noise", *(selection if self.chooses_layers else ()), *known])
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}. Its options are {names}.")
        self.num_data, self.task, self.noise = int(num_data), task, noise
        self.include, self.exclude = include, exclude
        self.lr = self.default_lr if lr is None else lr
        self.num_steps = 0
        self.build(copy.deepcopy(net), **known | options)
        self.optimizer = self.make_optimizer()

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The method's own options with their defaults."""
        _, _, *options = inspect.signature(cls.build).parameters.values()
        return {option.name: option.default for option in options}

    def use(self, net: nn.Module) -> None:
        """Registers the network and its observation model."""
        self.net = net
        self.observation = Observation(self.task, self.noise, net)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of all trainable parameters; called once, after ``build``."""
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        """The loss *of the full data set* (Pyro's convention: N/B times the batch's, plus penalties once)."""
        return self.negative_log_likelihood(call(self.net, x), y)

    def negative_log_likelihood(self, output: Tensor, y: Tensor) -> Tensor:
        """Of the full data set, from a batch's outputs and targets."""
        return -self.num_data / len(y) * self.observation.log_prob(output, y).sum()

    def step(self, x: Any, y: Tensor) -> float:
        """One training step on a batch; returns the loss of the full data set, as it was before the step."""
        self.train()
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        value = self.checked(loss)
        self.backward(loss)
        self.optimizer.step()
        self.num_steps += 1
        return value

    def backward(self, loss: Tensor) -> None:
        """The gradients of the loss; a method whose optimiser does not bring its own scale divides by N here."""
        loss.backward()

    def checked(self, loss: Tensor) -> float:
        """The loss as a number. Raises where it is not finite; parameters are still as before the step."""
        value = loss.item()
        if not math.isfinite(value):
            where = f"step {self.num_steps + 1} of {type(self).__name__}"
            raise ValueError(f"the loss is {value} in {where}. Lower lr, or look at the data for NaN and infinities.")
        return value

    def draw(self, index: int) -> Callable[[Any], Any]:
        """One draw, number ``index``: a function from a batch of inputs to the distribution of its targets."""
        return lambda x: self.observation.distribution(call(self.net, x))

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_size: int | None = None, seed: int | None = None
    ) -> Prediction:
        """The predictive distribution of every row, in evaluation mode.

        :param x: inputs, ``(N, ...)``; a tuple for networks of several inputs.
        :param num_samples: networks to average over, at most :attr:`max_samples`.
        :param batch_size: rows per pass.
        :param seed: makes the prediction reproducible; by default a number from torch's global generator.
        """
        size = ROWS if batch_size is None else batch_size
        check_integer("num_samples", num_samples, 1)
        check_integer("batch_size", size, 1)
        num_samples = min(num_samples, self.max_samples or num_samples)
        if not (rows := num_rows(x, "x")):
            raise ValueError("x has no rows.")
        devices = sorted({p.device.index for p in self.parameters() if p.is_cuda})
        collector: Collector | None = None
        with torch.no_grad(), evaluation_mode(self), torch.random.fork_rng(devices=devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            for sample in range(num_samples):
                distribution_of = self.draw(sample)
                for start in range(0, rows, size):
                    index = torch.arange(start, min(start + size, rows))
                    distribution = distribution_of(take_rows(x, index))
                    if collector is None:
                        collector = make_collector(distribution, num_samples, rows, keep=True)
                    collector.add(sample * rows + start, distribution)
        assert collector is not None
        return collector.finish()

    def get_extra_state(self) -> dict[str, Any]:
        return {"method": type(self).__name__, "num_steps": self.num_steps, "optimizer": self.optimizer.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["method"] != type(self).__name__:
            raise ValueError(f"state_dict is that of a {state['method']}, and this is a {type(self).__name__}.")
        self.num_steps = int(state["num_steps"])
        self.optimizer.load_state_dict(state["optimizer"])


class GuideMethod(Method):
    """A method that is a Pyro model, a guide and an ELBO.

    A subclass's ``build`` calls :meth:`observed` for the model and :meth:`compose` for the whole. When it returns, the
    guide must have all its parameters: one of Pyro's has them after a call inside :meth:`own_store` (see BBB).
    """

    model: Any
    guide: Any
    elbo: Any

    def observed(self, net: nn.Module) -> ObservationModel:
        """The observation model of the task around a Bayesian network (:func:`pyro_vsd.nn.bayesianize`)."""
        if self.task == "classification":
            return Classifier(net, self.num_data)
        return Regressor(net, self.num_data, noise=self.noise)

    def compose(self, model: Any, guide: Any, elbo: Any) -> None:
        """Registers the three parts."""
        self.model, self.guide, self.elbo = model, guide, elbo
        self._store: Any = None

    def own_store(self) -> AbstractContextManager[Any]:
        """A parameter store of this method's own: names never clash with those of other methods or of the user."""
        if self._store is None:
            self._store = {"params": {}, "constraints": {}}
        return pyro.get_param_store().scope(self._store)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        if self.task == "classification":
            check_classes(y)
        with self.own_store():
            loss: Tensor = self.elbo.differentiable_loss(self.model, self.guide, x, y)
        return loss

    def predict(self, x: Any, num_samples: int = 100, **options: Any) -> Prediction:
        with self.own_store():
            return predict_by_guide(self.model, self.guide, x, num_samples=num_samples, **options)

    def get_extra_state(self) -> dict[str, Any]:
        state = super().get_extra_state()
        if hasattr(self.elbo, "state_dict"):
            state["elbo"] = self.elbo.state_dict()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self._store = None
        if "elbo" in state:
            self.elbo.load_state_dict(state["elbo"])


class Observation(nn.Module):
    """The distribution of the targets given the outputs of a plain network, with the options of :class:`Method`.

    :param like: a module whose first parameter gives dtype and device.

    >>> observation = Observation("classification", "learned", nn.Linear(1, 1))
    >>> observation.log_prob(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """

    def __init__(self, task: str, noise: float | str, like: nn.Module):
        super().__init__()
        self.task, self.noise = task, noise
        if task == "regression" and noise == "learned":
            self.log_sigma = nn.Parameter(next(like.parameters()).new_tensor(LOG_SIGMA))

    def distribution(self, output: Tensor) -> Any:
        """Of batch shape ``(B,)``; leading dimensions of samples may come before."""
        if self.task == "classification":
            return dist.Categorical(logits=output, validate_args=False)
        sigma: Any = self.log_sigma.exp() if self.noise == "learned" else self.noise
        if output.dim() > 1 and output.shape[-1] > 1:
            return dist.Normal(output, sigma, validate_args=False).to_event(1)
        return dist.Normal(output if output.dim() == 1 else output.squeeze(-1), sigma, validate_args=False)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood of each row, ``(B,)``; with outputs ``(S, B, C)`` of S samples ``(S, B)``."""
        distribution = self.distribution(output)
        if self.task == "classification":
            check_classes(y)
            y = check_labels(y, output.shape[-2], output.shape[-1])
        else:
            y = check_target(y, (distribution.batch_shape[-1], *distribution.event_shape))
        log_prob: Tensor = distribution.log_prob(y)
        return log_prob


def check_classes(y: Tensor) -> None:
    """Raises where classes are real numbers: as a rule, the task was not given."""
    if y.is_floating_point():
        wrong = f"y must hold integer labels for task='classification', not {y.dtype}."
        raise ValueError(f"{wrong} Make the method with task='regression', or use y.long().")


def call(net: nn.Module, x: Any) -> Tensor:
    """The network's output for inputs that may be a tuple."""
    output: Tensor = net(*x) if isinstance(x, tuple) else net(x)
    return output


def gaussian_penalty(parameters: Iterable[Tensor], scale: float | None) -> Tensor | float:
    r""":math:`\sum \lVert W \rVert^2 / 2\sigma^2`, over the parameters with two or more dimensions: weights alone."""
    if scale is None:
        return 0.0
    # the norm's gradient is one pass, that of p.square().sum() three
    return sum(torch.linalg.vector_norm(p).square() for p in parameters if p.dim() > 1) / (2 * scale**2)
