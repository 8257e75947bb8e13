"""Targets given a network's outputs, and inputs row by row."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor, nn

from pyro_vsd.prediction.base import check_labels, check_target

__all__ = ["Observation", "call", "check_classes", "num_rows", "rows_of"]

# Where log σ starts: noise of about a third of standardised targets.
LOG_SIGMA = -1.0


class Observation(nn.Module):
    """The law of the targets given a network's outputs.

    :param task: ``"classification"`` or ``"regression"``.
    :param noise: in regression σ, ``"learned"`` (a parameter ``log_sigma``) or a number.
    :param like: a module whose first parameter gives dtype and device.

    >>> import torch
    >>> observation = Observation("classification", "learned", nn.Linear(1, 1))
    >>> observation.log_prob(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """

    def __init__(self, task: str, noise: float | str, like: nn.Module):
        super().__init__()
        self.task, self.noise = task, noise
        if task == "regression" and noise == "learned":
            self.log_sigma = nn.Parameter(next(like.parameters()).new_tensor(LOG_SIGMA))

    @property
    def sigma(self) -> Any:
        """The standard deviation of the targets' noise."""
        return self.log_sigma.exp() if self.noise == "learned" else self.noise

    def law(self, output: Tensor) -> Any:
        """The law of the targets, of batch shape ``(B,)``; leading dimensions of samples may come before."""
        if self.task == "classification":
            return dist.Categorical(logits=output, validate_args=False)
        if output.dim() == 1 or output.shape[-1] == 1:
            output = output if output.dim() == 1 else output.squeeze(-1)
            return dist.Normal(output, self.sigma, validate_args=False)
        return dist.Normal(output, self.sigma, validate_args=False).to_event(1)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood of each row, ``(B,)``; with outputs ``(S, B, C)`` of S samples ``(S, B)``."""
        law = self.law(output)
        if self.task == "classification":
            check_classes(y)
            y = check_labels(y, output.shape[-2], output.shape[-1])
        else:
            check_target(y, (law.batch_shape[-1], *law.event_shape))
        log_prob: Tensor = law.log_prob(y)
        return log_prob


def check_classes(y: Tensor) -> None:
    """Refuse real numbers as classes: as a rule, the task was not given."""
    if y.is_floating_point() or y.is_complex():
        raise ValueError(
            f"expected integer labels y for task='classification', got {y.dtype}. For numbers to predict make the "
            "method with task='regression'; for classes use y.long()."
        )


def call(net: nn.Module, x: Any) -> Tensor:
    """The network's output for inputs that may be a tuple."""
    output: Tensor = net(*x) if isinstance(x, tuple) else net(x)
    return output


def num_rows(x: Any) -> int:
    """Rows of the inputs."""
    rows = len(x[0] if isinstance(x, tuple) else x)
    if rows < 1:
        raise ValueError("x: expected at least one row, got none.")
    return rows


def rows_of(x: Any, index: Tensor) -> Any:
    """Chosen rows of the inputs."""
    return tuple(v[index.to(v.device)] for v in x) if isinstance(x, tuple) else x[index.to(x.device)]
