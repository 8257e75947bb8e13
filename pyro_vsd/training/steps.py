"""One step of training, with an optimiser of torch or of Pyro."""

import contextlib
import math
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pyro_vsd.infer import VSD_ELBO
from pyro_vsd.training.group import Group

__all__ = ["PyroSteps", "TorchSteps", "make_optimizer", "make_steps"]

# Away from the CPU, looking at the loss waits for the device: only this often.
_LOOK = 50
# One rate for all: droprates that learn several times faster than the weights collapse where the KL is light.
_RATE = 1e-3


class TorchSteps:
    """Gradients of the ELBO's module form, steps of a torch optimiser."""

    def __init__(
        self, model: Any, guide: Any, elbo: Any, optimizer: optim.Optimizer, scheduler: Any, interval: str, group: Group
    ):
        self.loss, self.elbo, self.optimizer, self.interval = elbo(model, guide), elbo, optimizer, interval
        self.group = group
        _check_parameters(self.loss, guide, optimizer)
        if scheduler is not None and not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("scheduler: expected one of this optimizer, got one of another.")
        self.scheduler = scheduler
        self.loss = group.wrap(self.loss)
        self.count = 0

    def step(self, batches: list[Any]) -> list[dict[str, Any]]:
        """One step on the mean of the losses of some batches; for each ``elbo.terms``, or the loss alone for other
        ELBOs.

        The mean of k losses, each the likelihood of B rows times N / B and the KL, is the loss of the k B rows
        together: the KL counts once.

        :param batches: arguments and keyword arguments of each.
        """
        found: list[dict[str, Any]] = []

        def closure() -> Any:
            self.optimizer.zero_grad(set_to_none=True)
            torch.clear_autocast_cache()
            found.clear()
            total: Any = 0.0
            for number, (args, kwargs) in enumerate(batches, 1):
                if number > 1 and isinstance(self.elbo, VSD_ELBO):
                    self.elbo.step -= 1  # a schedule counts the optimiser's steps
                with self._silent(number < len(batches)):
                    loss = self.loss(*args, **kwargs)
                    found.append(getattr(self.elbo, "terms", None) or {"loss": loss.detach()})
                    agreed = self.group.mean(loss.detach())
                    self.count += 1
                    if loss.device.type == "cpu" or self.count % _LOOK == 0:
                        self.check(agreed)  # before the parameters are touched
                    (loss if len(batches) == 1 else loss / len(batches)).backward()
                total = total + agreed / len(batches)
            return total

        self.optimizer.step(closure)
        # Around all of fit, autocast would go on with its copies of the parameters as they were.
        torch.clear_autocast_cache()
        if self.scheduler is not None and self.interval == "batch":
            self.scheduler.step()
        return found

    def _silent(self, silent: bool) -> Any:
        """Gradients of all but the last of some batches stay in the process."""
        loss: Any = self.loss
        return loss.no_sync() if silent and self.group.size > 1 else contextlib.nullcontext()

    def check(self, loss: Any) -> None:
        if hasattr(self.elbo, "check_finite"):
            self.elbo.check_finite()
        if not math.isfinite(float(loss)):
            where = "" if self.group.size == 1 else " in another process"
            raise ValueError(
                f"expected a finite loss, got {float(loss)}{where}. Lower the learning rate or look at the data."
            )

    def end_epoch(self, value: float) -> None:
        """:param value: the measure that plateaus are seen in, lower is better."""
        if self.scheduler is None or self.interval != "epoch":
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(-value if self.scheduler.mode == "max" else value)
        else:
            self.scheduler.step()

    def rates(self) -> dict[str, Any]:
        return {"lr": float(self.optimizer.param_groups[0]["lr"])}


class PyroSteps:
    """``SVI`` with a Pyro optimiser; its schedulers are optimisers too."""

    def __init__(self, model: Any, guide: Any, elbo: Any, optimizer: PyroOptim):
        self.elbo, self.optimizer, self.scheduler = elbo, optimizer, None
        self.svi = SVI(model, guide, optimizer, elbo)

    def step(self, batches: list[Any]) -> list[dict[str, Any]]:
        ((args, kwargs),) = batches
        loss = self.svi.step(*args, **kwargs)
        torch.clear_autocast_cache()
        self.check(loss)
        return [getattr(self.elbo, "terms", None) or {"loss": loss}]

    def check(self, loss: Any) -> None:
        if not math.isfinite(float(loss)):  # VSD_ELBO has raised before, and named the site
            raise ValueError(f"expected a finite loss, got {float(loss)}. Lower the learning rate or look at the data.")

    def end_epoch(self, value: float) -> None:
        if isinstance(self.optimizer, PyroLRScheduler):
            plateau = self.optimizer.pt_scheduler_constructor is ReduceLROnPlateau
            self.optimizer.step(*([value] if plateau else []))

    def rates(self) -> dict[str, Any]:
        return {}


def make_steps(
    model: Any,
    guide: Any,
    elbo: Any,
    optimizer: Any,
    scheduler: Any,
    interval: str,
    group: Group | None = None,
    accumulate: int = 1,
) -> TorchSteps | PyroSteps:
    """:param accumulate: the most batches that a step will be given."""
    if not isinstance(interval, str) or interval not in ("epoch", "batch"):
        raise ValueError(f"scheduler_interval: expected 'epoch' or 'batch', got {interval!r}.")
    group = group or Group()
    optimizer = make_optimizer(model, guide, elbo, optimizer)
    if isinstance(optimizer, optim.Optimizer):
        return TorchSteps(model, guide, elbo, optimizer, scheduler, interval, group)
    if scheduler is not None:
        raise ValueError(
            "scheduler: expected none beside an optimiser of Pyro, got one. Pyro's schedulers are optimisers: "
            "optimizer=pyro.optim.ExponentialLR({'optimizer': torch.optim.Adam, …})."
        )
    if accumulate > 1 or group.size > 1:
        wish = f"accumulate={accumulate}" if accumulate > 1 else f"{group.size} processes"
        raise ValueError(
            f"optimizer: expected one of torch.optim with {wish}, got one of Pyro, which steps by each batch's own "
            "gradients. Pass optimizer=torch.optim.Adam; parameters have to be those of modules."
        )
    return PyroSteps(model, guide, elbo, optimizer)


def make_optimizer(model: Any, guide: Any, elbo: Any, optimizer: Any) -> optim.Optimizer | PyroOptim:
    """:param optimizer: an optimiser, or a function of parameter groups that makes one; ``None`` for Adam."""
    if optimizer is None:
        if not isinstance(model, nn.Module):  # parameters are in Pyro's store, where a torch optimiser finds none
            return PyroOptim(torch.optim.Adam, {"lr": _RATE})
        return torch.optim.Adam(_groups(model, guide, elbo))
    if callable(optimizer) and not isinstance(optimizer, (optim.Optimizer, PyroOptim)):
        # without learning rates: those of a group would be stronger than the function's own
        groups = [{k: v for k, v in group.items() if k != "lr"} for group in _groups(model, guide, elbo)]
        optimizer = optimizer(groups)
    if not isinstance(optimizer, (optim.Optimizer, PyroOptim)):
        raise TypeError(
            "optimizer: expected one of torch.optim or pyro.optim, or a function of parameter groups that makes one, "
            f"got a {type(optimizer).__name__}."
        )
    return optimizer


def _groups(model: Any, guide: Any, elbo: Any) -> list[dict[str, Any]]:
    if hasattr(guide, "parameter_groups"):
        groups: list[dict[str, Any]] = guide.parameter_groups(lr=_RATE)
        return groups
    return [{"params": list(elbo(model, guide).parameters()), "lr": _RATE}]


def _check_parameters(loss: nn.Module, guide: Any, optimizer: optim.Optimizer) -> None:
    own = {id(p) for p in (guide if isinstance(guide, nn.Module) else loss).parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & held:
        raise ValueError(
            "optimizer: expected one over the guide's parameters, got one that holds none of them. Use "
            "guide.parameter_groups(), after guide.setup(x, y) for hand-written models, or pass a function that makes "
            "the optimiser: optimizer=torch.optim.Adam."
        )
