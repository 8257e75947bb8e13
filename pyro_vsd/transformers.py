"""Training by the Trainer of Hugging Face's ``transformers``.

Only this file imports ``transformers`` (``pip install 'pyro_vsd[transformers]'``), when ``vsd.transformers`` is first
used. Models of ``transformers`` themselves need nothing of it: :func:`pyro_vsd.nn.bayesianize` takes them.
"""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("vsd.transformers needs transformers: pip install 'pyro_vsd[transformers]'") from error

from pyro_vsd._utils import check_integer, num_rows
from pyro_vsd.infer import VSD_ELBO, predict
from pyro_vsd.metrics import log_likelihood, nll
from pyro_vsd.nn import ObservationModel
from pyro_vsd.prediction import ClassificationPrediction
from pyro_vsd.training.compiling import steps_not_counted
from pyro_vsd.training.data import arguments, inputs_and_target
from pyro_vsd.training.fitting import make_elbo

__all__ = ["VSDTrainer"]

# Settings that the Trainer applies to a model of its own.
_UNUSED = ("activation_checkpointing", "gradient_checkpointing", "label_smoothing_factor", "neftune_noise_alpha")


class VSDTrainer(Trainer):
    r"""The ``Trainer`` of ``transformers`` for a model and its guide. The loss is that of a row,

    .. math:: -\frac1B \sum_{n=1}^B \log p(y_n \mid x_n, W) + \frac{\lambda}{N} \mathrm{KL},

    so that learning rates and ``max_grad_norm`` mean what they mean elsewhere. With ``gradient_accumulation_steps`` a
    batch counts by its rows: the gradient is that of all rows at once, and the KL counts once. A schedule of the KL
    weight counts the optimiser's steps. The optimiser's weight decay leaves the noise (``log_alpha``, ``vectors``)
    alone.

    ``evaluate`` and ``predict`` average over posterior samples. Losses are those of the predictive distribution;
    ``predictions`` are log-probabilities, or means of numbers. Checkpoints hold what was trained, without the frozen
    base.

    :param model: a model of ``vsd.nn``, trained in place. (``trainer.model`` is the loss, which has both the model and
        the guide.)
    :param guide: its guide.
    :param args: ``transformers.TrainingArguments``.
    :param elbo: the objective; by default ``VSD_ELBO(kl_weight=kl_weight)``.
    :param kl_weight: λ of the default objective, a number or a schedule.
    :param num_samples: posterior samples of evaluations and predictions.
    :param options: further options of ``Trainer``: ``train_dataset``, ``data_collator``, ``compute_metrics``, …

    .. code-block:: python

        model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(peft_model), num_data=len(train))
        guide = vsd.VSDGuide(model)
        trainer = vsd.transformers.VSDTrainer(model, guide, args, train_dataset=train, eval_dataset=test)
        trainer.train()
        prediction = vsd.predict(model, guide, inputs)
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        args: Any = None,
        *,
        elbo: Any = None,
        kl_weight: Any = None,
        num_samples: int = 20,
        **options: Any,
    ):
        if not isinstance(model, ObservationModel):
            raise TypeError(f"model must be one of vsd.nn, such as Classifier, not a {type(model).__name__}.")
        if not isinstance(guide, nn.Module):
            raise TypeError(f"guide must be the model's guide, as vsd.VSDGuide(model), not {type(guide).__name__}.")
        for name in _UNUSED:
            if getattr(args, name, None):
                raise ValueError(f"args: {name} does not work with a model of vsd.nn. Leave it out.")
        if not any(True for _ in guide.parameters()):
            raise ValueError("guide has no parameters yet. Call guide.setup(x, y) with the model's arguments first.")
        check_integer("num_samples", num_samples, 1)
        self.elbo, self.num_samples = make_elbo(elbo, kl_weight), num_samples
        super().__init__(self.elbo(model, guide), args, **options)
        if self.args.label_names is None:
            self.label_names = ["labels"]
        data: Any = self.train_dataset
        rows = len(data) if hasattr(data, "__len__") else model.num_data
        if rows != model.num_data:
            warnings.warn(
                f"the model has num_data={model.num_data} and the data {rows} rows. Make the model with "
                f"num_data={rows}, unless this is intended.",
                stacklevel=2,
            )

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ours: Any = self.accelerator.unwrap_model(model).model
        args, kwargs = arguments(inputs, None, ours, self.label_names[0])
        if isinstance(self.elbo, VSD_ELBO):
            self.elbo.step = self.state.global_step
        with steps_not_counted(self.elbo):
            loss: Tensor = model(*args, **kwargs) / ours.num_data
        share = 1.0 if num_items_in_batch is None else num_rows((args, kwargs), "batch") / num_items_in_batch
        return (loss * share, {}) if return_outputs else loss * share

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of a step of the optimiser, and their rows."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(num_rows(dict(batch), "batch") for batch in batches) or None

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        loss_module: Any = self.accelerator.unwrap_model(model)
        x, y = inputs_and_target(inputs, self.args.device, self.label_names[0])
        # Always the same noise: the differences between epochs are those of the parameters.
        found = predict(loss_module.model, loss_module.guide, *x, num_samples=self.num_samples, seed=0, progress=False)
        classes = isinstance(found, ClassificationPrediction)
        value = None
        if y is not None:
            value = torch.tensor(nll(found, y) if classes else -log_likelihood(found, y), device=self.args.device)
        if prediction_loss_only:
            return value, None, None
        return value, found.probs.log() if isinstance(found, ClassificationPrediction) else found.mean, y

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        noise = ("guide.log_alpha.", "guide.vectors.")
        return [name for name in super().get_decay_parameter_names(model) if not name.startswith(noise)]

    def _set_signature_columns_if_needed(self) -> None:
        """The inputs that the network takes are those of its own ``forward``."""
        network: Any = self.accelerator.unwrap_model(self.model).model.net.network
        network = network.get_base_model() if hasattr(network, "get_base_model") else network
        names = inspect.signature(network.forward).parameters
        self._signature_columns: Any = [*names, *self.label_names, "label", "label_ids"]

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        """What is trained, and running statistics; not the frozen base, nor what is no tensor."""
        state = self.accelerator.unwrap_model(self.model).state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: state[name].clone() for name in self._kept(state)})

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = self._kept(self.accelerator.unwrap_model(self.model).state_dict()) & set(load_result.missing_keys)
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"checkpoint: it belongs to a different model. It lacks {sorted(missing)} and has "
                f"{load_result.unexpected_keys}, which the model lacks."
            )

    def _kept(self, state: dict[str, Any]) -> set[str]:
        parameters = self.accelerator.unwrap_model(self.model).named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        return {name for name, value in state.items() if isinstance(value, Tensor)} - frozen
