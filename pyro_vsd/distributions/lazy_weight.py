"""The draw of a weight: a tensor that knows its mean and its noise, and applies the noise to activations where it can.

``F.linear``, the convolutions and ``@`` apply one noise vector *per example*; every other operation uses one dense
draw. Nothing of torch is patched: :class:`LazyWeight` is a tensor subclass with ``__torch_function__``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_vsd.distributions.checks import unit_shaped
from pyro_vsd.distributions.layers import (
    ADDMM,
    CONVOLUTIONS,
    LINEAR,
    REVERSED,
    TRANSPOSED_CONVOLUTIONS,
    WEIGHT_LEFT,
    WEIGHT_RIGHT,
    Layer,
    find_layer,
)
from pyro_vsd.ops.noise import rotated_noise, rotated_noise_

if TYPE_CHECKING:
    from pyro_vsd.distributions.structured_dropout import StructuredDropout

__all__ = ["Draw", "LazyWeight", "NoiseMismatchError", "NoiseSource", "ParticleTensor", "PlatelessTensor", "coherent"]

_COHERENT: ContextVar[bool] = ContextVar("pyro_vsd_coherent", default=False)


@contextmanager
def coherent() -> Iterator[None]:
    """Within this context one noise vector serves all inputs of a draw: one sampled *function* instead of one
    prediction per example. For plots of sampled functions and Thompson sampling.

    >>> weight = vsd.distributions.StructuredDropout(torch.ones(3, 2), torch.ones(3)).rsample()
    >>> x = torch.ones(5, 3)
    >>> with vsd.coherent():
    ...     y = x @ weight
    >>> bool((y == y[0]).all())
    True
    """
    token = _COHERENT.set(True)
    try:
        yield
    finally:
        _COHERENT.reset(token)


class ParticleTensor(Tensor):
    """Marks an activation whose leading dimensions are those of vectorised particles. Results of operations on it are
    marked as well (torch's default for subclasses), so that the next weight knows where the examples begin."""


class PlatelessTensor(ParticleTensor):
    """A :class:`ParticleTensor` whose sample dimension is not followed by plate dimensions, as
    ``Predictive(parallel=True)`` makes them. A sampled bias ``(S, Q)`` would broadcast along the wrong axis of an
    activation ``(S, B, Q)``, so such operations raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHANNELS_SECOND:
            raise ValueError(
                f"{func.__name__} would take the rows of an activation of shape {tuple(args[0].shape)} for channels, "
                "since samples come first. Use vsd.predict, or Predictive(parallel=False)."
            )
        if func in _ELEMENTWISE:
            dims = max(a.dim() for a in args if isinstance(a, ParticleTensor))
            samples = next(a.shape[0] for a in args if isinstance(a, ParticleTensor))
            for other in args:
                plain = isinstance(other, Tensor) and not isinstance(other, ParticleTensor)
                if plain and 2 <= other.dim() < dims and other.shape[0] == samples:
                    raise ValueError(
                        f"a sample of shape {tuple(other.shape)} would broadcast along the wrong axis of an activation "
                        f"with {samples} samples. Use vsd.predict, or Predictive(parallel=False)."
                    )
        return super().__torch_function__(func, types, args, kwargs or {})


class NoiseSource:
    """Where the noise of a draw comes from, and a log of how the draw was used.

    :param name: the site's name, for messages.
    :param example_dim: which axis of a sequence counts the examples.
    :param rows: the generator of noise per example; by default torch's global one.
    :param dense: the generator of the dense draw.
    :param workspace: memory that passes without gradients use again.
    :param scale_posterior: a LogNormal from which each example draws its own z.
    :ivar examples: numbers of examples that the weight was applied to.
    :ivar sequences: first two sizes of inputs of three or more dimensions.
    :ivar used_dense: whether some operation used the dense draw.
    :ivar squares: where it is a list, each use adds the mean squares of what the noise multiplies, ``(K,)``.
    """

    def __init__(
        self,
        name: str = "weight",
        example_dim: int = 0,
        rows: torch.Generator | None = None,
        dense: torch.Generator | None = None,
        workspace: dict[Any, Tensor] | None = None,
        scale_posterior: Any = None,
    ):
        self.name, self.example_dim = name, example_dim
        self.rows, self.dense, self.workspace, self.scale_posterior = rows, dense, workspace, scale_posterior
        self.examples: set[int] = set()
        self.sequences: set[tuple[int, int]] = set()
        self.used_dense = False
        self.squares: list[Tensor] | None = None

    def scratch(self, name: str, shape: Any, like: Tensor) -> Tensor:
        """Memory of the workspace, to be overwritten."""
        assert self.workspace is not None
        key = (name, *shape)
        if key not in self.workspace:
            self.workspace[key] = like.new_empty(shape)
        return self.workspace[key]


class NoiseMismatchError(Exception):
    """A weight whose noise was given for n examples was applied to a different number of them, or used as a whole."""


class Draw:
    """The noise of one draw, shared by all views of its weight: made on first use, then kept.

    :param posterior: the distribution that the draw comes from.
    :param batch_shape: sample and batch dimensions of the draw.
    :param source: where its noise comes from.
    :param detach: whether the draw has no gradient.
    """

    def __init__(
        self, posterior: "StructuredDropout", batch_shape: torch.Size, source: NoiseSource, detach: bool = False
    ):
        terms, scale = posterior.terms, posterior.scale
        self.theta, self.scale = posterior.theta, scale
        self.std, self.N, self.W, _ = terms
        if detach:
            self.theta, self.std, self.N, self.W = (t.detach() for t in (self.theta, self.std, self.N, self.W))
            self.scale = None if scale is None else scale.detach()
        self.requires_grad = self.theta.requires_grad or self.std.requires_grad or self.N.requires_grad
        if self.scale is not None:
            self.requires_grad |= self.scale.requires_grad
        self._with_gradients = torch.is_grad_enabled()
        self.noise_dim, self.event_shape = posterior.noise_dim, posterior.event_shape
        self.batch_shape, self.source = batch_shape, source
        # Pyro puts particles left of the plates; the rightmost plate is the one the examples run along. A batch of
        # weights of its own (replicas) is kept whole.
        self._own = self.theta.dim() > len(self.event_shape) or self.std.dim() > 1
        self.particles = self._particles_of(batch_shape)
        self._rows: dict[int, Tensor] = {}
        self._eps: dict[int, Tensor] = {}  # normals of rows made without gradients
        self._shared: dict[str, Tensor] = {}  # the dense draw, shared with draws made by `again`
        self._origin: Draw | None = None  # the draw whose noise this one shows in a different batch shape
        self._given: Tensor | None = None  # z ⊙ ξ from outside, (n, K), or (1, K) for all examples
        self.apply_dense = False  # whether products use the dense draw

    def _particles_of(self, batch_shape: torch.Size) -> torch.Size:
        strip = not self._own and len(batch_shape) > 1 and batch_shape[-1] == 1
        return batch_shape[:-1] if strip else batch_shape

    @property
    def num_units(self) -> int:
        """K."""
        return self.std.shape[-1]

    def with_source(self, source: NoiseSource) -> "Draw":
        """A new draw from the same posterior."""
        new = self.again()
        new.source, new._shared = source, {}
        return new

    def again(self) -> "Draw":
        """The same dense draw for a further pass, in which the noise per example is drawn anew."""
        new = copy.copy(self)
        new._rows, new._eps, new._origin = {}, {}, None
        return new

    def given(self, noise: Tensor, scale: Tensor | None = None, apply_dense: bool = False) -> "Draw":
        """A draw from the same posterior whose noise is known.

        :param noise: ``z ⊙ ξ``, ``(1, K)`` for all examples, or ``(n, K)`` for exactly n of them.
        :param scale: z.
        :param apply_dense: whether products use the dense draw, which has the same result for noise ``(1, K)``.
        """
        new = self.again()
        new._shared, new._given, new.scale, new.apply_dense = {}, noise, scale, apply_dense
        return new

    def reshaped(self, batch_shape: torch.Size) -> "Draw":
        """The same noise with a different batch shape of as many elements."""
        new = copy.copy(self)
        new.batch_shape, new.particles = batch_shape, self._particles_of(batch_shape)
        new._rows, new._eps, new._shared, new._origin = {}, {}, {}, self
        return new

    def particle(self, index: int) -> "Draw":
        """One particle of a draw of many, with the noise that it has drawn so far."""
        new = copy.copy(self)
        new.batch_shape = new.particles = torch.Size()
        new._eps, new._origin = {}, None
        new._rows = {n: rows[index].reshape(rows.shape[-2:]) for n, rows in self._rows.items()}
        new._shared = {"unit": self._shared["unit"][index].reshape(-1)} if "unit" in self._shared else {}
        return new

    @property
    def mark(self) -> type[ParticleTensor]:
        """The class of activations that this draw gives particles to."""
        return ParticleTensor if self._own or self.particles != self.batch_shape else PlatelessTensor

    def rows(self, n: int) -> Tensor:
        """``z ⊙ ξ`` for ``n`` examples: ``particles + (n, K)``, the same for each use of the draw."""
        if self._given is not None:
            if len(self._given) not in (1, n):
                raise NoiseMismatchError
            return self._given
        self.source.examples.add(n)
        if _COHERENT.get():
            unit = self.unit_noise()
            return unit.reshape(self.particles + (1, unit.shape[-1]))
        if self._origin is not None:
            rows = self._origin.rows(n)
            return rows.reshape(self.particles + rows.shape[-2:])
        if n not in self._rows or (n in self._eps and torch.is_grad_enabled()):
            self._rows[n] = self._draw_rows(n)
        return self._rows[n]

    def _draw_rows(self, n: int) -> Tensor:
        K, source = self.std.shape[-1], self.source
        if source.workspace is not None and self.scale is None and not self.batch_shape and not torch.is_grad_enabled():
            memory = source.scratch("normals", (n, -(-K // 16) * 16), self.std)
            eps = self._normals(torch.Size((n, K)), source.rows, memory)
            return rotated_noise_(eps, self.std, self.N, self.W)
        # one call for both normals of a row: its numbers stay together however rows are cut into batches
        per_row = 1 if source.scale_posterior is None else 2
        eps = self._kept_normals(self._eps, n, (*self.particles, n, per_row * K), source.rows)
        if source.scale_posterior is not None:
            xi = rotated_noise(eps[..., :K], self.std, self.N, self.W)
            return xi * (source.scale_posterior.loc + source.scale_posterior.scale * eps[..., K:]).exp()
        xi = rotated_noise(eps, self.std, self.N, self.W)
        if self.scale is None:
            return xi
        # z (..., K) has the batch shape of the draw where particles are vectorised
        return xi * self.scale.expand(self.batch_shape + (K,)).reshape(self.particles + (1, K))

    def _kept_normals(self, kept: dict[Any, Tensor], key: Any, size: Any, generator: torch.Generator | None) -> Tensor:
        """Normals, the same ones again where noise first used without gradients is then wanted with them."""
        eps = kept.pop(key, None)
        if eps is None:
            eps = self._normals(torch.Size(size), generator)
        if self.requires_grad and self._with_gradients and not torch.compiler.is_compiling() and _in_checkpoint():
            raise ValueError(
                f"{self.source.name} is used inside of torch.utils.checkpoint, which would compute its gradients "
                "without the draw. Remove the checkpoint."
            )
        if self.requires_grad and not torch.is_grad_enabled():
            kept[key] = eps
        return eps

    def _normals(self, shape: torch.Size, generator: torch.Generator | None, out: Tensor | None = None) -> Tensor:
        std = self.std
        if generator is None:
            return torch.randn(shape, dtype=std.dtype, device=std.device)
        # Torch fills normals in blocks of 16: whole blocks per row make a row's numbers independent of how the rows
        # are cut into batches.
        size = shape[:-1] + (-(-shape[-1] // 16) * 16,)
        full = torch.randn(size, dtype=std.dtype, device=generator.device, generator=generator, out=out)
        return full[..., : shape[-1]].to(std.device)

    def unit_noise(self) -> Tensor:
        """``z ⊙ ξ`` of the dense draw: ``batch_shape + (K,)``."""
        if self._given is not None:
            if len(self._given) != 1:
                raise NoiseMismatchError
            return self._given[0]
        if self._origin is not None:
            return self._origin.unit_noise().reshape(self.batch_shape + (-1,))
        if "unit" not in self._shared or ("eps" in self._shared and torch.is_grad_enabled()):
            size = (*self.batch_shape, 1, self.num_units)
            eps = self._kept_normals(self._shared, "eps", size, self.source.dense)
            xi = rotated_noise(eps, self.std, self.N, self.W).squeeze(-2)
            self._shared["unit"] = xi if self.scale is None else xi * self.scale
        return self._shared["unit"]

    def dense(self) -> Tensor:
        """``diag(z ⊙ ξ) Θ``: ``batch_shape + event_shape``."""
        self.source.used_dense = True
        dense = self._shared.get("dense")
        if dense is None or (torch.is_grad_enabled() and self.requires_grad and not dense.requires_grad):
            noise = unit_shaped(self.unit_noise(), self.noise_dim, len(self.event_shape))
            dense = self._shared["dense"] = self.theta * noise.to(self.theta.dtype)
        return dense

    def mean(self) -> Tensor:
        """Θ, times z where there is one."""
        if self.scale is None:
            return self.theta
        return self.theta * unit_shaped(self.scale, self.noise_dim, len(self.event_shape))


def _in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` calls the part of the network that uses a weight. It computes that part again
    in the backward pass, outside of the network's call and so without the draw. A checkpoint around the whole model
    draws again."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "torch.utils.checkpoint":
            return True
        if module.startswith("pyro") and module != __name__:  # the call of the whole network
            return False
        frame = frame.f_back
    return False


class LazyWeight(Tensor):
    """A draw of :class:`~pyro_vsd.distributions.StructuredDropout`; see the module's text.

    :ivar draw: the noise, shared by all views.
    :ivar transposed: whether the last two axes are swapped.
    """

    draw: Draw
    transposed: bool

    @staticmethod
    def __new__(cls, draw: Draw, transposed: bool = False) -> "LazyWeight":
        shape = list(draw.batch_shape + draw.event_shape)
        if transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        weight = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=draw.theta.dtype,
            device=draw.theta.device,
            requires_grad=draw.requires_grad and torch.is_grad_enabled(),
        )
        weight.draw, weight.transposed = draw, transposed
        return weight

    def dense(self) -> Tensor:
        """The dense draw, a plain tensor with gradients; the same for all uses."""
        dense = self.draw.dense()
        return dense.mT if self.transposed else dense

    @property
    def mean(self) -> Any:
        """Θ (times z): the mean of the weight, given z. Called, it averages the draw's entries as ``Tensor.mean``."""
        value = self.draw.mean()
        mean = (value.mT if self.transposed else value).as_subclass(_Mean)
        mean._draw = self.draw
        return mean

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight(shape={tuple(self.shape)}, noise_dim={self.draw.noise_dim}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.dense().detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            if any(isinstance(a, LazyWeight) and a.draw.apply_dense for a in args):
                return func(*(a.dense() if isinstance(a, LazyWeight) else a for a in args), **kwargs)
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(lambda leaf: leaf.dense() if isinstance(leaf, LazyWeight) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below autograd: a dense draw made here would lose its gradient.
        raise RuntimeError(
            f"{func} was called on a lazy weight with torch's function protocol switched off. Pass weight.dense()."
        )


class _Mean(Tensor):
    _draw: Draw

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._draw.dense().mean(*args, **kwargs)


def _getters(*names: str) -> set[Any]:
    """What torch calls to read these attributes of a tensor."""
    return {getattr(Tensor, name).__get__ for name in names}


# With as many rows as channels these would give wrong numbers; most others raise by themselves.
_CHANNELS_SECOND: set[Any] = {F.batch_norm, F.group_norm, F.instance_norm}
_ELEMENTWISE: set[Any] = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")
    if hasattr(owner, name)
}
_METADATA: set[Any] = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(getattr(Tensor, name) for name in ("__len__", "get_device", "element_size", "is_contiguous", "is_signed")),
    *(getattr(Tensor, name) for name in ("is_inference", "is_conj", "is_neg", "stride")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
    *_getters("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_sparse", "is_leaf"),
    *_getters("itemsize", "nbytes"),
    *_getters("is_quantized", "is_meta", "is_mps", "is_nested", "is_xpu", "is_mkldnn"),
}
_HANDLERS: dict[Any, Callable[..., Any]] = {}


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler for torch functions or for rows of the table of layers; where it returns
    ``NotImplemented`` the dense draw is used."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for entry in functions:
            for function in entry.functions if isinstance(entry, Layer) else (entry,):
                _HANDLERS[function] = handler
        return handler

    return register


# ---- products


def _noise_on(
    x: Tensor, draw: Draw, channel: int, examples: int, groups: int = 1, *, used_at_once: bool = False
) -> Tensor:
    """``x`` times the noise along its axis ``channel`` (negative), one vector for each index of axis ``examples``
    counted after the particle dimensions, or one in all where ``examples`` is -1 (an unbatched input). A result that
    is ``used_at_once`` and never seen again may come in the workspace."""
    if draw.source.squares is not None:
        square = x.detach().as_subclass(Tensor).double().square().movedim(channel, -1)
        draw.source.squares.append(square.reshape(-1, groups, draw.num_units).mean((0, 1)))
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
    if used_at_once and draw.source.workspace is not None and not torch.is_grad_enabled() and x.shape == noise.shape:
        return torch.mul(x, noise, out=draw.source.scratch("product", x.shape, draw.std))
    out = x * noise
    return out.as_subclass(draw.mark) if draw.particles and not marked else out


def _check_input(x: Tensor, axis: int, size: int, draw: Draw) -> None:
    if x.dim() < -axis or x.shape[axis] != size:
        advice = " Rows come first: a single row x is x[None]." if x.dim() == 1 else ""
        raise ValueError(
            f"{draw.source.name}: the input must have {size} features in dimension {axis}; its shape is "
            f"{tuple(x.shape)}.{advice}"
        )
    dtype = draw.theta.dtype
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{draw.source.name}: the input must have the weight's dtype, {dtype}, not {x.dtype}. Use x.to({dtype})."
        )


def _unusable(x: Any, draw: Draw) -> bool:
    """Whether noise per example is impossible: the dense draw is used then."""
    if not isinstance(x, Tensor) or isinstance(x, LazyWeight):
        return True
    return isinstance(x, ParticleTensor) and not draw.particles


def _linear(x: Tensor, weight: LazyWeight, bias: Tensor | None, *, weight_is_qk: bool, as_matmul: bool = False) -> Any:
    """``x Wᵀ + b`` for a weight seen as ``(Q, K)``, or ``x W + b`` for one seen as ``(K, Q)``.

    A batch of weights of its own (replicas) applies to an unmarked ``x`` whole, except in ``matmul``, where leading
    dimensions of ``x`` are torch's batch dimensions.
    """
    draw = weight.draw
    if len(draw.event_shape) != 2 or (type(x) is not Tensor and _unusable(x, draw)):
        return NotImplemented
    theta_is_qk = weight_is_qk != weight.transposed
    theta = draw.theta if theta_is_qk else draw.theta.mT  # (..., Q, K)
    _check_input(x, -1, theta.shape[-1], draw)
    noise_on_input = draw.noise_dim == (-1 if theta_is_qk else -2)
    if theta.dim() > 2 and not isinstance(x, ParticleTensor):
        rows = x.shape[-2:] if as_matmul else x.shape
        if torch.broadcast_shapes(draw.particles, x.shape[: x.dim() - len(rows)]) != draw.particles:
            return NotImplemented
        x = x.expand(draw.particles + rows).as_subclass(ParticleTensor)
    lead = len(draw.particles) if isinstance(x, ParticleTensor) else 0
    inner = x.dim() - lead
    examples = -1 if inner == 1 else (min(draw.source.example_dim, 1) if inner > 2 else 0)
    if inner > 2 and not examples and not torch.compiler.is_compiling():  # whose sizes are symbols
        draw.source.sequences.add((x.shape[lead], x.shape[lead + 1]))
    if noise_on_input:
        fused = bias is None or bias.dim() == 1
        noisy = _noise_on(x, draw, -1, examples, used_at_once=True)
        if fused and theta.dim() == 2:
            return F.linear(noisy, theta, bias)
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


@_handles(LINEAR)
def _(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LazyWeight) or isinstance(bias, LazyWeight):
        return NotImplemented
    return _linear(input, weight, bias, weight_is_qk=True)


@_handles(WEIGHT_RIGHT, WEIGHT_LEFT)
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


@_handles(REVERSED)
def _(func: Any, right: Any, left: Any) -> Any:
    return _matmul(func, left, right)


@_handles(ADDMM)
def _(func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, **named: Any) -> Any:
    if not isinstance(mat2, LazyWeight) or isinstance(input, LazyWeight) or (beta, alpha) != (1, 1) or named:
        return NotImplemented
    return _linear(mat1, mat2, input, weight_is_qk=False)


# ---- convolutions


def _convolution(layer: Layer, x: Any, weight: Any, bias: Any, groups: int, call: Any) -> Any:
    """A convolution, its weight ``(out, in / groups, …)``, or ``(in, out / groups, …)`` where transposed."""
    if not isinstance(weight, LazyWeight) or isinstance(bias, LazyWeight):
        return NotImplemented
    draw = weight.draw
    rank = len(draw.event_shape)
    axis = draw.noise_dim + rank  # 0, 1: channels; more: positions of the kernel
    if draw.theta.dim() > rank or (draw.batch_shape and (weight.transposed or axis > 1)):
        raise ValueError(
            f"{draw.source.name}: a convolution takes one weight of shape {tuple(draw.event_shape)} with noise on "
            f"channels, not a batch {tuple(draw.batch_shape)} of weights with noise_dim {draw.noise_dim}. Call the "
            "layer once for each weight."
        )
    if weight.transposed or axis > 1 or _unusable(x, draw):
        return NotImplemented
    lead = len(draw.particles) if isinstance(x, ParticleTensor) else 0
    inner = x.dim() - lead
    if inner not in (rank, rank - 1):
        raise ValueError(
            f"{draw.source.name}: the input must have rank {rank} (or {rank - 1}, unbatched) for a weight of shape "
            f"{tuple(draw.event_shape)}; its shape is {tuple(x.shape)}."
        )
    channel = 1 - rank
    examples = 0 if inner == rank else -1
    # Groups split axis 1, so all of them share it: unit k serves the k-th channel of every group.
    tiles = groups if axis == 1 else 1
    _check_input(x, channel, draw.event_shape[layer.input_axis] * (groups if layer.input_axis == 1 else 1), draw)
    if axis == layer.input_axis:
        fused = bias is None or bias.dim() == 1
        x = _noise_on(x, draw, channel, examples, tiles)
        out = _call_flat(x, rank, lambda v: call(v, draw.theta, bias if fused else None))
        return out if fused else _add_bias(out, bias, draw, rank - 2)
    out = _noise_on(_call_flat(x, rank, lambda v: call(v, draw.theta, None)), draw, channel, examples, tiles)
    return _add_bias(out, bias, draw, rank - 2)


def _call_flat(x: Tensor, rank: int, call: Any) -> Tensor:
    """Calls a convolution, which takes at most one batch dimension, with all leading ones flattened."""
    if x.dim() <= rank:
        out: Tensor = call(x)
        return out
    lead = x.shape[: x.dim() - rank + 1]
    out = call(x.reshape((-1,) + x.shape[1 - rank :]))
    return out.reshape(lead + out.shape[1:])


@_handles(*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)
def _(func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **named: Any) -> Any:
    # Behind the bias, groups come fourth in both: (stride, padding, dilation or output padding, groups, …).
    groups = args[3] if len(args) > 3 else named.get("groups", 1)
    layer = find_layer(func, 1)
    assert layer is not None
    return _convolution(layer, input, weight, bias, groups, lambda x, w, b: func(x, w, b, *args, **named))


# ---- views


def _swap(weight: Any) -> Any:
    if len(weight.draw.event_shape) != 2:
        return NotImplemented
    return LazyWeight(weight.draw, not weight.transposed)


@_handles(*_getters("mT", "T"), Tensor.t, torch.t)
def _(func: Any, input: Any, *_: Any) -> Any:
    """The weight's own two axes, also where particles stand before them (torch refuses ``.T`` there)."""
    return _swap(input)


@_handles(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
def _(func: Any, input: Any, dim0: Any = None, dim1: Any = None, **named: Any) -> Any:
    if not (isinstance(dim0, int) and isinstance(dim1, int)):
        return NotImplemented
    rank = input.dim()
    return _swap(input) if {dim0 % rank, dim1 % rank} == {rank - 1, rank - 2} else NotImplemented


@_handles(Tensor.reshape, Tensor.view, torch.reshape)
def _(func: Any, weight: Any = None, *shape: Any, **named: Any) -> Any:
    """A reshape of the batch dimensions alone keeps the weight lazy (Pyro's ``Predictive`` does that)."""
    if named or not isinstance(weight, LazyWeight):
        return NotImplemented
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    draw = weight.draw
    batch = len(sizes) - len(draw.event_shape)
    fits = batch >= 0 and not weight.transposed and tuple(sizes[batch:]) == tuple(draw.event_shape)
    if not fits or any(not isinstance(size, int) or size < 0 for size in sizes):
        return NotImplemented
    new = torch.Size(sizes[:batch])
    if new == draw.batch_shape:
        return weight
    own_batch = draw.scale is not None or draw.theta.dim() > len(draw.event_shape)
    if own_batch or new.numel() != draw.batch_shape.numel():
        return NotImplemented
    return LazyWeight(draw.reshaped(new))
