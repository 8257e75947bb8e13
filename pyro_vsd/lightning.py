"""Training by Lightning: a model and its guide as a ``LightningModule``.

This file alone imports Lightning (``pip install 'pyro_vsd[lightning]'``); ``vsd.lightning`` does so when asked for.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist

try:
    from lightning import LightningModule
except ImportError as error:
    raise ImportError("expected Lightning, got none. Install it: pip install 'pyro_vsd[lightning]'") from error

from pyro_vsd.infer import VSD_ELBO, predict
from pyro_vsd.metrics import Stream
from pyro_vsd.prediction import Prediction
from pyro_vsd.training.batches import arguments, epoch_seed
from pyro_vsd.training.distributed import seed_everything
from pyro_vsd.training.generators import get_rng_state, set_rng_state
from pyro_vsd.training.plain import to_plain
from pyro_vsd.training.steps import make_optimizer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["VSDModule"]

# Away from the CPU, looking at the loss waits for the device: only this often.
_LOOK = 50


class VSDModule(LightningModule):
    """A model and its guide for Lightning's ``Trainer``.

    Batches are ``(x, y)`` or dicts of the model's arguments. Logged are ``train_loss``, ``train_log_likelihood`` and
    ``train_kl`` of each step, for the full data, and all measures of ``vsd.metrics`` on validation and test data, by
    name: ``val_nll``, ``val_accuracy``, ``test_rmse``, …, over the rows of all processes.

    A checkpoint of Lightning's also holds the step of the KL's schedule and the random generators of all processes: a
    run of as many processes resumed with ``Trainer.fit(…, ckpt_path=…)`` from the end of an epoch goes on bit for bit
    on the CPU. In several processes each draws its own noise, whatever the seed. To predict from one, give the model
    and its guide to :meth:`load_from_checkpoint`.

    :param model: a Pyro model that is a module.
    :param guide: its guide, with parameters: hand-written models call ``guide.setup(x, y)`` first.
    :param elbo: the objective, where a KL weight or its schedule is set: ``VSD_ELBO(kl_weight=…)``. Its schedule counts
        the optimiser's steps, also with ``accumulate_grad_batches``.
    :param optimizer: one of ``torch.optim``, or a function of parameter groups (``name`` and ``params``) that makes
        one, such as ``torch.optim.AdamW``. By default Adam.
    :param scheduler: a function of the optimiser that makes a learning-rate scheduler, or what else Lightning takes for
        one: ``lambda o: {"scheduler": ReduceLROnPlateau(o), "monitor": "val_nll"}``
        (in regression ``val_log_likelihood``).
    :param num_samples: posterior samples of validation, test and prediction.
    :param num_inputs: how many of a batch's tensors are the model's inputs; for validation the last one is the target.
    :param predict_options: further options of ``vsd.predict``.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> module = VSDModule(model, vsd.VSDGuide(model), num_samples=10)
    >>> module(torch.randn(5, 4)).probs.shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        elbo: Any = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        num_samples: int = 20,
        num_inputs: int = 1,
        **predict_options: Any,
    ):
        super().__init__()
        for name, value in (("model", model), ("guide", guide)):
            if not isinstance(value, nn.Module):
                raise TypeError(f"{name}: expected a module, whose parameters Lightning can save, got {value!r}.")
        if not any(True for _ in guide.parameters()):
            raise ValueError(
                "guide: expected one with parameters, got one that has not seen its model's sites. Call "
                "guide.setup(x, y) with the model's arguments first."
            )
        for name, number in (("num_samples", num_samples), ("num_inputs", num_inputs)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {number!r}.")
        self.elbo = VSD_ELBO() if elbo is None else elbo
        self.loss = self.elbo(model, guide)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.num_samples, self.num_inputs = num_samples, num_inputs
        self.predict_options = {"progress": False, **predict_options}
        self._streams: dict[int, Stream] = {}
        self._generators: list[Any] = []

    @property
    def model(self) -> Any:
        return self.loss.model

    @property
    def guide(self) -> Any:
        return self.loss.guide

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self.guide, "_model"):  # an autoguide leaves its model behind when it is pickled
            self.guide._model = (self.model,)

    def forward(self, *inputs: Any, **options: Any) -> Prediction:
        """``vsd.predict`` with the options of this module."""
        return predict(self.model, self.guide, *inputs, **{**self._options(), **options})

    def _options(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, **self.predict_options}

    # ---- training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = arguments(batch, None)
        loss: Tensor = self.loss(*args, **kwargs)
        if isinstance(self.elbo, VSD_ELBO):
            self.elbo.step -= 1  # counted in optimizer_step, once for all batches behind a step
            if loss.device.type == "cpu" or batch_idx % _LOOK == 0:
                self.elbo.check_finite()
        terms = getattr(self.elbo, "terms", None) or {}
        values = {"train_loss": loss.detach()}
        if "kl" in terms:
            values |= {"train_log_likelihood": terms["log_likelihood"], "train_kl": sum(terms["kl"].values())}
        self.log_dict(values, batch_size=_num_rows(args, kwargs))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if isinstance(self.elbo, VSD_ELBO):
            self.elbo.step += 1

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.guide, self.elbo, self.optimizer)
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"optimizer: expected one of torch.optim, got {type(optimizer).__name__}, one of Pyro.")
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_fit_start(self) -> None:
        if not self._set_generators() and self.trainer.world_size > 1:  # a common seed still gives other noise in each
            seed_everything(int(torch.randint(2**62, ()).item()))

    def on_train_start(self) -> None:
        self._set_generators()  # of strategies that load a checkpoint only now

    def _set_generators(self) -> bool:
        """Whether there were states from a checkpoint of as many processes, which are the generators' now."""
        states, self._generators = self._generators, []
        if len(states) != self.trainer.world_size:
            return False
        set_rng_state(states[self.global_rank])
        return True

    # ---- measures

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        args, kwargs = arguments(batch, None)
        if kwargs or len(args) <= self.num_inputs:
            raise ValueError(
                f"batch: expected {self.num_inputs} inputs and a target to measure predictions by, got "
                f"{f'a dict of {sorted(kwargs)}' if kwargs else f'{len(args)} tensors'}."
            )
        # Always the same noise: the differences between epochs are those of the parameters.
        seed = epoch_seed(batch_idx, self.global_rank)
        found = predict(self.model, self.guide, *args[: self.num_inputs], **{"seed": seed, **self._options()})
        self._streams.setdefault(dataloader_idx, Stream()).update(found, args[-1])

    def on_validation_epoch_end(self) -> None:
        self._log_measures("val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self._log_measures("test")

    def _log_measures(self, prefix: str) -> None:
        streams, self._streams = self._streams, {}
        parts = _gather(streams)
        numbers = sorted({number for part in parts for number in part})
        for number in numbers:
            report = Stream.merged(part[number] for part in parts if number in part).compute()
            suffix = f"/dataloader_idx_{number}" if len(numbers) > 1 else ""
            values = {f"{prefix}_{name}{suffix}": value for name, value in report.to_dict().items()}
            self.log_dict(values, sync_dist=True, add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Prediction:
        """The prediction of a batch: an input alone, or inputs with what else is in the batch behind them."""
        inputs = (batch,) if isinstance(batch, Tensor) else arguments(batch, None)[0][: self.num_inputs]
        return self(*inputs)

    # ---- checkpoints

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "Self":
        """A module with the parameters of a checkpoint, which holds neither the model nor its guide: give both, made as
        for training, and what else differs from the defaults.

        .. code-block:: python

            model = make_model()
            module = VSDModule.load_from_checkpoint("last.ckpt", model=model, guide=vsd.VSDGuide(model), elbo=elbo)

        The objects given take the parameters over. Only training that goes on needs the ``elbo``, for which
        ``Trainer.fit(module, …, ckpt_path="last.ckpt")`` is the way that also brings the optimiser and the generators.

        :param checkpoint_path: a file of Lightning's.
        :param args: Lightning's own options, also by name: ``map_location``, ``strict``, …
        :param kwargs: arguments of :class:`VSDModule`.
        """
        missing = [name for name in ("model", "guide") if name not in kwargs]
        if missing and cls.__init__ is VSDModule.__init__:  # a subclass may make them by itself
            raise TypeError(
                f"expected model and guide as arguments, which a checkpoint does not hold, got none for "
                f"{' and '.join(missing)}. Make them as for training: "
                f"{cls.__name__}.load_from_checkpoint(path, model=model, guide=guide)."
            )
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        elbo = self.elbo.state_dict() if hasattr(self.elbo, "state_dict") else None
        checkpoint["pyro_vsd"] = to_plain({"elbo": elbo, "rng": _gather(get_rng_state())}, "pyro_vsd")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("pyro_vsd")
        if state is None:
            raise ValueError("checkpoint: expected one of a VSDModule, got one of another module.")
        if state["elbo"] is not None and hasattr(self.elbo, "load_state_dict"):
            self.elbo.load_state_dict(state["elbo"])
        self._generators = state["rng"]


def _gather(value: Any) -> list[Any]:
    """The values of all processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _num_rows(args: Any, kwargs: Any) -> int:
    return next((len(v) for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()), 1)
