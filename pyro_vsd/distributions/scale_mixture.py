"""The weight prior of a hierarchy: a zero-mean Gaussian whose variance is a scale z per noise unit."""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd._utils import check_choice, check_positive
from pyro_vsd.distributions.checks import (
    check_floating,
    check_positive_finite,
    event_axis,
    expanded_batch,
    unit_shaped,
)

__all__ = ["ScaleMixtureNormal"]


class ScaleMixtureNormal(TorchDistribution):
    r"""The prior of a weight given its scales.

    .. math:: W_{:j} \mid z \sim \mathcal N(0, \operatorname{diag}(z / \beta_{:j}))

    ``z`` has one entry per noise unit, shared by all columns; its own prior is a second site of the model.

    :param z: ``batch_shape + (K,)``, positive.
    :param noise_dim: the axis of the weight along which ``z`` and the noise run.
    :param shape: the weight's shape, rank 2 or more.
    :param precision: the precision β, a number or a tensor that broadcasts with ``shape``. Acts where the prior is
        scored as stated (``VSD_ELBO(prior="model")``, ``Trace_ELBO``).
    :param beta: which optimum replaces β in the empirical-Bayes objective: ``"paper"`` or ``"full"``; see
        :func:`~pyro_vsd.distributions.hierarchical_kl`.

    >>> vsd.distributions.ScaleMixtureNormal(torch.tensor([1.0, 4.0]), -1, (3, 2)).variance[0]
    tensor([1., 4.])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True

    def __init__(
        self,
        z: Tensor,
        noise_dim: int,
        shape: Any,
        precision: float | Tensor = 1.0,
        beta: str = "paper",
        *,
        validate_args: bool | None = None,
    ):
        check_floating("z", z)
        check_choice("beta", beta, ("paper", "full"))
        shape = torch.Size(shape)
        if len(shape) < 2:
            raise ValueError(f"shape must be that of a weight, rank 2 or more, not {tuple(shape)}.")
        self.noise_dim = event_axis(noise_dim, len(shape), shape)
        if z.shape[-1:] != (shape[self.noise_dim],):
            raise ValueError(
                f"z must have one entry for each of the {shape[self.noise_dim]} noise units; its shape is "
                f"{tuple(z.shape)}."
            )
        self.z, self.precision, self.beta = z, precision, beta
        super().__init__(z.shape[:-1], shape, validate_args=validate_args)
        if self._validate_args:
            check_positive_finite("z", z)
            if isinstance(precision, Tensor):
                check_positive_finite("precision", precision)
                expanded_batch(precision.shape, shape, "precision")
            else:
                check_positive("precision", precision)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new = self._get_checked_instance(ScaleMixtureNormal, _instance)
        new.__dict__.update(self.__dict__)
        new._batch_shape = expanded_batch(self.batch_shape, batch_shape)
        return new

    @property
    def entry_variance(self) -> Tensor:
        """The variance of each entry, broadcastable to ``batch_shape + event_shape``."""
        return unit_shaped(self.z, self.noise_dim, len(self.event_shape)) / self.precision

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.variance)

    @property
    def variance(self) -> Tensor:
        return self.entry_variance.expand(self.batch_shape + self.event_shape)

    def entropy(self) -> Tensor:
        half = 0.5 * (self.variance.log() + 1 + math.log(2 * math.pi))
        return half.flatten(-len(self.event_shape)).sum(-1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        scale = self.entry_variance.sqrt()
        return torch.randn(shape, dtype=scale.dtype, device=scale.device) * scale

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        normal = torch.distributions.Normal(0.0, self.entry_variance.sqrt(), validate_args=False)
        density = normal.log_prob(value).flatten(-len(self.event_shape)).sum(-1)
        return density.expand(torch.broadcast_shapes(density.shape, self.batch_shape))
