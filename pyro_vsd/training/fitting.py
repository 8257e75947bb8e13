"""The training loop: ``vsd.fit``."""

import contextlib
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from tqdm import tqdm

from pyro_vsd._utils import (
    check_choice,
    check_integer,
    check_nonnegative,
    check_positive,
    map_tensors,
    mix_seed,
    num_rows,
    packs_inputs,
)
from pyro_vsd.infer import VSD_ELBO, predict
from pyro_vsd.metrics import Report, Stream
from pyro_vsd.training.checkpoint import (
    check_rng_state,
    get_rng_state,
    load_checkpoint,
    loose_parameters,
    save_checkpoint,
    set_loose_parameters,
    set_rng_state,
)
from pyro_vsd.training.compiling import CompiledLoss, stepper, steps_not_counted
from pyro_vsd.training.data import Batches, ShortBatchWatch, arguments, inputs_and_target
from pyro_vsd.training.distributed import Group
from pyro_vsd.training.history import EpochMeans, History
from pyro_vsd.training.lengths import auto_epochs, auto_rate, cosine

__all__ = [
    "LOOK_EVERY",
    "Checkpoint",
    "EarlyStopping",
    "check_rate",
    "fit",
    "interrupts",
    "keep_frozen",
    "make_elbo",
    "make_optimizer",
]

# Away from the CPU, looking at the loss waits for the device: only this often.
LOOK_EVERY = 50
# One rate for all: noise variances that learn several times faster than the weights collapse where the KL is light.
# Without a schedule of ours: that of the optimisers themselves.
_RATE = 1e-3


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often :func:`~pyro_vsd.training.fit` saves.

    :param path: the file, replaced at each save.
    :param every_epochs: epochs between saves.
    :param every_steps: steps between saves inside an epoch, for long ones.
    :param resume: whether to continue from the file if it exists; if not, it is overwritten.
    """

    path: str | os.PathLike[str]
    every_epochs: int = 1
    every_steps: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        check_integer("every_epochs", self.every_epochs, 1)
        if self.every_steps is not None:
            check_integer("every_steps", self.every_steps, 1)


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training after ``patience`` epochs without a better value of a metric, and restores the best state.

    :param patience: epochs to wait for something better.
    :param metric: a validation metric or ``"loss"``; by default ``nll`` or ``log_likelihood``, whichever there is.
    :param min_delta: a better value is better by more than this.
    :param mode: ``"min"`` or ``"max"``, for metrics that ``vsd.metrics`` does not know.

    >>> EarlyStopping(patience=5, metric="ece")
    EarlyStopping(patience=5, metric='ece', min_delta=0.0, mode=None)
    """

    patience: int = 10
    metric: str | None = None
    min_delta: float = 0.0
    mode: str | None = None

    def __post_init__(self) -> None:
        check_integer("patience", self.patience, 1)
        check_nonnegative("min_delta", self.min_delta)
        if self.mode is not None:
            check_choice("mode", self.mode, ("min", "max"))


def fit(
    model: Any,
    guide: Any,
    data: Any,
    epochs: int | None = None,
    *,
    lr: float | None = None,
    kl_weight: float | Callable[[int], float] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scheduler_interval: str = "epoch",
    elbo: Any = None,
    batch_size: int | None = None,
    target: str | None = None,
    sample_weight: Tensor | None = None,
    accumulate: int = 1,
    validation: Any = None,
    validation_samples: int = 20,
    early_stopping: EarlyStopping | int | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    compile: bool | str = "auto",
    progress: bool | None = None,
    seed: int | None = None,
    callbacks: Iterable[Callable[[History], Any]] = (),
) -> History:
    """Trains a model and its guide.

    Ctrl-C ends training after the current step, saves the checkpoint and returns the history; a second one ends at
    once. A loss that is not finite raises and names its site, on the CPU before the parameters are touched.

    Under ``torchrun``, after ``torch.distributed.init_process_group()``, all processes call ``fit`` with the same
    arguments and end with the same parameters and history. Each takes its own rows of each batch and draws its own
    noise; the gradient is that of all rows together. The first one saves, to a file that all can read.

    Batch norms whose parameters are frozen (``requires_grad=False``) run in evaluation mode: frozen layers keep their
    running statistics, too. A warning appears where the likelihood is not scaled to the rows of ``data``, and where a
    loader's last batch is much shorter than the others.

    :param data: tensors ``(x, y)``, or ``(x1, x2, y)`` for a network of several inputs, or a dict of them; any
        map-style ``Dataset``; or a ``DataLoader`` of such batches. Models of ``vsd.nn`` pass the inputs on to their
        network, others are called as ``model(*batch)`` or ``model(**batch)``.
    :param epochs: passes over the data, including those before a resumed checkpoint. By default as many as make 3,000
        steps, more for more than 1,000 rows.
    :param lr: the learning rate of all parameters; of ``optimizer``, if that is a function.
    :param kl_weight: λ of the default objective: a number, or a schedule (:mod:`pyro_vsd.infer.schedules`).
    :param optimizer: of ``torch.optim`` or ``pyro.optim``; or a function of parameter groups (``name`` and ``params``)
        that makes one, such as ``torch.optim.AdamW``. By default Adam, at one rate for all: without a scheduler either,
        it falls along a cosine to zero, from 0.01 or for 20,000 rows and more from 0.001; with one it is 0.001.
        Parameters that a function keeps in Pyro's store need Pyro's optimisers.
    :param scheduler: a learning-rate scheduler, or a function of the optimiser that makes one. A
        ``ReduceLROnPlateau`` gets the metric that early stopping uses.
    :param scheduler_interval: ``"epoch"`` or ``"batch"``.
    :param elbo: the objective, with its KL weight or schedule; by default ``VSD_ELBO(kl_weight=kl_weight)``.
    :param batch_size: most rows in a batch, of each process. The sizes of an epoch's batches differ by at most one. A
        ``DataLoader`` has its own. 100 by default.
    :param target: the key of the targets in dicts; by default ``"labels"`` or ``"y"``.
    :param sample_weight: how often each row of ``data`` counts, ``(N,)``, for models of ``vsd.nn``. The KL then weighs
        as for a data set of as many rows as the weights add up to. Dicts may have a key ``"sample_weight"`` instead.
    :param accumulate: batches behind each step of the optimiser, if memory holds only a part of the rows of a step.
        Their losses are averaged, so that the KL counts once. Schedules count the optimiser's steps.
    :param validation: data as above, evaluated after each epoch by ``vsd.predict`` and ``vsd.metrics.report``; or a
        function ``(model, guide) -> {name: number}``.
    :param validation_samples: posterior samples for these predictions.
    :param early_stopping: epochs to wait for a better validation, or an :class:`EarlyStopping`.
    :param checkpoint: a path, or a :class:`Checkpoint`. If the file exists, training continues from it, on the CPU bit
        for bit.
    :param compile: whether the step is compiled (:func:`compile_step`), which takes some twenty seconds. ``"auto"``
        captures the step if more than 500 are to come, compiles it if so many are that it pays, and stays eager where
        that is as fast. A checkpoint keeps the choice. Several processes and Pyro's optimisers always run eagerly.
    :param progress: a progress bar; by default only in a terminal.
    :param seed: of the order of the rows and of the noise. With a seed, torch's global generators are left as they
        were; without, they decide.
    :param callbacks: functions of the history, called after each epoch; one that returns ``True`` ends training.

    >>> train, test = vsd.datasets.cubic()
    >>> net = vsd.nn.bayesianize(vsd.nn.mlp([1, 10, 1]))
    >>> model = vsd.nn.Regressor(net, num_data=len(train), noise="learned")
    >>> history = vsd.fit(model, vsd.VSDGuide(model), train, epochs=3, validation=test, seed=0)
    >>> len(history), sorted(history[-1])
    (3, ['epoch', 'kl', 'kl_weight', 'log_likelihood', 'loss', 'lr', 'validation'])
    """
    if hasattr(model, "prototype_trace"):
        raise TypeError("model is a guide. The model comes first: fit(model, guide, data).")
    if hasattr(epochs, "shape"):
        raise TypeError("epochs is an array. Pass inputs and targets as one tuple: fit(model, guide, (x, y)).")
    if epochs is not None:
        check_integer("epochs", epochs, 1)
    check_integer("accumulate", accumulate, 1)
    check_choice("scheduler_interval", scheduler_interval, ("epoch", "batch"))
    elbo, rate = make_elbo(elbo, kl_weight), check_rate(lr, optimizer)
    if sample_weight is not None and not packs_inputs(model):
        raise ValueError("sample_weight needs a model of vsd.nn. Others use pyro.poutine.scale around the likelihood.")
    if not isinstance(compile, bool):
        check_choice("compile", compile, ("auto",))
    if seed is not None:
        check_integer("seed", seed)
    if isinstance(early_stopping, int):
        early_stopping = EarlyStopping(patience=early_stopping)
    if not isinstance(early_stopping, (EarlyStopping, type(None))):
        raise TypeError(f"early_stopping must be epochs to wait or an EarlyStopping, not {early_stopping!r}.")
    if early_stopping is not None and validation is None and early_stopping.metric != "loss":
        raise ValueError("early_stopping needs validation data, or EarlyStopping(metric='loss').")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    batches = Batches(data, batch_size, weight=sample_weight)
    if validation is not None and not callable(validation):
        validation = Batches(validation, name="validation")
    num_data, rows = getattr(model, "num_data", None), None if batches.is_loader else batches.num_rows
    if num_data is not None and rows is not None and num_data != rows:
        advice = f"Make the model with num_data={rows}, unless this is intended."
        warnings.warn(f"the model has num_data={num_data} and the data {rows} rows. {advice}", stacklevel=2)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with Group() as group, contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        order_seed = group.same(int(torch.randint(2**62, ()).item()) if seed is None else seed)
        if group.size > 1:  # a script that seeds all processes alike still wants different noise in each
            torch.manual_seed(mix_seed(order_seed, group.rank))
            batches.check_shared()
        if isinstance(model, nn.Module):
            model.train()
            keep_frozen(model)
        if getattr(guide, "calibration", None) is not None:
            guide.calibration = None  # it was that of the parameters so far
        def set_up() -> None:
            with torch.no_grad(), batches.generators_kept():
                device = next((p.device for p in guide.parameters()), None)
                for (first,) in islice(batches.steps(0, order_seed), 1):
                    args, kwargs = arguments(group.same(first), device, model, target)
                    getattr(guide, "setup", guide)(*args, **kwargs)

        if isinstance(guide, nn.Module) and not any(True for _ in guide.named_parameters()):
            set_up()
        steps = batches.num_steps(accumulate, group.size)
        if epochs is None and steps is None:
            raise ValueError("epochs must be given for data of unknown length.")
        if steps is not None:
            size = batches.num_rows or steps * batches.batch_size
            epochs = auto_epochs(size, steps) if epochs is None else epochs
            if optimizer is None and scheduler is None and isinstance(model, nn.Module):
                rate = rate or auto_rate(size)
                scheduler, scheduler_interval = _cosine_to_zero(epochs * steps), "batch"
        assert epochs is not None
        optimizer = make_optimizer(model, guide, elbo, optimizer, rate)
        run = _Run(
            model, guide, elbo, batches, optimizer, scheduler, scheduler_interval,
            accumulate, validation, validation_samples, early_stopping, checkpoint, list(callbacks), order_seed, group,
            compile, epochs, target,
        )  # fmt: skip
        if checkpoint is not None and checkpoint.resume and group.same(os.path.exists(checkpoint.path)):
            run.resume(seed)
        if getattr(guide, "needs_setup", False):  # a resumed one has been
            set_up()
        with interrupts() as pressed:
            return run.train(pressed, progress)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """The first Ctrl-C is noted in the list, since half a step would update half of the parameters; the second raises.

    Replaces Python's own handler only, and in the main thread only.
    """
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- one step of an optimiser

_Batch = tuple[tuple[Any, ...], dict[str, Any]]
_Step = Callable[[list[_Batch]], list[dict[str, Any]]]


def make_elbo(elbo: Any, kl_weight: Any) -> Any:
    """The objective of a training run."""
    if elbo is None:
        return VSD_ELBO() if kl_weight is None else VSD_ELBO(kl_weight=kl_weight)
    if kl_weight is not None:
        raise ValueError("kl_weight does not go with elbo, which has its own: VSD_ELBO(kl_weight=…).")
    return elbo


def check_rate(lr: Any, optimizer: Any) -> float | None:
    """The learning rate, or ``None``."""
    if lr is not None:
        check_positive("lr", lr)
        if isinstance(optimizer, (optim.Optimizer, PyroOptim)):
            raise ValueError("lr does not go with an optimizer that has been made: pass its class, torch.optim.AdamW.")
    return lr


def keep_frozen(model: nn.Module) -> None:
    """Evaluation mode for batch norms whose parameters are frozen: their statistics do not move either."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "running_mean") and own and not any(p.requires_grad for p in own):
            module.eval()


def make_optimizer(
    model: Any, guide: Any, elbo: Any, optimizer: Any, lr: float | None = None
) -> optim.Optimizer | PyroOptim:
    """:param optimizer: an optimiser, or a function of parameter groups that makes one; ``None`` for Adam.
    :param lr: the learning rate; ``None`` is the default, or that of the function."""
    rate = _RATE if lr is None else lr
    if optimizer is None and not isinstance(model, nn.Module):
        # parameters are in Pyro's store, where a torch optimiser finds none
        return PyroOptim(torch.optim.Adam, {"lr": rate})
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, (optim.Optimizer, PyroOptim))):
        if hasattr(guide, "parameter_groups"):
            groups = guide.parameter_groups(lr=rate)
        else:
            groups = [{"params": list(elbo(model, guide).parameters()), "lr": rate}]
        if optimizer is None:  # one group, and one pass over all parameters where torch has one
            parameters = [p for group in groups for p in group["params"]]
            devices = {p.device.type for p in parameters}
            return torch.optim.Adam(parameters, lr=rate, fused=True if devices <= {"cpu", "cuda"} else None)
        if lr is None:  # those of a group would override the function's own
            groups = [{k: v for k, v in group.items() if k != "lr"} for group in groups]
        optimizer = optimizer(groups)
    if not isinstance(optimizer, (optim.Optimizer, PyroOptim)):
        raise TypeError(f"optimizer must be one of torch.optim or pyro.optim, not a {type(optimizer).__name__}.")
    return optimizer


def _cosine_to_zero(steps: int) -> Callable[[optim.Optimizer], Any]:
    """A schedule from the optimiser's rate to zero."""
    return lambda optimizer: LambdaLR(optimizer, lambda step: cosine(min(step, steps), steps))


def _check_finite(elbo: Any, loss: Any, where: str = "") -> None:
    if hasattr(elbo, "check_finite"):
        elbo.check_finite()  # names the site
    if not math.isfinite(float(loss)):
        raise ValueError(f"the loss is {float(loss)}{where}. Lower the learning rate or look at the data.")


def _torch_step(
    guide: Any, objective: nn.Module, optimizer: optim.Optimizer, group: Group, compiled: CompiledLoss | None
) -> _Step:
    """A step on the mean of the losses of some batches, in which the KL counts once; for each the terms of its loss."""
    elbo: Any = objective.elbo
    own = {id(p) for p in (guide if isinstance(guide, nn.Module) else objective).parameters()}
    if own.isdisjoint(id(p) for parameters in optimizer.param_groups for p in parameters["params"]):
        raise ValueError("optimizer holds none of the guide's parameters. Pass optimizer=torch.optim.Adam, the class.")
    # its gradients are the means over all processes, its start is the first one's
    loss_module: Any = nn.parallel.DistributedDataParallel(objective) if group.size > 1 else objective
    where = " in a different process" if group.size > 1 else ""
    evaluations, take = count(1), stepper(optimizer)

    def step(batches: list[_Batch]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def closure() -> Any:
            optimizer.zero_grad(set_to_none=True)
            # Around all of fit, autocast would keep its first copies of the parameters.
            torch.clear_autocast_cache()
            found.clear()
            total: Any = 0.0
            for number, (args, kwargs) in enumerate(batches, 1):
                # processes exchange the gradients with the last batch
                silent = group.size > 1 and number < len(batches)
                with loss_module.no_sync() if silent else contextlib.nullcontext():
                    if compiled is not None:
                        loss = compiled.backward(args, kwargs, 1 / len(batches))
                    else:
                        loss = loss_module(*args, **kwargs)
                    found.append(getattr(elbo, "terms", None) or {"loss": loss.detach()})
                    agreed = group.mean(loss.detach())
                    if loss.device.type == "cpu" or next(evaluations) % LOOK_EVERY == 0:
                        _check_finite(elbo, agreed, where)  # before the parameters are touched
                    if compiled is None:
                        (loss if len(batches) == 1 else loss / len(batches)).backward()
                total = total + agreed / len(batches)
            return total

        with steps_not_counted(elbo):
            take(closure)
        if isinstance(elbo, VSD_ELBO):
            elbo.step += 1
        torch.clear_autocast_cache()
        return found

    return step


def _pyro_step(model: Any, guide: Any, elbo: Any, optimizer: PyroOptim) -> _Step:
    """A step of ``SVI``, which counts it."""
    svi = SVI(model, guide, optimizer, elbo)

    def step(batches: list[_Batch]) -> list[dict[str, Any]]:
        ((args, kwargs),) = batches
        loss = svi.step(*args, **kwargs)
        torch.clear_autocast_cache()
        _check_finite(elbo, loss)
        return [getattr(elbo, "terms", None) or {"loss": loss}]

    return step


# ---- the loop

# What a checkpoint holds of a run, beside the states of model, guide, optimiser and ELBO and of each process.
_OF_RUN = ("done", "history", "best", "best_epoch", "best_states")


class _Run:
    """One call of ``fit``: its options, and where it is: finished epochs, steps, and steps of the epoch (``done``)."""

    def __init__(
        self, model: Any, guide: Any, elbo: Any, batches: Batches, optimizer: Any, scheduler: Any, interval: str,
        accumulate: int, validation: Any, samples: int, stopping: EarlyStopping | None, checkpoint: Checkpoint | None,
        callbacks: list[Callable[[History], Any]], seed: int, group: Group, compile: bool | str, epochs: int,
        target: str | None,
    ):  # fmt: skip
        self.model, self.guide, self.elbo, self.batches, self.interval = model, guide, elbo, batches, interval
        self.accumulate, self.validation, self.samples, self.stopping = accumulate, validation, samples, stopping
        self.checkpoint, self.callbacks, self.group, self.target = checkpoint, callbacks, group, target
        self.watch = ShortBatchWatch()
        self.modules = {k: m for k, m in (("model", model), ("guide", guide)) if isinstance(m, nn.Module)}
        own = self.modules["guide"].parameters() if "guide" in self.modules else iter(())
        self.device = next((parameter.device for parameter in own), None)
        self.settings: dict[str, Any] = {
            "seed": seed, "batch_size": batches.batch_size, "num_rows": batches.num_rows, "accumulate": accumulate,
            "processes": group.size, "generators": len(batches.state()),
        }  # fmt: skip
        self.optimizer, self.epochs = optimizer, epochs
        self.compiled: CompiledLoss | None = None
        if compile is True and (isinstance(self.optimizer, PyroOptim) or group.size > 1):
            warnings.warn("compile: several processes and Pyro's optimisers run eagerly.", stacklevel=3)
        if isinstance(self.optimizer, PyroOptim):
            if scheduler is not None:
                raise ValueError("scheduler cannot be combined with an optimizer of Pyro: use pyro.optim.StepLR, …")
            if accumulate > 1 or group.size > 1:
                raise ValueError("optimizer must be one of torch.optim for accumulate > 1 or several processes.")
            self._take = _pyro_step(model, guide, elbo, self.optimizer)
        else:
            if scheduler is not None and not hasattr(scheduler, "step"):
                scheduler = scheduler(self.optimizer)
            if getattr(scheduler, "optimizer", self.optimizer) is not self.optimizer:
                raise ValueError("scheduler is attached to a different optimizer.")
            objective = elbo(model, guide)
            if compile and group.size == 1:
                self.compiled = CompiledLoss(objective, None if compile is True else self._steps_to_come)
            self._take = _torch_step(guide, objective, self.optimizer, group, self.compiled)
        self.scheduler = scheduler
        self.epoch = self.step = self.done = 0
        self.history, self.means = History(), EpochMeans()
        self.best, self.best_epoch, self.best_states = math.inf, 0, None
        self.epoch_start: Any = None  # generators as they were when the epoch began
        self.saved: Any = None  # epoch and steps of the last save

    def _steps_to_come(self, rows: int | None) -> int:
        """How many batches of this size, or of any, are to come."""
        per_epoch = self.batches.num_batches(rows, self.accumulate)
        return (self.epochs - self.epoch) * per_epoch

    def train(self, pressed: list[int], progress: bool | None) -> History:
        epochs, per_epoch = self.epochs, self.batches.num_steps(self.accumulate, self.group.size)
        if self.group.rank:
            progress = False
        total, disable = per_epoch and epochs * per_epoch, None if progress is None else not progress
        with tqdm(total=total, initial=self.step, desc="fit", unit="step", disable=disable) as bar:
            if self.compiled is not None:
                self.compiled.announce = (lambda text: None) if bar.disable else bar.write
            stopped = "epochs"
            while self.epoch < epochs and not self._exhausted() and stopped == "epochs":
                stopped = self._train_epoch(pressed, bar)
        if stopped == "epochs" and self._exhausted():
            stopped = "early_stopping"
        self.history.stopped = stopped
        self.group.share_buffers(self.model)
        self._save()
        if stopped != "interrupt" and self.best_states is not None:
            for name, module in self.modules.items():
                module.load_state_dict(self.best_states[name])
            set_loose_parameters(self.best_states["params"])()
            self.history.best_epoch = self.best_epoch
        return self.history

    def _exhausted(self) -> bool:
        return self.stopping is not None and self.epoch - self.best_epoch >= self.stopping.patience

    def _train_epoch(self, pressed: list[int], bar: Any) -> str:
        """Trains to the end of the epoch or to an interrupt: why to stop, or ``"epochs"``."""
        for batches in self._rest_of_epoch():
            if self.batches.is_loader:
                for batch in batches:
                    self.watch.look(batch)
            for terms in self._take([arguments(batch, self.device, self.model, self.target) for batch in batches]):
                self.means.add(terms)
            if self.step == 0:
                self._check_scale(batches[-1])
            if self.scheduler is not None and self.interval == "batch":
                self.scheduler.step()
            self.done, self.step = self.done + 1, self.step + 1
            bar.update()
            every = self.checkpoint.every_steps if self.checkpoint else None
            if every and self.step % every == 0:
                self._save()
            if self.group.any(bool(pressed)):
                return "interrupt"
        if not self.done:
            raise ValueError("data has no batch: is the DataLoader empty?")
        stopped = self._end_epoch(bar)
        if self.checkpoint is not None and self.epoch % self.checkpoint.every_epochs == 0:
            self._save()
        found = self.group.gather("interrupt" if pressed else stopped)
        return next((reason for reason in ("interrupt", "callback") if reason in found), "epochs")

    def _rest_of_epoch(self) -> Iterator[list[Any]]:
        now = self._generators()
        if self.epoch_start is None:
            self.epoch_start = now
        else:  # resumed inside the epoch: the same batches again, up to where it was
            self._set_generators(self.epoch_start)
        steps = self.batches.steps(self.epoch, self.settings["seed"], self.accumulate, self.group.rank, self.group.size)
        for _ in range(self.done):
            next(steps)
        if self.done:
            set_rng_state(now["rng"])
        return self.group.in_step(steps) if self.group.size > 1 and self.batches.is_loader else steps

    def _end_epoch(self, bar: Any) -> str:
        self.group.share_buffers(self.model)
        record = {"epoch": self.epoch + 1, **self.group.mean_record(self.means.record())}
        _check_finite(self.elbo, record["loss"])
        self._check_parameters()
        if isinstance(self.optimizer, optim.Optimizer):
            record["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self.validation is not None:
            record["validation"] = self._validate()
        value = _watched(record, self.stopping)
        self._step_scheduler(value)
        self.epoch, self.done, self.means, self.epoch_start = self.epoch + 1, 0, EpochMeans(), None
        better = self.stopping and (self.best == math.inf or value < self.best - self.stopping.min_delta)
        if better and math.isfinite(value):
            self.best, self.best_epoch, self.best_states = value, self.epoch, self._states()
        self.history.append(record)
        bar.set_postfix({"epoch": self.epoch, "loss": f"{record['loss']:.4g}"}, refresh=False)
        try:
            stop = [callback(self.history) is True for callback in self.callbacks]
        except KeyboardInterrupt:
            return "interrupt"
        return "callback" if any(stop) else "epochs"

    def _step_scheduler(self, value: float) -> None:
        """:param value: the metric in which a plateau shows, lower is better."""
        if isinstance(self.optimizer, PyroLRScheduler):
            plateau = self.optimizer.pt_scheduler_constructor is ReduceLROnPlateau
            self.optimizer.step(*([value] if plateau else []))
        elif self.scheduler is not None and self.interval == "epoch":
            plateau = isinstance(self.scheduler, ReduceLROnPlateau)
            self.scheduler.step(*([-value if self.scheduler.mode == "max" else value] if plateau else []))

    def _validate(self) -> dict[str, float]:
        if not isinstance(self.validation, Batches):
            found = self.validation(self.model, self.guide)
            try:
                metrics = {name: float(value) for name, value in found.items()}
            except (AttributeError, TypeError, ValueError, RuntimeError):
                raise TypeError(f"validation must return numbers by name, {{'nll': 0.5}}, not {found!r}.") from None
            return self.group.same(metrics)
        # Always the same noise: the differences between epochs are those of the parameters.
        seed = mix_seed(self.settings["seed"], -2)
        stream = Stream()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for batch in self.validation.share(self.group.rank, self.group.size):
                inputs, y = inputs_and_target(batch, self.device, self.target)
                if y is None:
                    raise ValueError(
                        "validation must give batches (x, y), inputs before the target, or dicts with one."
                    )
                options: dict[str, Any] = {"num_samples": self.samples, "seed": seed, "progress": False}
                stream.update(predict(self.model, self.guide, *inputs, **options), y)
        return Stream.merged(self.group.gather(stream)).compute().to_dict()

    def _check_scale(self, batch: Any) -> None:
        """Warns if the likelihood counts a different number of rows than there are: then the KL weighs wrongly."""
        scale, known = getattr(self.elbo, "likelihood_scale", None), self.batches.possible_rows()
        stated = hasattr(self.model, "num_data")
        if scale is None or not known or (stated and not self.batches.is_loader):  # which has been compared
            return
        self.elbo.stop_watching()  # for the same, without knowing the rows
        rows = num_rows(batch, "batch")
        slack = 1.5 if self.batches.is_loader else 1.01  # drop_last, samplers
        if all(max(scale * rows / count, count / (scale * rows)) > slack for count in known):
            count = max(known)
            advice = f"num_data={count}" if stated else f"pyro.plate(name, {count}, subsample_size=len(x))"
            warnings.warn(
                f"the likelihood of a batch of {rows} rows has scale {scale:.3g} and counts {scale * rows:.4g} rows, "
                f"but data has {count}: the KL weighs {count / (scale * rows):.3g} times what it should. Use {advice}.",
                stacklevel=5,
            )

    # ---- states

    def _check_parameters(self) -> None:
        """A gradient can overflow where the loss does not: such parameters are neither saved nor returned."""
        for module in self.modules.values():
            for name, value in module.named_parameters():
                if not bool(value.isfinite().all()):
                    raise ValueError(f"parameter {name!r} is not finite after {self.step} steps. Lower the rate.")

    def _generators(self) -> dict[str, Any]:
        return {"rng": get_rng_state(), "loader": self.batches.state()}

    def _set_generators(self, state: dict[str, Any]) -> None:
        set_rng_state(state["rng"])
        self.batches.set_state(state["loader"])

    def _states(self) -> Any:
        """Copies of all parameters and buffers."""
        states: dict[str, Any] = {name: dict(module.state_dict()) for name, module in self.modules.items()}
        states["params"] = loose_parameters(self.optimizer, self.modules)
        return map_tensors(lambda tensor: tensor.detach().clone(), states)

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "guide", "optimizer", "scheduler", "elbo")}

    def _save(self) -> None:
        if self.checkpoint is None or self.saved == (self.epoch, self.done):
            return
        self._check_parameters()
        self.saved = self.epoch, self.done
        own = {"generators": self._generators(), "epoch_start": self.epoch_start, "means": vars(self.means)}
        # Noise and sums are each process's own. The rest is the same in all, and the first one saves it.
        state: dict[str, Any] = {"settings": self.settings, "processes": self.group.gather(own)}
        state["compiled"] = {} if self.compiled is None else self.compiled.choices
        state |= {name: getattr(self, name) for name in _OF_RUN}
        if self.group.rank == 0:
            parts = self._parts() | {"epoch": self.epoch, "step": self.step, "extra": {"fit": state}}
            save_checkpoint(self.checkpoint.path, **parts)
        self.group.any(False)  # nobody continues before the file is there

    def resume(self, seed: int | None) -> None:
        """Continues from the checkpoint. Nothing is changed unless all of it fits."""
        assert self.checkpoint is not None
        path = os.fspath(self.checkpoint.path)
        content = load_checkpoint(path, rng=False)
        advice = "start a new run with a different path or Checkpoint(path, resume=False)."
        try:
            state = content["extra"]["fit"]
            before = {name: state["settings"][name] for name in self.settings}
            fixed = ["processes", "generators"] + ["seed"] * (seed is not None)
            fixed += ["batch_size", "num_rows", "accumulate"] if state["done"] else []  # inside an epoch
            wrong = [f"{k}={before[k]}, not {self.settings[k]}" for k in fixed if before[k] != self.settings[k]]
            if wrong:
                raise ValueError(f"checkpoint: the run in {path!r} has {'; '.join(wrong)}. Continue it so, or {advice}")
            own = state["processes"][self.group.rank]
            found = {name: state[name] for name in _OF_RUN} | {"epoch_start": own["epoch_start"]}
            found["history"] = History(state["history"])
            compiled = {int(rows): str(choice) for rows, choice in state["compiled"].items()}
            found["means"] = EpochMeans(*(own["means"][name] for name in vars(self.means)))
            for generators in (own["generators"], own["epoch_start"]):
                if generators is not None or state["done"]:
                    check_rng_state(generators["rng"])
                    for loader in generators["loader"]:
                        torch.Generator().set_state(loader)
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise ValueError(f"checkpoint: {path!r} was not written by this version of fit: {advice}") from error
        load_checkpoint(path, **self._parts())
        self._set_generators(own["generators"])
        vars(self).update(found, epoch=content["epoch"], step=content["step"])
        self.settings["seed"] = before["seed"]
        if self.compiled is not None:
            self.compiled.choices = compiled
        self.saved = self.epoch, self.done


def _watched(record: dict[str, Any], stopping: EarlyStopping | None) -> float:
    """The metric that early stopping and plateaus use, with its sign changed if higher is better."""
    metrics = {"loss": record["loss"], **record.get("validation", {})}
    name, mode = (stopping.metric, stopping.mode) if stopping else (None, None)
    if name is None:
        name = next((n for n in ("nll", "log_likelihood") if n in metrics), None if stopping else "loss")
    if name is None or name not in metrics:
        raise ValueError(f"early_stopping: metric must be one of {list(metrics)}, not {name!r}.")
    better = mode or ("lower" if name == "loss" else Report({}, num_rows=0).better(name))
    if not better.startswith(("min", "max", "lower", "higher")):
        raise ValueError(f"early_stopping needs a mode for the metric {name!r}: EarlyStopping(mode='min' or 'max').")
    value = float(metrics[name])
    return -value if better.startswith(("max", "higher")) else value
