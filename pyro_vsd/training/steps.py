"""One step of training, with an optimiser of torch or of Pyro."""

import math
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["PyroSteps", "TorchSteps", "make_steps"]

# Away from the CPU, looking at the loss waits for the device: only this often.
_LOOK = 50
# One rate for all: droprates that learn several times faster than the weights collapse where the KL is light.
_RATE = 1e-3


class TorchSteps:
    """Gradients of the ELBO's module form, steps of a torch optimiser."""

    def __init__(self, model: Any, guide: Any, elbo: Any, optimizer: optim.Optimizer, scheduler: Any, interval: str):
        self.loss, self.elbo, self.optimizer, self.interval = elbo(model, guide), elbo, optimizer, interval
        _check_parameters(self.loss, guide, optimizer)
        if scheduler is not None and not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("scheduler: expected one of this optimizer, got one of another.")
        self.scheduler = scheduler
        self.count = 0

    def step(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """One step; ``elbo.terms``, or the loss alone for other ELBOs."""
        last: dict[str, Any] = {}

        def closure() -> Any:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(*args, **kwargs)
            last["loss"] = loss.detach()
            self.count += 1
            if loss.device.type == "cpu" or self.count % _LOOK == 0:
                self.check(last["loss"])  # before the parameters are touched
            loss.backward()
            return loss

        self.optimizer.step(closure)
        if self.scheduler is not None and self.interval == "batch":
            self.scheduler.step()
        return getattr(self.elbo, "terms", None) or last

    def check(self, loss: Any) -> None:
        if hasattr(self.elbo, "check_finite"):
            self.elbo.check_finite()
        if not math.isfinite(float(loss)):
            raise ValueError(f"expected a finite loss, got {float(loss)}. Lower the learning rate or look at the data.")

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

    def step(self, args: Any, kwargs: Any) -> dict[str, Any]:
        loss = self.svi.step(*args, **kwargs)
        self.check(loss)
        return getattr(self.elbo, "terms", None) or {"loss": loss}

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
    model: Any, guide: Any, elbo: Any, optimizer: Any, scheduler: Any, interval: str
) -> TorchSteps | PyroSteps:
    """:param optimizer: an optimiser, or a function of parameter groups that makes one; ``None`` for Adam."""
    if interval not in ("epoch", "batch"):
        raise ValueError(f"scheduler_interval: expected 'epoch' or 'batch', got {interval!r}.")
    if optimizer is None:
        optimizer = torch.optim.Adam(_groups(model, guide, elbo)) if isinstance(model, nn.Module) else _pyro_adam()
    elif callable(optimizer) and not isinstance(optimizer, (optim.Optimizer, PyroOptim)):
        # without learning rates: those of a group would be stronger than the function's own
        groups = [{k: v for k, v in group.items() if k != "lr"} for group in _groups(model, guide, elbo)]
        optimizer = optimizer(groups)
    if isinstance(optimizer, optim.Optimizer):
        return TorchSteps(model, guide, elbo, optimizer, scheduler, interval)
    if not isinstance(optimizer, PyroOptim):
        raise TypeError(
            "optimizer: expected one of torch.optim or pyro.optim, or a function of parameter groups that makes one, "
            f"got a {type(optimizer).__name__}."
        )
    if scheduler is not None:
        raise ValueError(
            "scheduler: expected none beside an optimiser of Pyro, got one. Pyro's schedulers are optimisers: "
            "optimizer=pyro.optim.ExponentialLR({'optimizer': torch.optim.Adam, …})."
        )
    return PyroSteps(model, guide, elbo, optimizer)


def _groups(model: Any, guide: Any, elbo: Any) -> list[dict[str, Any]]:
    if hasattr(guide, "parameter_groups"):
        groups: list[dict[str, Any]] = guide.parameter_groups(lr=_RATE)
        return groups
    return [{"params": list(elbo(model, guide).parameters()), "lr": _RATE}]


def _pyro_adam() -> PyroOptim:
    """A function keeps parameters in Pyro's store, where a torch optimiser would not find them."""
    return PyroOptim(torch.optim.Adam, {"lr": _RATE})


def _check_parameters(loss: nn.Module, guide: Any, optimizer: optim.Optimizer) -> None:
    own = {id(p) for p in (guide if isinstance(guide, nn.Module) else loss).parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & held:
        raise ValueError(
            "optimizer: expected one over the guide's parameters, got one that holds none of them. Use "
            "guide.parameter_groups(), after guide.setup(x, y) for hand-written models, or pass a function that makes "
            "the optimiser: optimizer=torch.optim.Adam."
        )
