"""What every method is: built from a network, trained step by step, asked for predictions, saved and loaded.

A method's file has four parts in this order: the text (posterior, reference, cost, when to prefer it), ``build`` with
its options, ``loss`` or ``step``, ``draw`` or ``predict``. It derives from :class:`NetworkMethod` (a network and a rule
to draw one) or from :class:`GuideMethod` (a Pyro model, a guide and an ELBO), and imports no other method.
"""

import copy
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_vsd.baselines.observation import Observation, call, check_classes, num_rows, rows_of
from pyro_vsd.infer import predict as predict_by_guide
from pyro_vsd.infer.modes import evaluation_mode
from pyro_vsd.nn import Classifier, ObservationModel, Regressor
from pyro_vsd.prediction import Prediction
from pyro_vsd.prediction.collect import Collector, make_collector

__all__ = [
    "GuideMethod",
    "Method",
    "NetworkMethod",
    "Observation",
    "call",
    "gaussian_penalty",
    "latent_sites_of",
    "network_init",
]

TASKS = ("classification", "regression")
# Rows per pass of a prediction: enough to keep matrix products busy, little enough for a ResNet's activations.
ROWS = 512


class Method(nn.Module):
    """A way to learn a distribution over networks. The network given is copied, never changed.

    A method is a module: ``state_dict()`` holds parameters, buffers and, under ``_extra_state``, the optimiser's state
    and the number of steps, all plain tensors and numbers that ``torch.load(…, weights_only=True)`` reads; training
    goes on after ``load_state_dict`` as if it had not stopped. Nothing is left in Pyro's global parameter store.

    :param net: the network, on its device and in its dtype.
    :param num_data: number of rows of the whole training set.
    :param task: ``"classification"`` (outputs are logits ``(B, C)``, targets integers ``(B,)``) or ``"regression"``
        (outputs are means; a single output, ``(B, 1)`` or ``(B,)``, goes with targets ``(B,)``, else ``(B, D)``).
    :param lr: learning rate of the :attr:`optimizer`, an ordinary one of torch: give it to any scheduler of torch.
        ``None`` is the method's own default.
    :param noise: in regression the standard deviation of the targets' noise: ``"learned"``, or a number.
    :param options: those of the method's ``build``.
    """

    default_lr = 1e-3
    #: the networks there are to predict with, where their number is fixed (MAP: 1); ``None``: as many as asked for
    max_samples: int | None = None
    #: makes the modules from the copied network and the options: ``build(net, *, option=…)``
    build: Callable[..., None]
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        net: nn.Module,
        *,
        num_data: int,
        task: str = "classification",
        lr: float | None = None,
        noise: float | str = "learned",
        **options: Any,
    ):
        super().__init__()
        _check_arguments(net, num_data, task, noise)
        known = list(inspect.signature(self.build).parameters)[1:]
        unknown = sorted(set(options) - set(known))
        if unknown:
            names = ", ".join(["lr", "noise", *known])
            raise TypeError(f"{type(self).__name__}: expected options among {names}, got {', '.join(unknown)}.")
        self.num_data, self.task, self.noise = int(num_data), task, noise
        self.lr = self.default_lr if lr is None else lr
        self.num_steps = 0
        self.build(copy.deepcopy(net), **options)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of all trainable parameters; called once, after ``build``."""
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        """The loss *of the full data set* (Pyro's convention: N/B times the batch's, plus penalties once)."""
        raise NotImplementedError

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
        """The loss as a number, or an error where it is not finite; parameters are still as before the step."""
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(
                f"expected a finite loss, got {value} in step {self.num_steps + 1} of {type(self).__name__}. Lower lr, "
                "or look at the data for NaN and infinities."
            )
        return value

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_size: int | None = None, seed: int | None = None
    ) -> Prediction:
        """The predictive distribution of every row, in evaluation mode.

        :param x: inputs, ``(N, ...)``; a tuple for networks of several inputs.
        :param num_samples: networks to average over, at most :attr:`max_samples`.
        :param batch_size: rows per pass.
        :param seed: makes the prediction reproducible; by default a number from torch's global generator.
        """
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "method": type(self).__name__,
            "num_steps": self.num_steps,
            "optimizer": self.optimizer.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["method"] != type(self).__name__:
            raise ValueError(f"expected the state of a method {type(self).__name__}, got that of {state['method']}.")
        self.num_steps = int(state["num_steps"])
        self.optimizer.load_state_dict(state["optimizer"])


class NetworkMethod(Method):
    """A method that has a network :attr:`net` and its :attr:`observation`, and knows how to draw a network.

    A subclass's ``build`` calls :meth:`use`; it may leave ``loss`` (the negative log-likelihood) and ``draw`` (the
    network itself) as they are, or replace them.
    """

    net: nn.Module
    observation: Observation

    def use(self, net: nn.Module) -> None:
        """Registers the network and its observation model."""
        self.net = net
        self.observation = Observation(self.task, self.noise, net)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        return self.negative_log_likelihood(call(self.net, x), y)

    def negative_log_likelihood(self, output: Tensor, y: Tensor) -> Tensor:
        """Of the full data set, from a batch's outputs and targets."""
        return -self.num_data / len(y) * self.observation.log_prob(output, y).sum()

    def draw(self, index: int) -> Callable[[Any], Any]:
        """One draw, number ``index``: a function from a batch of inputs to the law of its targets."""
        return lambda x: self.observation.law(call(self.net, x))

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_size: int | None = None, seed: int | None = None
    ) -> Prediction:
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}.")
        num_samples = min(num_samples, self.max_samples or num_samples)
        rows, size = num_rows(x), batch_size or ROWS
        devices = sorted({p.device.index for p in self.parameters() if p.is_cuda})
        collector: Collector | None = None
        with torch.no_grad(), evaluation_mode(self), torch.random.fork_rng(devices=devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            for sample in range(num_samples):
                law_of = self.draw(sample)
                for start in range(0, rows, size):
                    index = torch.arange(start, min(start + size, rows))
                    law = law_of(rows_of(x, index))
                    if collector is None:
                        collector = make_collector(law, num_samples, rows, keep=True)
                    collector.add(sample * rows + index, law)
        assert collector is not None
        return collector.finish()


class GuideMethod(Method):
    """A method that is a Pyro model, a guide and an ELBO, trained in the ELBO's differentiable form by one optimiser.

    A subclass's ``build`` calls :meth:`observed` for the model and :meth:`compose` for the whole. When it returns, the
    guide must have all its parameters: those of ``vsd`` do; one of Pyro's, made for ``latent_sites_of`` the model,
    has them after a call ``guide()`` inside :meth:`own_store`.
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

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_size: int | None = None, seed: int | None = None
    ) -> Prediction:
        with self.own_store():
            return predict_by_guide(
                self.model, self.guide, x, num_samples=num_samples, batch_size=batch_size, seed=seed
            )

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


def gaussian_penalty(parameters: Iterable[Tensor], scale: float | None) -> Tensor | float:
    r"""The negative log-density :math:`\sum \lVert W \rVert^2 / 2\sigma^2` of a Gaussian prior, without its constant.

    Of the parameters with two or more dimensions: weights, not biases and norms. Zero where ``scale`` is ``None``.
    """
    if scale is None:
        return 0.0
    # the norm's gradient is one pass, that of p.square().sum() three
    return sum(torch.linalg.vector_norm(p).square() for p in parameters if p.dim() > 1) / (2 * scale**2)


def latent_sites_of(model: ObservationModel) -> Callable[..., None]:
    """A Pyro model of the latent sites alone, so that Pyro's autoguides can be set up without data.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> guide = pyro.infer.autoguide.AutoNormal(latent_sites_of(model), init_loc_fn=network_init)
    >>> sorted(guide())
    ['net.0.weight', 'net.2.weight']
    """

    def sites(*args: Any, **kwargs: Any) -> None:
        for name, prior in model.latent_sites().items():
            pyro.sample(name, prior)

    return sites


def network_init(site: dict[str, Any]) -> Tensor:
    """An ``init_loc_fn`` for Pyro's autoguides: a weight starts where the network has it."""
    init = getattr(site["fn"], "init", None)
    if init is None:
        raise ValueError(f"site {site['name']!r}: expected a weight made by bayesianize, got {site['fn']}.")
    start: Tensor = init.detach().clone()
    return start


def _check_arguments(net: Any, num_data: Any, task: Any, noise: Any) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected an nn.Module, got {type(net).__name__}.")
    if not isinstance(num_data, numbers.Integral) or isinstance(num_data, bool) or num_data < 1:
        raise ValueError(f"num_data: expected the number of rows of the training set, got {num_data!r}.")
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(map(repr, TASKS))}, got {task!r}.")
    number = isinstance(noise, numbers.Real) and not isinstance(noise, bool) and 0 < float(noise) < math.inf
    if noise != "learned" and not number:
        raise ValueError(f"noise: expected 'learned' or a positive number, got {noise!r}.")
