"""Sizes of a layer in the paper's theory: norms of its weight, and the explicit regulariser of its noise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_vsd._utils import check_choice, check_integer
from pyro_vsd.metrics.base import check_finite
from pyro_vsd.prediction.base import Array, to_tensor

__all__ = ["Estimate", "explicit_regularizer", "spectral_norm", "stable_rank"]


def spectral_norm(weight: Array | nn.Module) -> float:
    r"""Largest singular value :math:`\|\Theta\|_2` of a weight: the most it stretches an input. Lower is better.

    :param weight: a weight ``(out, ...)`` or a layer that has one; flattened to ``(out, -1)``.

    >>> spectral_norm(torch.diag(torch.tensor([3.0, 4.0])))
    4.0
    """
    return float(torch.linalg.matrix_norm(_matrix(weight), 2))


def stable_rank(weight: Array | nn.Module) -> float:
    r"""Number of directions that matter, from 1 to the rank; 0 for a weight of zeros. Lower is better.

    .. math:: \|\Theta\|_F^2 / \|\Theta\|_2^2

    >>> stable_rank(torch.diag(torch.tensor([3.0, 4.0])))
    1.5625
    """
    matrix = _matrix(weight)
    top = torch.linalg.matrix_norm(matrix, 2)
    return float((matrix / top).square().sum()) if top > 0 else 0.0


def _matrix(weight: Array | nn.Module) -> Tensor:
    found = weight.get_parameter("weight") if isinstance(weight, nn.Module) else weight
    matrix = to_tensor(found, name="weight").double()
    if matrix.dim() < 2:
        raise ValueError(f"weight must have two or more dimensions, (out, ...), not shape {tuple(matrix.shape)}.")
    check_finite("weight", matrix)
    return matrix.flatten(1)


# ---- the explicit regulariser

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Estimate(NamedTuple):
    """A value and its standard error, 0 where it was computed exactly."""

    value: float
    standard_error: float


def explicit_regularizer(
    net: nn.Module,
    layer: nn.Module | str,
    loss: Callable[[Any], Tensor],
    *inputs: Any,
    noise: Distribution | Tensor,
    on: Literal["input", "output"] | None = None,
    num_samples: int | None = None,
) -> Estimate:
    r"""Increase of the mean loss by noise, to second order. Lower means a flatter loss.

    .. math:: R_i = \tfrac12 E_x \langle H_i, diag(h_i) \Sigma\, diag(h_i) \rangle
              = \frac{1}{2B} \sum_b \sum_k (h_b \odot L_{:k})^T H_b (h_b \odot L_{:k}), \quad \Sigma = L L^T

    The noise multiplies :math:`h_i`, and :math:`H_i` is the Hessian of an example's loss in it. Positions (tokens,
    pixels) of an example share its noise. Costs K Hessian-vector products on the whole batch, or ``num_samples``.

    :param net: a network without noise. Examples must not interact, so put batch normalisation into ``eval``.
    :param layer: the layer, or its name in ``net``.
    :param loss: from the network's output to one loss for each example, ``(B,)``.
    :param inputs: what ``net`` is called with; the first dimension of the layer's input is B.
    :param noise: distribution of the noise, its covariance ``(K, K)``, or the variances ``(K,)`` of independent noise.
    :param on: the noise multiplies the layer's input, or its output before the bias. None takes the output for
        convolutions and the input for all others.
    :param num_samples: draws of the noise in place of the columns of L; None computes the value exactly.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> loss = lambda out: 0.5 * out.squeeze(-1) ** 2
    >>> explicit_regularizer(layer, layer, loss, torch.tensor([[3.0, 1.0]]), noise=torch.tensor([0.1, 0.2]))
    Estimate(value=0.85..., standard_error=0.0)
    """
    module = net.get_submodule(layer) if isinstance(layer, str) else layer
    if not any(module is one for one in net.modules()):
        raise ValueError(f"layer is not part of net: {module}. Give the module itself or its name.")
    if num_samples is not None:
        check_integer("num_samples", num_samples, 2)  # two for a standard error
    where = on or ("output" if isinstance(module, _CONVOLUTIONS) else "input")
    check_choice("on", where, ("input", "output"))
    with torch.enable_grad(), _perturbed(module, where) as found:
        losses = loss(net(*inputs))
        if not found:
            raise ValueError("layer did not run when net was called. Check its name.")
        eta = found[0]
        if losses.shape != eta.shape[:1]:
            shapes = f"shape ({len(eta)},), not {tuple(losses.shape)}"
            raise ValueError(f"loss must return one loss per example, {shapes}. Use reduction='none'.")
        (slope,) = torch.autograd.grad(losses.sum(), eta, create_graph=True)
    directions = _directions(noise, eta.detach(), num_samples)
    values = torch.stack([_curvature(slope, eta, direction) for direction in directions])
    if num_samples is None:
        return Estimate(float(values.sum()), 0.0)
    return Estimate(float(values.mean()), float(values.std() / num_samples**0.5))


def _curvature(slope: Tensor, eta: Tensor, direction: Tensor) -> Tensor:
    """Mean over examples of half the second derivative of the loss along a direction ``(B, K)``."""
    if not slope.requires_grad:  # a loss linear in the noise
        return slope.new_zeros(())
    (product,) = torch.autograd.grad(slope, eta, direction, retain_graph=True, materialize_grads=True)
    return 0.5 * (direction * product).sum() / len(eta)


@contextmanager
def _perturbed(module: nn.Module, on: str) -> Iterator[list[Tensor]]:
    """Multiplies a layer's input or output by 1 + eta; eta ``(B, K)`` is zero, and in the list after a call."""
    found: list[Tensor] = []
    convolution = isinstance(module, _CONVOLUTIONS)

    def layout(h: Tensor, rows: int) -> tuple[int, ...]:
        middle = [1] * (h.dim() - 2)
        return (rows, -1, *middle) if convolution else (rows, *middle, -1)

    def noise(h: Tensor) -> Tensor:
        if h.dim() < 2:
            raise ValueError(f"inputs must be a batch: layer needs shape (B, ..., K), not {tuple(h.shape)}.")
        if not found:  # a layer that runs again uses the same noise
            found.append(h.new_zeros(len(h), h.shape[1 if convolution else -1], requires_grad=True))
        return found[0].reshape(layout(h, len(h)))

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] + args[0] * noise(args[0]), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        bias: Any = getattr(module, "bias", None)
        return output + noise(output) * (output if bias is None else output - bias.reshape(layout(output, 1)))

    on_input = on == "input"
    handle = module.register_forward_pre_hook(before) if on_input else module.register_forward_hook(after)
    try:
        yield found
    finally:
        handle.remove()


def _directions(noise: Any, eta: Tensor, num_samples: int | None) -> Iterator[Tensor]:
    """Columns of L with covariance L Lᵀ, the same for every example, or draws for each example, ``(B, K)``."""
    units = noise.shape[-1] if isinstance(noise, Tensor) else noise.event_shape[-1]
    if units != eta.shape[-1]:
        raise ValueError(f"noise has {units} units, but multiplies {eta.shape[-1]}. Check layer and on.")
    if num_samples is not None and not isinstance(noise, Tensor):  # never forms the covariance
        for _ in range(num_samples):
            yield (noise.sample(eta.shape[:1]) - noise.mean).to(eta)
        return
    factor = _factor(noise if isinstance(noise, Tensor) else noise.covariance_matrix).to(eta)  # (K, K)
    if num_samples is None:
        yield from (column.expand_as(eta) for column in factor.mT)
    else:
        yield from (torch.randn_like(eta) @ factor.mT for _ in range(num_samples))


def _factor(covariance: Tensor) -> Tensor:
    """L with covariance L Lᵀ, ``(K, K)``; a semi-definite covariance is enough."""
    matrix = torch.diag(covariance) if covariance.dim() == 1 else covariance
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"noise must be a covariance (K, K) or variances (K,), not shape {tuple(covariance.shape)}.")
    values, vectors = torch.linalg.eigh(matrix.detach().double())
    # rounding brings zero eigenvalues of a float32 covariance to about -1e-6 times the largest
    if not float(values[0]) >= -1e-5 * float(values[-1]):
        raise ValueError(f"noise must be positive semi-definite; it has an eigenvalue of {float(values[0]):.3g}.")
    return vectors * values.clamp(min=0).sqrt()
