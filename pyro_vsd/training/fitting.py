"""The training loop for those who want one."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pyro_vsd.infer import VSD_ELBO
from pyro_vsd.training.batches import Batches, epoch_seed
from pyro_vsd.training.group import Group
from pyro_vsd.training.history import History
from pyro_vsd.training.loop import Checkpoint, Loop
from pyro_vsd.training.stopping import EarlyStopping, Interrupt, Monitor

__all__ = ["fit"]


def fit(
    model: Any,
    guide: Any,
    data: Any,
    *,
    epochs: int,
    optimizer: Any = None,
    scheduler: Any = None,
    scheduler_interval: str = "epoch",
    elbo: Any = None,
    batch_size: int = 100,
    accumulate: int = 1,
    validation: Any = None,
    validation_samples: int = 20,
    early_stopping: EarlyStopping | int | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    callbacks: Iterable[Callable[[History], Any]] = (),
) -> History:
    """Trains a model and its guide.

    Ctrl-C ends training after the step it is in, saves where there is a checkpoint, and returns the history so far; a
    second one ends at once. A loss that is not finite raises, naming the site it came from; on the CPU before the
    parameters are touched. With a checkpoint, calling ``fit`` again in a new process goes on where it was, on the CPU
    bit for bit.

    Under ``torchrun``, after ``torch.distributed.init_process_group()``, all processes call ``fit`` with the same
    arguments and end with the same parameters and history. Each takes its own rows of each batch and draws its own
    noise; the gradient is that of all their rows together. The first one saves, to a file that all can read, and shows
    the progress bar. Callbacks are called in each; what stops one stops all.

    :param data: ``vsd.datasets.Data``, a tuple of tensors ``(x, y)``, or a ``DataLoader``.
    :param epochs: passes over the data, those before a resumed checkpoint included.
    :param optimizer: of ``torch.optim`` or ``pyro.optim``; or a function of parameter groups (``name`` and ``params``)
        that makes one, such as ``torch.optim.AdamW``. By default Adam, at one rate for all.
        Parameters that a function keeps in Pyro's store need Pyro's optimisers.
    :param scheduler: a learning-rate scheduler, or a function of the optimiser that makes one. A
        ``ReduceLROnPlateau`` is given what early stopping watches.
    :param scheduler_interval: ``"epoch"`` or ``"batch"``.
    :param elbo: the objective, where a KL weight or its schedule is set: ``VSD_ELBO(kl_weight=…)``.
    :param batch_size: rows in a batch, of each process; a ``DataLoader`` has its own.
    :param accumulate: batches behind each step of the optimiser, where memory holds only a part of the rows a step
        should see. Their losses are averaged, so that the KL counts once; schedules count the optimiser's steps.
    :param validation: data as above, measured after each epoch by ``vsd.predict`` and ``vsd.metrics.report``; or a
        function ``(model, guide) -> {name: number}``.
    :param validation_samples: posterior samples for these predictions.
    :param early_stopping: epochs to wait for a better validation, or an :class:`EarlyStopping`.
    :param checkpoint: a path, or a :class:`Checkpoint`. Where the file exists, training goes on from it.
    :param progress: a progress bar; by default one where somebody watches.
    :param seed: of the batches' order and the noise. With it torch's global generators are as before afterwards;
        without, they decide.
    :param callbacks: functions of the history, called after each epoch; one that returns ``True`` ends training.

    >>> import pyro_vsd as vsd
    >>> train, test = vsd.datasets.cubic()
    >>> net = vsd.nn.bayesianize(vsd.nn.mlp([1, 10, 1]))
    >>> model = vsd.nn.Regressor(net, num_data=len(train), noise="learned")
    >>> history = fit(model, vsd.VSDGuide(model), train, epochs=3, validation=test, seed=0)
    >>> len(history), sorted(history[-1])
    (3, ['epoch', 'kl', 'kl_weight', 'log_likelihood', 'loss', 'lr', 'validation'])
    """
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs: expected an integer >= 1, got {epochs!r}.")
    if seed is not None and not isinstance(seed, int):
        raise TypeError(f"seed: expected an integer, got {seed!r}.")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected an integer >= 1, got {accumulate!r}.")
    if isinstance(early_stopping, int):
        early_stopping = EarlyStopping(patience=early_stopping)
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        raise TypeError(f"early_stopping: expected epochs to wait or an EarlyStopping, got {early_stopping!r}.")
    sound = validation is None or callable(validation) or hasattr(validation, "batches")
    if not sound and (not hasattr(validation, "__iter__") or isinstance(validation, torch.Tensor)):
        raise TypeError(f"validation: expected data or a function (model, guide), got a {type(validation).__name__}.")
    if early_stopping is not None and validation is None and early_stopping.metric != "loss":
        raise ValueError(
            "early_stopping: expected validation data to watch, got none. Pass validation=…, or watch the training "
            "loss: EarlyStopping(metric='loss')."
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    group = Group()
    with (
        contextlib.closing(group),
        contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=devices),
    ):
        if seed is not None:
            torch.manual_seed(seed)
        order_seed = group.same(int(torch.randint(2**62, ()).item()) if seed is None else seed)
        if group.size > 1:  # a script that seeds all processes alike still wants noise of their own
            torch.manual_seed(epoch_seed(order_seed, group.rank))
        batches = Batches(data, batch_size, order_seed, group)
        _check_num_data(model, batches.rows)
        if isinstance(model, nn.Module):
            model.train()
        elbo = VSD_ELBO() if elbo is None else elbo
        loop = Loop(model, guide, batches, elbo, Monitor(early_stopping), checkpoint, accumulate)
        loop.validation, loop.samples, loop.callbacks = validation, validation_samples, list(callbacks)
        loop.prepare(optimizer, scheduler, scheduler_interval)
        if checkpoint is not None and checkpoint.resume and group.same(os.path.exists(checkpoint.path)):
            loop.resume(seed)
        with Interrupt() as interrupt:
            return loop.run(epochs, interrupt, progress)


def _check_num_data(model: Any, rows: int | None) -> None:
    num_data = getattr(model, "num_data", None)
    if rows is None or num_data is None or num_data == rows:
        return
    warnings.warn(
        f"the model weighs the likelihood for num_data={num_data} rows, and the data has {rows}. Make the model with "
        f"num_data={rows}, unless this is meant.",
        stacklevel=3,
    )
