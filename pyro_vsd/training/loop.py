"""Where training stands, how it goes on, and how it gets into a checkpoint and back."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from pyro_vsd.infer import predict
from pyro_vsd.metrics import Stream
from pyro_vsd.training.batches import Batches, arguments, count_rows, epoch_seed, is_shared, take
from pyro_vsd.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_vsd.training.generators import get_rng_state, set_rng_state
from pyro_vsd.training.group import Group, mean_records
from pyro_vsd.training.history import EpochMeans, History
from pyro_vsd.training.optimizers import loose_parameters, set_loose_parameters
from pyro_vsd.training.plain import to_plain
from pyro_vsd.training.steps import make_steps
from pyro_vsd.training.stopping import Interrupt, Monitor

__all__ = ["Checkpoint", "Loop"]

# What a checkpoint holds of a run, and of each of its processes, beside the states of model, guide and optimiser.
_OF_RUN = ("seed", "batch", "batches", "history", "processes", *(f"monitor.{k}" for k in Monitor(None).state_dict()))
_OF_PROCESS = ("loader", "epoch_start", *(f"means.{k}" for k in EpochMeans().state_dict()))


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often :func:`~pyro_vsd.training.fit` saves.

    :param path: the file, replaced at each save.
    :param every_epochs: epochs between saves.
    :param every_steps: steps between saves inside of an epoch, for long ones.
    :param resume: whether to go on from the file where it exists; otherwise it is written over.
    """

    path: str | os.PathLike[str]
    every_epochs: int = 1
    every_steps: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        for name, value in (("every_epochs", self.every_epochs), ("every_steps", self.every_steps)):
            if not (value is None and name == "every_steps") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}.")


class Loop:
    """Where training stands: all of it goes into a checkpoint."""

    validation: Any
    samples: int
    callbacks: list[Callable[[History], Any]]

    def __init__(
        self, model: Any, guide: Any, batches: Batches, elbo: Any, monitor: Monitor, checkpoint: Checkpoint | None,
        accumulate: int = 1,
    ):  # fmt: skip
        self.model, self.guide, self.batches, self.elbo = model, guide, batches, elbo
        self.group, self.accumulate = batches.group, accumulate
        self.monitor, self.checkpoint = monitor, checkpoint
        self.history = History()
        self.means = EpochMeans()
        self.epoch = self.batch = self.step = 0
        self.saved: tuple[int, int] | None = None  # epoch and batch of the last save
        self.epoch_start: dict[str, Any] = {}  # generators as they were when the epoch began

    def prepare(self, optimizer: Any, scheduler: Any, interval: str) -> None:
        """Parameters, where they wait for a first batch, and what takes the steps."""
        if isinstance(self.guide, nn.Module) and not any(True for _ in self.guide.parameters()):
            args, kwargs = arguments(next(iter(self.batches.epoch(0))), None)
            set_up: Any = getattr(self.guide, "setup", self.guide)
            with torch.no_grad():
                set_up(*args, **kwargs)
        self.steps = make_steps(
            self.model, self.guide, self.elbo, optimizer, scheduler, interval, self.group, self.accumulate
        )
        own = next(self.guide.parameters(), None) if isinstance(self.guide, nn.Module) else None
        self.device = None if own is None else own.device

    # ---- the loop

    def run(self, epochs: int, interrupt: Interrupt, progress: bool | None) -> History:
        total = epochs * -(-len(self.batches) // self.accumulate) or None
        if not self.group.first:
            progress = False
        with tqdm(
            total=total, initial=self.step, desc="fit", unit="step", disable=None if progress is None else not progress
        ) as bar:
            self.history.stopped = "epochs"
            while self.epoch < epochs and not self.monitor.exhausted(self.epoch):
                interrupted = self._run_epoch(interrupt, bar)
                if self.group.any(interrupted or self.history.stopped == "interrupt"):
                    self.history.stopped = "interrupt"
                elif self.group.any(self.history.stopped == "callback"):
                    self.history.stopped = "callback"
                if self.history.stopped != "epochs":
                    break
        if self.history.stopped == "epochs" and self.monitor.exhausted(self.epoch):
            self.history.stopped = "early_stopping"
        self.group.share_buffers(self.model)
        self._save()
        if self.history.stopped != "interrupt" and self.monitor.best_states is not None:
            self._restore(self.monitor.best_states)
            self.history.best_epoch = self.monitor.best_epoch
        return self.history

    def _run_epoch(self, interrupt: Interrupt, bar: Any) -> bool:
        """One epoch, or what is left of it, or up to an interrupt: whether there was one."""
        rest = self._rest_of_epoch()
        while chunk := self._next_chunk(rest):
            for terms in self.steps.step([arguments(batch, self.device) for batch in chunk]):
                self.means.add(terms)
            self.batch, self.step = self.batch + len(chunk), self.step + 1
            bar.update()
            every = self.checkpoint.every_steps if self.checkpoint else None
            if every and self.step % every == 0:
                self._save()
            if self.group.any(interrupt.asked):
                return True
        if not self.batch:
            raise ValueError("data: expected at least one batch in an epoch, got none. Is the DataLoader empty?")
        self._end_epoch(bar)
        return interrupt.asked

    def _next_chunk(self, rest: Any) -> list[Any]:
        """The batches of one step."""
        chunk = list(itertools.islice(rest, self.accumulate))
        if self.batches.rows is None and self.group.size > 1:
            sizes = self.group.gather(len(chunk))
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"data: expected the same number of batches in each process, got {[self.batch + n for n in sizes]} "
                    "after which some have no more. Give each process as many rows, as DistributedSampler does."
                )
        return chunk

    def _rest_of_epoch(self) -> Any:
        if self.batch:  # resumed in its middle: the same batches again, up to where it was
            now = get_rng_state()
            set_rng_state(self.epoch_start["rng"])
            self.batches.set_state(self.epoch_start["loader"])
            rest = self.batches.epoch(self.epoch)
            for _ in range(self.batch):
                next(rest)
            set_rng_state(now)
            return rest
        self.epoch_start = {"rng": get_rng_state(), "loader": self.batches.state()}
        return self.batches.epoch(self.epoch)

    def _end_epoch(self, bar: Any) -> None:
        self.group.share_buffers(self.model)
        record = {"epoch": self.epoch + 1, **mean_records(self.group.gather(self.means.record()))}
        self.steps.check(record["loss"])
        self._check_parameters()
        record |= self.steps.rates()
        if self.validation is not None:
            record["validation"] = self._validate()
        value = self.monitor.value(record)
        self.steps.end_epoch(value)
        self.epoch, self.batch, self.means = self.epoch + 1, 0, EpochMeans()
        if self.monitor.stopping is not None and self.monitor.is_better(value):
            self.monitor.keep(value, self.epoch, self._states())
        self.history.append(record)
        bar.set_postfix({"epoch": self.epoch, "loss": f"{record['loss']:.4g}"}, refresh=False)
        try:
            for callback in self.callbacks:
                if callback(self.history) is True:
                    self.history.stopped = "callback"
        except KeyboardInterrupt:
            self.history.stopped = "interrupt"
        if self.checkpoint is not None and self.epoch % self.checkpoint.every_epochs == 0:
            self._save()

    def _validate(self) -> dict[str, float]:
        if callable(self.validation):
            return self.group.same(_measures(self.validation(self.model, self.guide)))
        # Always the same noise: the differences between epochs are those of the parameters.
        seed = epoch_seed(self.batches.seed, -2)
        stream = Stream()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for batch in _validation_batches(self.validation, self.group):
                args, kwargs = arguments(batch, self.device)
                if kwargs or len(args) < 2:
                    raise ValueError("validation: expected batches (x, y), inputs before the target, got others.")
                stream.update(
                    predict(self.model, self.guide, *args[:-1], num_samples=self.samples, seed=seed, progress=False),
                    args[-1],
                )
        return Stream.merged(self.group.gather(stream)).compute().to_dict()

    # ---- states

    def _check_parameters(self) -> None:
        """A gradient may overflow where the loss did not: what it spoilt is neither saved nor returned as a result."""
        for module in (self.model, self.guide):
            for name, value in module.named_parameters() if isinstance(module, nn.Module) else ():
                if not bool(value.isfinite().all()):
                    raise ValueError(
                        f"parameter {name!r}: expected finite entries, got NaN or infinities after {self.step} steps. "
                        "Lower the learning rate or scale the data."
                    )

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "guide": self.guide,
            "optimizer": self.steps.optimizer,
            "scheduler": self.steps.scheduler,
            "elbo": self.elbo,
        }

    def _states(self) -> dict[str, Any]:
        """Copies of all parameters and buffers."""
        modules = {k: v for k, v in (("model", self.model), ("guide", self.guide)) if isinstance(v, nn.Module)}
        states = {name: to_plain(module.state_dict(), name) for name, module in modules.items()}
        states["params"] = loose_parameters(self.steps.optimizer, modules, everything=False)
        copied: dict[str, Any] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, states)
        return copied

    def _restore(self, states: dict[str, Any]) -> None:
        for name, module in (("model", self.model), ("guide", self.guide)):
            if name in states:
                module.load_state_dict(states[name])
        set_loose_parameters(states["params"])()

    def _save(self) -> None:
        if self.checkpoint is None or self.saved == (self.epoch, self.batch):
            return
        self._check_parameters()
        self.saved = self.epoch, self.batch
        own = {
            "epoch_start": self.epoch_start if self.batch else None,
            "loader": self.batches.state(),
            "means": self.means.state_dict(),
        }
        # Noise and sums are each process's own; the rest is the same in all, and the first one's is saved.
        others = self.group.gather({**own, "rng": get_rng_state()} if self.group.size > 1 else {})
        state = {
            "seed": self.batches.seed,
            "batch": self.batch,
            "batches": self._shape(),
            **own,
            "history": list(self.history),
            "monitor": self.monitor.state_dict(),
            "processes": others,
        }
        if self.group.first:
            parts, extra = self._parts(), {"fit": state}
            save_checkpoint(self.checkpoint.path, **parts, epoch=self.epoch, step=self.step, extra=extra)
        self.group.any(False)  # nobody goes on before the file is there

    def _shape(self) -> list[Any]:
        """What must be as it was for the rest of an epoch to be the same batches."""
        return [self.batches.size, self.batches.rows, self.accumulate]

    def resume(self, seed: int | None) -> None:
        assert self.checkpoint is not None
        path = os.fspath(self.checkpoint.path)
        content = load_checkpoint(path, rng=False)
        state = content["extra"].get("fit") if isinstance(content["extra"], dict) else None
        if state is None:
            raise ValueError(
                f"checkpoint: expected a file written by fit, got {path!r}, which was not. Load it with "
                "load_checkpoint, and give fit another path or Checkpoint(path, resume=False)."
            )
        _check_fields(path, state, _OF_RUN)
        if seed is not None and seed != state["seed"]:
            raise ValueError(
                f"seed: expected {state['seed']}, with which {path!r} was begun, got {seed}. Use another path for "
                "another run, or Checkpoint(path, resume=False)."
            )
        here = self._shape()
        if state["batch"] and state["batches"] != here:
            raise ValueError(
                f"checkpoint: expected the batch size, the number of rows and accumulate {state['batches']} with which "
                f"the epoch in {path!r} was begun, got {here}."
            )
        if len(state["processes"]) != self.group.size:
            raise ValueError(
                f"checkpoint: expected as many processes as wrote {path!r}, {len(state['processes'])}, got "
                f"{self.group.size}. Start with as many; or read the parameters with load_checkpoint and begin a new "
                "run with another path."
            )
        grouped = self.group.size > 1
        own = state["processes"][self.group.rank] if grouped else state
        begun = ("epoch_start.rng", "epoch_start.loader") if state["batch"] else ()
        _check_fields(path, own, (*_OF_PROCESS, *begun, *(["rng"] if grouped else [])))
        load_checkpoint(path, **{name: part for name, part in self._parts().items() if part is not None})
        if grouped:
            state |= own
            set_rng_state(state["rng"])
        self.epoch, self.step, self.batch = content["epoch"], content["step"], state["batch"]
        self.saved = self.epoch, self.batch
        self.batches.seed = state["seed"]
        self.batches.set_state(state["loader"])
        self.epoch_start = state["epoch_start"] or {}
        self.means.load_state_dict(state["means"])
        self.history = History(state["history"])
        self.monitor.load_state_dict(state["monitor"])


def _check_fields(path: str, state: Any, fields: Iterable[str]) -> None:
    for field in fields:
        part = state
        for key in field.split("."):
            if not isinstance(part, dict) or key not in part:
                raise ValueError(
                    f"checkpoint: expected a file of fit with the field {field!r}, got {path!r} without. Another "
                    "version of pyro_vsd wrote it: go on with that one; or read the parameters with load_checkpoint, "
                    "and give fit another path or Checkpoint(path, resume=False)."
                )
            part = part[key]


def _measures(found: Any) -> dict[str, float]:
    """What a validation function returned, as numbers by name."""
    way_out = "Return a dict such as {'nll': value}, or what vsd.metrics.report gives."
    if not isinstance(found, Mapping):
        got = f"a {type(found).__name__}"
        raise TypeError(f"validation: expected a function that returns {{name: number}}, got {got}. {way_out}")
    numbers = {}
    for name, value in found.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"validation: expected a number for {name!r}, got {value!r}. {way_out}") from None
    return numbers


def _validation_batches(data: Any, group: Group) -> Iterable[Any]:
    """Batches to measure; in a group of processes this one's share of them, each row in one process."""
    if hasattr(data, "batches"):
        data = (data.x, data.y)
    if isinstance(data, tuple):
        rows = torch.arange(group.rank, count_rows(data), group.size)
        return [data if group.size == 1 else take(data, rows)] if len(rows) else []
    return iter(data) if is_shared(data) else itertools.islice(data, group.rank, None, group.size)
