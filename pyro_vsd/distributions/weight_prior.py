"""Priors of weights that also say where the noise acts and where the mean starts.

Guide and ELBO know a weight by the class of its prior; the networks state their priors with these classes.
"""

import math
import numbers
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_vsd.distributions.checks import event_axis, expanded_batch, floating, positive_finite, unit_shaped

__all__ = ["ScaleMixtureNormal", "WeightNormal", "WeightPrior"]


class WeightPrior(TorchDistribution):
    r"""A zero-mean Gaussian over the entries of a weight, with what a guide wants to know of it.

    :ivar noise_dim: the axis of the weight along which the noise units run, or ``None`` where the guide shall find it.
    :ivar input_dim: the axis of a convolution's input channels, for guides that put the noise there, or ``None``.
    :ivar init: a tensor of the weight's shape where the posterior's mean starts, or ``None``.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True
    noise_dim: int | None
    input_dim: int | None
    init: Tensor | None

    def __init__(
        self,
        batch_shape: torch.Size,
        shape: Any,
        noise_dim: int | None,
        init: Tensor | None,
        input_dim: int | None = None,
        **kwargs: Any,
    ):
        shape = _as_shape(shape)
        if len(shape) < 2:
            raise ValueError(f"shape: expected a weight of rank 2 or more, got {tuple(shape)}.")
        self.noise_dim = None if noise_dim is None else event_axis(noise_dim, len(shape), shape)
        self.input_dim = None if input_dim is None else event_axis(input_dim, len(shape), shape, "input_dim")
        if init is not None:
            floating("init", init)
        if init is not None and init.shape != shape:
            raise ValueError(f"init: expected shape {tuple(shape)}, got {tuple(init.shape)}.")
        self.init = init
        super().__init__(batch_shape, shape, **kwargs)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def scale_tensor(self) -> Tensor:
        """The standard deviation of each entry, broadcastable to ``batch_shape + event_shape``."""
        raise NotImplementedError

    def _check_broadcasts(self, name: str, value: Tensor) -> None:
        shape = self.event_shape
        pairs = zip(value.shape[::-1], shape[::-1], strict=False)
        if value.dim() > len(shape) or any(v not in (1, s) for v, s in pairs):
            raise ValueError(
                f"{name}: expected a number or a tensor that broadcasts to the weight's shape {tuple(shape)}, got "
                f"shape {tuple(value.shape)}."
            )

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_batch_shape", "_event_shape")})
        batch_shape = expanded_batch(self.batch_shape, batch_shape)
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.variance)

    @property
    def variance(self) -> Tensor:
        return self.scale_tensor.square().expand(self.batch_shape + self.event_shape)

    def entropy(self) -> Tensor:
        log_scale = self.scale_tensor.log().expand(self.batch_shape + self.event_shape)
        half = log_scale + 0.5 * (1 + math.log(2 * math.pi))
        return half.flatten(-len(self.event_shape)).sum(-1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        scale = self.scale_tensor
        return torch.randn(shape, dtype=scale.dtype, device=scale.device) * scale

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        density = torch.distributions.Normal(0.0, self.scale_tensor, validate_args=False).log_prob(value)
        density = density.flatten(-len(self.event_shape)).sum(-1)
        return density.expand(torch.broadcast_shapes(density.shape, self.batch_shape))


def _as_shape(shape: Any) -> torch.Size:
    """A weight's shape as a Size, its sizes positive."""
    try:
        size = torch.Size(shape)
    except TypeError:
        raise TypeError(f"shape: expected the sizes of a weight, got {shape!r}.") from None
    if any(n < 1 for n in size):
        raise ValueError(f"shape: expected positive sizes, got {tuple(size)}.")
    return size


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number or a tensor, got {value!r}.")


class WeightNormal(WeightPrior):
    r"""The Gaussian prior :math:`W_{ij} \sim \mathcal N(0, \sigma^2)` of a weight.

    :param scale: σ: a number or a tensor that broadcasts with ``shape``.
    :param shape: the weight's shape, rank 2 or more.
    :param noise_dim: the axis of the noise units, or ``None``.
    :param init: where the posterior's mean starts, or ``None``.
    :param input_dim: the axis of a convolution's input channels, or ``None``.

    >>> WeightNormal(0.5, (3, 2)).variance.sum()
    tensor(1.5000)
    """

    def __init__(
        self,
        scale: float | Tensor,
        shape: Any,
        noise_dim: int | None = None,
        init: Tensor | None = None,
        *,
        input_dim: int | None = None,
        validate_args: bool | None = None,
    ):
        if init is not None:
            floating("init", init)
        like = init if init is not None else torch.get_default_dtype()
        if not isinstance(scale, Tensor):
            _check_number("scale", scale)
            dtype, device = (like.dtype, like.device) if isinstance(like, Tensor) else (like, None)
            scale = torch.tensor(scale, dtype=dtype, device=device)
        floating("scale", scale)
        self.scale = scale
        super().__init__(torch.Size(), shape, noise_dim, init, input_dim, validate_args=validate_args)
        self._check_broadcasts("scale", scale)
        if self._validate_args:
            positive_finite("scale", scale)

    @property
    def scale_tensor(self) -> Tensor:
        return self.scale


class ScaleMixtureNormal(WeightPrior):
    r"""A weight's prior in a hierarchy: :math:`W_{:j} \mid z \sim \mathcal N(0, \operatorname{diag}(z / \beta_{:j}))`.

    ``z`` has one entry per noise unit, shared by all columns; its own prior is another site of the model.

    :param z: ``batch_shape + (K,)``, positive.
    :param noise_dim: the axis of the weight along which ``z`` runs.
    :param shape: the weight's shape, rank 2 or more.
    :param beta: the precision β, a number or a tensor that broadcasts with ``shape``. Acts where the prior is scored
        as stated (``VSD_ELBO(prior="model")``, ``Trace_ELBO``).
    :param empirical_bayes: which optimum replaces β in the empirical-Bayes objective: ``"paper"`` or ``"full"``; see
        :func:`~pyro_vsd.distributions.hierarchical_kl`.
    :param z_name: the name of the site that drew ``z``.
    :param init: where the posterior's mean starts, or ``None``.

    >>> ScaleMixtureNormal(torch.tensor([1.0, 4.0]), -1, (3, 2)).variance[0]
    tensor([1., 4.])
    """

    def __init__(
        self,
        z: Tensor,
        noise_dim: int,
        shape: Any,
        beta: float | Tensor = 1.0,
        empirical_bayes: str = "paper",
        z_name: str | None = None,
        init: Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ):
        if noise_dim is None:
            raise ValueError(f"noise_dim: expected the axis of the weight {shape} along which z runs, got None.")
        floating("z", z)
        if isinstance(beta, Tensor):
            floating("beta", beta)
        else:
            _check_number("beta", beta)
        if not isinstance(empirical_bayes, str) or empirical_bayes not in ("paper", "full"):
            raise ValueError(f"empirical_bayes: expected 'paper' or 'full', got {empirical_bayes!r}.")
        self.z, self.beta, self.empirical_bayes, self.z_name = z, beta, empirical_bayes, z_name
        super().__init__(z.shape[:-1], shape, noise_dim, init, validate_args=validate_args)
        if z.shape[-1:] != self.event_shape[self.noise_dim :][:1]:
            raise ValueError(
                f"z: expected one entry for each of the {self.event_shape[self.noise_dim]} noise units, "  # type: ignore[index]
                f"got shape {tuple(z.shape)}."
            )
        beta = torch.as_tensor(beta)
        self._check_broadcasts("beta", beta)
        if self._validate_args:
            positive_finite("z", z)
            positive_finite("beta", beta)

    @property
    def scale_tensor(self) -> Tensor:
        assert self.noise_dim is not None
        return (unit_shaped(self.z, self.noise_dim, len(self.event_shape)) / self.beta).sqrt()
