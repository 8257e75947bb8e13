"""How a lazy weight meets the operations of a layer: noise on inputs or on outputs, one vector per example."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_vsd.distributions.lazy_weight import Draw, LazyWeight, ParticleTensor, getters, handles

__all__: list[str] = []


def _noise_on(
    x: Tensor, draw: Draw, channel: int, examples: int, groups: int = 1, *, used_at_once: bool = False
) -> Tensor:
    """``x`` times the noise along its axis ``channel`` (negative), one vector for each index of axis ``examples``
    counted after the particle dimensions, or one in all where ``examples`` is -1 (an unbatched input). A result that
    is ``used_at_once`` and never seen again may come in the draw's workspace."""
    marked = isinstance(x, ParticleTensor)
    lead = len(draw.particles) if marked else 0
    n = 1 if examples < 0 else x.shape[lead + examples]
    noise = draw.rows(n)  # particles + (n or 1, K)
    if groups > 1:
        noise = noise.repeat((1,) * (noise.dim() - 1) + (groups,))
    if noise.dtype != x.dtype:
        noise = noise.to(x.dtype)
    inner = x.dim() - lead  # dimensions of one particle's input
    if inner != 2 or examples != 0 or channel != -1:
        shape = [1] * inner
        shape[channel] = noise.shape[-1]
        if examples >= 0:
            shape[examples] = noise.shape[-2]
        noise = noise.reshape(noise.shape[:-2] + tuple(shape))
        if examples < 0 and not marked and len(draw.batch_shape) > len(draw.particles):
            # unbatched: the plate's dimension, which an example would have filled, stays
            noise = noise.unsqueeze(len(draw.particles))
    if used_at_once and draw.workspace is not None and not torch.is_grad_enabled() and x.shape == noise.shape:
        return torch.mul(x, noise, out=draw.scratch("product", x.shape))
    out = x * noise
    return out.as_subclass(draw.mark) if draw.particles and not marked else out


def _check_channel(x: Tensor, axis: int, size: int, draw: Draw) -> None:
    if x.dim() < -axis or x.shape[axis] != size:
        raise ValueError(
            f"{draw.name}: expected an input with {size} features in dimension {axis}, got shape {tuple(x.shape)}."
        )


def _check_dtype(x: Tensor, draw: Draw) -> None:
    dtype = draw.law.theta.dtype
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{draw.name}: expected an input of {dtype}, as the weight is, got {x.dtype}.")


def _unusable(x: Any, draw: Draw) -> bool:
    """Whether the noise cannot follow: the dense draw serves then."""
    if not isinstance(x, Tensor) or isinstance(x, LazyWeight):
        return True
    return isinstance(x, ParticleTensor) and not draw.particles


def _linear(
    x: Tensor, weight: LazyWeight, bias: Tensor | None, *, weight_is_qk: bool, as_matmul: bool = False
) -> Any:
    """``x Wᵀ + b`` for a weight seen as ``(Q, K)``, or ``x W + b`` for one seen as ``(K, Q)``.

    A batch of weights of its own (replicas) meets an unmarked ``x`` whole, but in ``matmul``, where leading dimensions
    of ``x`` are torch's batch dimensions.
    """
    draw = weight.draw
    law = draw.law
    if len(law.event_shape) != 2 or _unusable(x, draw):
        return NotImplemented
    theta_is_qk = weight_is_qk != weight.transposed
    theta = law.theta if theta_is_qk else law.theta.mT  # (..., Q, K)
    _check_channel(x, -1, theta.shape[-1], draw)
    _check_dtype(x, draw)
    noise_on_input = law.noise_dim == (-1 if theta_is_qk else -2)
    if theta.dim() > 2 and not isinstance(x, ParticleTensor):
        rows = x.shape[-2:] if as_matmul else x.shape
        if torch.broadcast_shapes(draw.particles, x.shape[: x.dim() - len(rows)]) != draw.particles:
            return NotImplemented
        x = x.expand(draw.particles + rows).as_subclass(ParticleTensor)
    lead = len(draw.particles) if isinstance(x, ParticleTensor) else 0
    inner = x.dim() - lead
    examples = -1 if inner == 1 else (min(draw.example_dim, 1) if inner > 2 else 0)
    if noise_on_input:
        fused = bias is None or bias.dim() == 1
        noisy = _noise_on(x, draw, -1, examples, used_at_once=True)
        out = _matrix_product(noisy, theta, bias if fused else None, draw)
        return out if fused else _add_bias(out, bias, draw, 0)
    return _add_bias(_noise_on(_matrix_product(x, theta, None, draw), draw, -1, examples), bias, draw, 0)


def _add_bias(out: Tensor, bias: Tensor | None, draw: Draw, positions: int) -> Tensor:
    """``out`` plus a bias along its channels, which ``positions`` dimensions follow. A sampled bias may have particle
    dimensions, with or (from Pyro's ``Predictive``) without those of the plates behind them."""
    if bias is None:
        return out
    if draw.particles and bias.shape[:-1] in (draw.particles, draw.batch_shape):
        between = out.dim() - len(draw.particles) - 1 - positions
        bias = bias.reshape(draw.particles + (1,) * between + bias.shape[-1:])
    # in the dtype of the product, as torch's own layers have it under autocast
    return out + bias.reshape(bias.shape + (1,) * positions).to(out.dtype)


def _matrix_product(x: Tensor, theta: Tensor, bias: Tensor | None, draw: Draw) -> Tensor:
    if theta.dim() == 2:
        return F.linear(x, theta, bias)
    # a batch of weights (replicas): its dimensions are the leading ones of x
    flat = x.reshape(draw.particles + (-1, x.shape[-1])) @ theta.mT
    return _add_bias(flat.reshape(x.shape[:-1] + (theta.shape[-2],)), bias, draw, 0)


@handles(F.linear)
def _(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LazyWeight) or isinstance(bias, LazyWeight):
        return NotImplemented
    return _linear(input, weight, bias, weight_is_qk=True)


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
def _matmul(func: Any, *operands: Any, **named: Any) -> Any:
    operands += tuple(named.pop(name) for name in ("input", "other", "mat2", "vec") if name in named)
    if named or len(operands) != 2:
        return NotImplemented
    left, right = operands
    if isinstance(right, LazyWeight):
        return _linear(left, right, None, weight_is_qk=False, as_matmul=True)
    if isinstance(left, LazyWeight) and right.dim() == 1:
        return _linear(right, left, None, weight_is_qk=True)
    return NotImplemented  # the columns of W @ X are not examples


@handles(Tensor.__rmatmul__)
def _(func: Any, right: Any, left: Any) -> Any:
    return _matmul(func, left, right)


@handles(torch.addmm, Tensor.addmm)
def _(func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, **named: Any) -> Any:
    if not isinstance(mat2, LazyWeight) or isinstance(input, LazyWeight) or (beta, alpha) != (1, 1) or named:
        return NotImplemented
    return _linear(mat1, mat2, input, weight_is_qk=False)


def _convolution(func: Any, x: Any, weight: Any, bias: Any, groups: int, transposed: bool, call: Any) -> Any:
    """A convolution, its weight ``(out, in / groups, …)``, or ``(in, out / groups, …)`` where transposed."""
    if not isinstance(weight, LazyWeight) or isinstance(bias, LazyWeight):
        return NotImplemented
    draw, law = weight.draw, weight.draw.law
    rank = len(law.event_shape)
    axis = law.noise_dim + rank  # 0, 1: channels; more: positions of the kernel
    if law.theta.dim() > rank or (draw.batch_shape and (weight.transposed or axis > 1)):
        raise ValueError(
            f"{draw.name}: expected one weight of shape {tuple(law.event_shape)} with its noise on channels for a "
            f"convolution, got a batch {tuple(draw.batch_shape)} of weights of shape {tuple(law.theta.shape)} with "
            f"noise_dim {law.noise_dim}. Call the layer once for each weight."
        )
    if weight.transposed or axis > 1 or _unusable(x, draw):
        return NotImplemented
    lead = len(draw.particles) if isinstance(x, ParticleTensor) else 0
    inner = x.dim() - lead
    if inner not in (rank, rank - 1):
        raise ValueError(
            f"{draw.name}: expected an input of rank {rank} (or {rank - 1} unbatched) for a weight of shape "
            f"{tuple(law.event_shape)}, got shape {tuple(x.shape)}."
        )
    _check_dtype(x, draw)
    channel = 1 - rank
    examples = 0 if inner == rank else -1
    # The axis that groups split is shared by all of them: unit k serves the k-th channel of every group.
    split_axis = 1
    on_output = (axis == 0) != transposed
    tiles = groups if axis == split_axis else 1
    _check_channel(x, channel, law.event_shape[0] if transposed else law.event_shape[1] * groups, draw)
    if not on_output:
        fused = bias is None or bias.dim() == 1
        x = _noise_on(x, draw, channel, examples, tiles)
        out = _call_flat(x, rank, lambda v: call(v, law.theta, bias if fused else None))
        return out if fused else _add_bias(out, bias, draw, rank - 2)
    out = _noise_on(_call_flat(x, rank, lambda v: call(v, law.theta, None)), draw, channel, examples, tiles)
    return _add_bias(out, bias, draw, rank - 2)


def _call_flat(x: Tensor, rank: int, call: Any) -> Tensor:
    """Calls a convolution, which knows at most one batch dimension, with all leading ones flattened."""
    if x.dim() <= rank:
        out: Tensor = call(x)
        return out
    lead = x.shape[: x.dim() - rank + 1]
    out = call(x.reshape((-1,) + x.shape[1 - rank :]))
    return out.reshape(lead + out.shape[1:])


@handles(F.conv1d, F.conv2d, F.conv3d)
def _(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return _convolution(
        func, input, weight, bias, groups, False, lambda x, w, b: func(x, w, b, stride, padding, dilation, groups)
    )


@handles(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return _convolution(
        func,
        input,
        weight,
        bias,
        groups,
        True,
        lambda x, w, b: func(x, w, b, stride, padding, output_padding, groups, dilation),
    )


def _swap(weight: Any) -> Any:
    if len(weight.draw.law.event_shape) != 2:
        return NotImplemented
    return LazyWeight(weight.draw, not weight.transposed)


@handles(*getters("mT", "T"), Tensor.t, torch.t)
def _(func: Any, input: Any, *_: Any) -> Any:
    """The weight's own two axes, also where particles stand before them (torch refuses ``.T`` there)."""
    return _swap(input)


@handles(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
def _(func: Any, input: Any, dim0: Any = None, dim1: Any = None, **named: Any) -> Any:
    if not (isinstance(dim0, int) and isinstance(dim1, int)):
        return NotImplemented
    rank = input.dim()
    return _swap(input) if {dim0 % rank, dim1 % rank} == {rank - 1, rank - 2} else NotImplemented


@handles(Tensor.reshape, Tensor.view, torch.reshape)
def _(func: Any, weight: Any = None, *shape: Any, **named: Any) -> Any:
    """A reshape of the batch dimensions alone keeps the weight lazy (Pyro's ``Predictive`` does that)."""
    if named or not isinstance(weight, LazyWeight):
        return NotImplemented
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    law = weight.draw.law
    batch = len(sizes) - len(law.event_shape)
    fits = batch >= 0 and not weight.transposed and tuple(sizes[batch:]) == tuple(law.event_shape)
    if not fits or any(not isinstance(size, int) or size < 0 for size in sizes):
        return NotImplemented
    new = torch.Size(sizes[:batch])
    if new == weight.draw.batch_shape:
        return weight
    own_batch = law.scale is not None or law.theta.dim() > len(law.event_shape)
    if own_batch or new.numel() != weight.draw.batch_shape.numel():
        return NotImplemented
    return LazyWeight(weight.draw.reshaped(new))
