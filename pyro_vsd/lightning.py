"""Training by Lightning: a model and its guide as a ``LightningModule``.

Only this file imports Lightning (``pip install 'pyro_vsd[lightning]'``), when ``vsd.lightning`` is first used.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

try:
    from lightning import LightningModule
except ImportError as error:
    raise ImportError("vsd.lightning needs Lightning: pip install 'pyro_vsd[lightning]'") from error

from pyro_vsd._utils import check_integer, mix_seed, num_rows
from pyro_vsd.infer import VSD_ELBO, predict
from pyro_vsd.metrics import Stream
from pyro_vsd.prediction import Prediction
from pyro_vsd.training.checkpoint import get_rng_state, set_rng_state, to_plain
from pyro_vsd.training.compiling import CompiledLoss, steps_not_counted
from pyro_vsd.training.data import ShortBatchWatch, arguments, inputs_and_target
from pyro_vsd.training.distributed import Group, seed_everything
from pyro_vsd.training.fitting import LOOK_EVERY, check_rate, keep_frozen, make_elbo, make_optimizer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["VSDModule"]


class VSDModule(LightningModule):
    """A model and its guide for Lightning's ``Trainer``.

    Batches are ``(x, y)``, ``(x1, x2, y)`` or dicts, as for :func:`vsd.fit <pyro_vsd.training.fit>`; frozen batch norms
    and short batches are treated as there. It logs ``train_loss``, ``train_log_likelihood`` and
    ``train_kl`` of each step, for the full data, and all metrics of ``vsd.metrics`` over the rows of all processes, as
    ``val_nll``, ``test_rmse``, …. Each process draws its own noise, whatever the seed.

    A checkpoint of Lightning also holds the step of the KL schedule and the random generators of all processes. A run
    of as many processes, resumed with ``Trainer.fit(…, ckpt_path=…)`` from the end of an epoch, continues bit for bit
    on the CPU.

    :param model: a Pyro model that is a module.
    :param guide: its guide, with parameters: hand-written models call ``guide.setup(x, y)`` first.
    :param elbo: the objective, with its KL weight or schedule; by default ``VSD_ELBO(kl_weight=kl_weight)``. A schedule
        counts the optimiser's steps, also with ``accumulate_grad_batches``.
    :param lr: the learning rate of all parameters; of ``optimizer``, if that is a function.
    :param kl_weight: λ of the default objective.
    :param optimizer: one of ``torch.optim``, or a function of parameter groups (``name`` and ``params``) that makes
        one, such as ``torch.optim.AdamW``. By default Adam.
    :param scheduler: a function of the optimiser that makes a learning-rate scheduler, or a dict for Lightning:
        ``lambda o: {"scheduler": ReduceLROnPlateau(o), "monitor": "val_nll"}``.
    :param num_samples: posterior samples of validation, test and prediction.
    :param num_inputs: how many of a batch's tensors are the inputs of predictions; by default all but the last one,
        the target.
    :param target: the key of the targets in dicts; by default ``"labels"`` or ``"y"``.
    :param compile: whether loss and gradients are compiled, as by :func:`pyro_vsd.compile_step`. Lightning scales,
        accumulates, clips and steps as usual. Several processes and mixed precision run eagerly, with a warning.
    :param predict_options: further options of ``vsd.predict``.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> module = vsd.lightning.VSDModule(model, vsd.VSDGuide(model), num_samples=10)
    >>> module(torch.randn(5, 4)).probs.shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        elbo: Any = None,
        *,
        lr: float | None = None,
        kl_weight: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        num_samples: int = 20,
        num_inputs: int | None = None,
        target: str | None = None,
        compile: bool = False,
        **predict_options: Any,
    ):
        super().__init__()
        for name, value in (("model", model), ("guide", guide)):
            if not isinstance(value, nn.Module):
                raise TypeError(f"{name} must be a module, whose parameters Lightning can save, not {value!r}.")
        if not any(True for _ in guide.named_parameters()):
            raise ValueError("guide has no parameters yet. Call guide.setup(x, y) with the model's arguments first.")
        check_integer("num_samples", num_samples, 1)
        if num_inputs is not None:
            check_integer("num_inputs", num_inputs, 1)
        self.elbo = make_elbo(elbo, kl_weight)
        self.loss = self.elbo(model, guide)
        self.lr = check_rate(lr, optimizer)
        self.optimizer, self.scheduler, self.num_inputs, self.target = optimizer, scheduler, num_inputs, target
        self._watch = ShortBatchWatch()
        self.options = {"progress": False, "num_samples": num_samples, **predict_options}
        self._with_compiler = compile
        self._compiled_loss: CompiledLoss | None = None
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
        return predict(self.model, self.guide, *inputs, **{**self.options, **options})

    # ---- training

    def on_train_epoch_start(self) -> None:
        keep_frozen(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = arguments(batch, None, self.model, self.target)
        self._watch.look((args, kwargs))
        with steps_not_counted(self.elbo):
            compiled = self._compiled_loss
            loss: Tensor = self.loss(*args, **kwargs) if compiled is None else compiled.differentiable(args, kwargs)
        if isinstance(self.elbo, VSD_ELBO) and (loss.device.type == "cpu" or batch_idx % LOOK_EVERY == 0):
            self.elbo.check_finite()
        values, terms = {"train_loss": loss.detach()}, getattr(self.elbo, "terms", None)
        if terms:
            values |= {"train_log_likelihood": terms["log_likelihood"], "train_kl": sum(terms["kl"].values())}
        self.log_dict(values, batch_size=num_rows((args, kwargs), "batch"))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if isinstance(self.elbo, VSD_ELBO):
            self.elbo.step += 1

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.guide, self.elbo, self.optimizer, self.lr)
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError("optimizer must be one of torch.optim, not of Pyro.")
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_fit_start(self) -> None:
        if self._with_compiler and self.trainer.world_size > 1:
            warnings.warn("compile: several processes run eagerly.", stacklevel=2)
        elif self._with_compiler:
            self._compiled_loss = CompiledLoss(self.loss)
        if not self._set_generators() and self.trainer.world_size > 1:  # a common seed, yet different noise in each
            seed_everything(int(torch.randint(2**62, ()).item()))

    def on_fit_end(self) -> None:
        self._compiled_loss = None  # which cannot be copied or saved

    def on_train_start(self) -> None:
        self._set_generators()  # some strategies load a checkpoint only now

    def _set_generators(self) -> bool:
        """Sets the states from a checkpoint of as many processes; whether there were any."""
        states, self._generators = self._generators, []
        if len(states) != self.trainer.world_size:
            return False
        set_rng_state(states[self.global_rank])
        return True

    # ---- metrics

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, y = inputs_and_target(batch, None, self.target)
        if y is None or len(inputs) < (self.num_inputs or 1):
            raise ValueError(
                f"batch must be a tuple of {self.num_inputs or ''} inputs and a target, or a dict of them."
            )
        # Always the same noise: the differences between epochs are those of the parameters.
        seed = mix_seed(batch_idx, self.global_rank)
        found = predict(self.model, self.guide, *inputs[: self.num_inputs], **{"seed": seed, **self.options})
        self._streams.setdefault(dataloader_idx, Stream()).update(found, y)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, prefix: str = "val") -> None:
        streams, self._streams = self._streams, {}
        parts = Group().gather(streams)
        numbers = sorted({number for part in parts for number in part})
        for number in numbers:
            report = Stream.merged(part[number] for part in parts if number in part).compute()
            suffix = f"/dataloader_idx_{number}" if len(numbers) > 1 else ""
            values = {f"{prefix}_{name}{suffix}": value for name, value in report.to_dict().items()}
            self.log_dict(values, sync_dist=True, add_dataloader_idx=False)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end("test")

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Prediction:
        """The prediction for a batch: its inputs alone, or with a target, which is left out."""
        return self(*inputs_and_target(batch, None, self.target)[0][: self.num_inputs])

    # ---- checkpoints

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "Self":
        """A module for predictions. The file holds only parameters: pass the model and its guide, made as for training,
        and all options that differ from the defaults.

        .. code-block:: python

            model = make_model()
            module = VSDModule.load_from_checkpoint("last.ckpt", model=model, guide=vsd.VSDGuide(model), elbo=elbo)

        :param args: Lightning's own options, also by name: ``map_location``, ``strict``, …
        """
        missing = [name for name in ("model", "guide") if name not in kwargs]
        if missing and cls.__init__ is VSDModule.__init__:  # a subclass may make them by itself
            raise TypeError(f"{' and '.join(missing)} must be passed by name, since a checkpoint does not hold them.")
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        elbo = self.elbo.state_dict() if hasattr(self.elbo, "state_dict") else None
        checkpoint["pyro_vsd"] = to_plain({"elbo": elbo, "rng": Group().gather(get_rng_state())}, "pyro_vsd")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("pyro_vsd")
        if state is None:
            raise ValueError("checkpoint was not written by a VSDModule.")
        if state["elbo"] is not None and hasattr(self.elbo, "load_state_dict"):
            self.elbo.load_state_dict(state["elbo"])
        self._generators = state["rng"]
