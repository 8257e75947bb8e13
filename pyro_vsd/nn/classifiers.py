"""Observation models of classes: one of several, or yes and no."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_vsd.nn.observation import ObservationModel

__all__ = ["BinaryClassifier", "Classifier"]


class Classifier(ObservationModel):
    r"""One class of C per row.

    .. math:: y_n \sim \mathrm{Categorical}(\mathrm{softmax}(f_W(x_n)))

    :param net: a Bayesian network with outputs (logits) ``(B, C)``.
    :param num_data: the number of rows of the whole training set.

    Targets are integers ``(B,)`` from 0 to C - 1.

    >>> import pyro_vsd as vsd
    >>> model = Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 16, 3])), num_data=150)
    >>> model(torch.randn(10, 4)).shape  # classes drawn from the prior's predictions
    torch.Size([10])
    """

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        if output.dim() < 2 or output.shape[-1] < 2:
            raise ValueError(
                f"net: expected outputs (B, C) with C of 2 or more classes, got {tuple(output.shape)}. For one "
                "output per row there is BinaryClassifier."
            )
        num_rows, num_classes = output.shape[-2:]
        if y is not None:
            y = _check_labels(y, num_rows, num_classes)
        return dist.Categorical(logits=output, validate_args=False), num_rows, y


def _check_labels(y: Tensor, num_rows: int, num_classes: int) -> Tensor:
    if tuple(y.shape) != (num_rows,):
        hint = " Use y.squeeze(-1)." if tuple(y.shape) == (num_rows, 1) else ""
        if tuple(y.shape) == (num_rows, num_classes):
            hint = " Turn one-hot rows into classes: y.argmax(-1)."
        raise ValueError(f"y: expected one class per row, shape ({num_rows},), got {tuple(y.shape)}.{hint}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y: expected integer classes, got {y.dtype}. Use y.long().")
    if num_rows and _checks_values():
        low, high = (int(v) for v in y.aminmax())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"y: expected classes from 0 to {num_classes - 1}, got values from {low} to {high}. The network's last "
                "layer has one output per class."
            )
    return y.long()


class BinaryClassifier(ObservationModel):
    r"""Yes or no, from one output per row.

    .. math:: y_n \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f_W(x_n)))

    :param net: a Bayesian network with outputs (logits) ``(B, 1)`` or ``(B,)``.
    :param num_data: the number of rows of the whole training set.

    Targets are ``(B,)``, 0 or 1, of any dtype.

    >>> import pyro_vsd as vsd
    >>> model = BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 16, 1])), num_data=150)
    >>> model(torch.randn(10, 4)).shape
    torch.Size([10])
    """

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        if output.dim() > 1:
            if output.shape[-1] != 1:
                raise ValueError(
                    f"net: expected one output per row, (B, 1) or (B,), got {tuple(output.shape)}. For several "
                    "classes there is Classifier."
                )
            output = output.squeeze(-1)
        num_rows = output.shape[-1]
        if y is not None:
            if tuple(y.shape) != (num_rows,):
                hint = " Use y.squeeze(-1)." if tuple(y.shape) == (num_rows, 1) else ""
                raise ValueError(f"y: expected one label per row, shape ({num_rows},), got {tuple(y.shape)}.{hint}")
            y = y.to(output.dtype)
            if _checks_values() and not bool(((y == 0) | (y == 1)).all()):
                raise ValueError(f"y: expected labels 0 and 1, got values from {y.min().item()} to {y.max().item()}.")
        return dist.Bernoulli(logits=output, validate_args=False), num_rows, y


def _checks_values() -> bool:
    """Values are looked at while Pyro validates (its default); on a GPU each look waits for the device."""
    return bool(dist.is_validation_enabled())
