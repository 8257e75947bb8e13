"""The training loop of an ensemble: all members together, step by step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_vsd._utils import map_tensors
from pyro_vsd.ensemble.members import Member
from pyro_vsd.infer import VSD_ELBO
from pyro_vsd.training.checkpoint import get_rng_state, set_rng_state
from pyro_vsd.training.compiling import CompiledLoss
from pyro_vsd.training.data import Batches, arguments
from pyro_vsd.training.joint import JointLoss, NotJointError
from pyro_vsd.training.lengths import cosine

__all__ = ["Run", "load_states", "states_of"]


def states_of(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Copies of all parameters and buffers."""
    states = [{"model": dict(model.state_dict()), "guide": dict(guide.state_dict())} for model, guide in members]
    copied: list[dict[str, Any]] = map_tensors(lambda tensor: tensor.detach().clone(), states)
    return copied


def load_states(members: Sequence[Member], states: Sequence[dict[str, Any]]) -> None:
    """What :func:`states_of` gave."""
    for (model, guide), own in zip(members, states, strict=True):
        model.load_state_dict(own["model"])
        guide.load_state_dict(own["guide"])


class Run:
    """One training run on some rows, of all members or of those that this process trains.

    :param weights: λ of each member; 0 for a plain one.
    :param chosen: which of the members.
    :ivar epoch: epochs done; ``done``: steps of the current epoch.
    :ivar records: for each epoch its number, the members' mean losses and the rate.
    """

    def __init__(
        self,
        members: Sequence[Member],
        weights: Sequence[Any],
        batches: Batches,
        epochs: int,
        lr: float,
        seed: int,
        chosen: slice,
    ):
        self.batches, self.lr, self.seed = batches, lr, seed
        self.members, self.numbers = members[chosen], range(len(members))[chosen]
        self.set_epochs(epochs)
        self.losses: list[Any] = []
        for (model, guide), weight in zip(self.members, weights[chosen], strict=True):
            model.train()
            elbo = VSD_ELBO(kl_weight=weight)
            elbo.auto_step = False
            self.losses.append(elbo(model, guide))
        self.device = next(self.members[0][1].parameters()).device
        self.epoch = self.done = 0
        self.records: list[dict[str, Any]] = []
        self._sum: Any = 0.0
        self.reason: str | None = None
        self._take: Callable[..., Tensor]

    def set_epochs(self, epochs: int) -> None:
        self.epochs = epochs
        self.steps = epochs * (self.batches.num_steps() or 1)

    def start(self, reason: str | None = None) -> None:
        """Decides how the members run: as one program or, for the reason given or found, one after the other.

        A first batch is tried; nothing of that remains.
        """
        self.reason, joint = reason, None
        self._compiled: list[CompiledLoss] = []
        if reason is None:
            try:
                joint = JointLoss(self.losses)
                for (batch,) in self.batches.steps(0, self.seed):
                    joint.backward(*arguments(batch, self.device, self.members[0][0]))
                    break
            except NotJointError as error:
                self.reason = str(error)
                if joint is not None:
                    joint.part()
                joint = None
        self.joint = joint
        if joint is not None:
            parameters: list[Any] = joint.parameters
            self._take = joint.backward
        else:
            self._compiled = [CompiledLoss(loss, self._steps_to_come) for loss in self.losses]
            parameters = [p for loss in self.losses for p in loss.parameters() if p.requires_grad]
            self._take = lambda args, kwargs: torch.stack([loss.backward(args, kwargs) for loss in self._compiled])
        fused = True if self.device.type in ("cpu", "cuda") else None
        self.optimizer = torch.optim.Adam(parameters, lr=self.lr, fused=fused)

    def _steps_to_come(self, rows: int | None) -> int:
        return (self.epochs - self.epoch) * self.batches.num_batches(rows)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.epoch * (self.batches.num_steps() or 1) + self.done

    def train(self, after_step: Callable[[], bool]) -> bool:
        """Trains to the end, or until ``after_step`` says to stop; whether it reached the end."""
        while self.epoch < self.epochs:
            steps = self.batches.steps(self.epoch, self.seed)
            for _ in range(self.done):  # resumed inside the epoch
                next(steps)
            for (batch,) in steps:
                self._step(*arguments(batch, self.device, self.members[0][0]))
                self.done += 1
                if self.done == self.batches.num_steps():
                    self._end_epoch()
                if after_step():
                    return False
        return True

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * cosine(self.step, self.steps)
            for parameter in group["params"]:
                parameter.grad = None
        for loss in self.losses:
            loss.elbo.step = self.step
        losses = self._take(args, kwargs)
        if not bool(losses.isfinite().all()):  # before the parameters are touched
            first = int((~losses.isfinite()).nonzero()[0])
            raise ValueError(
                f"the loss of member {self.numbers[first]} is {float(losses[first])} after {self.step} steps. Lower lr "
                "or look at the data for NaN and infinities."
            )
        self.optimizer.step()
        self._sum = self._sum + losses.detach().double()

    def _end_epoch(self) -> None:
        means = (self._sum / self.done).tolist()
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.epoch, self.done, self._sum = self.epoch + 1, 0, 0.0
        record = {"epoch": self.epoch, "loss": math.fsum(means) / len(means), "losses": means, "lr": rate}
        self.records.append(record)

    def finish(self) -> None:
        """Gives the members parameters of their own."""
        if self.joint is not None:
            self.joint.part()
        for loss in self.losses:
            for p in loss.parameters():
                p.grad = None

    # ---- states

    def state(self) -> dict[str, Any]:
        names = ("epoch", "done", "records", "reason")
        return {
            **{name: getattr(self, name) for name in names},
            "sum": self._sum,
            "compiled": [loss.choices for loss in self._compiled],
            "members": states_of(self.members),
            "optimizer": self.optimizer.state_dict(),
            "rng": get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        load_states(self.members, state["members"])
        self.start(state["reason"])
        for loss, choices in zip(self._compiled, state["compiled"], strict=True):
            loss.choices = choices
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.done, self.records, self._sum = (state[k] for k in ("epoch", "done", "records", "sum"))
        set_rng_state(state["rng"])
