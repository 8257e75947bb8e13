"""The draw of a weight: a tensor that knows its mean and its noise, and puts the noise on activations where it can.

``F.linear``, the convolutions and ``@`` apply one noise vector *per example*; every other operation meets one dense
draw. Nothing of torch is patched: :class:`LazyWeight` is a tensor subclass with ``__torch_function__``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_vsd.ops.noise import structured_noise, structured_noise_

if TYPE_CHECKING:
    from pyro_vsd.distributions.structured_dropout import StructuredDropout

__all__ = ["Draw", "LazyWeight", "ParticleTensor", "PlatelessTensor", "coherent"]

_COHERENT: ContextVar[bool] = ContextVar("pyro_vsd_coherent", default=False)


@contextmanager
def coherent() -> Iterator[None]:
    """Within this context one noise vector serves all inputs of a draw: one sampled *function* instead of one
    prediction per example. For plots of sampled functions and Thompson sampling.

    >>> import pyro_vsd as vsd
    >>> weight = vsd.distributions.StructuredDropout(torch.ones(3, 2), torch.ones(3)).rsample()
    >>> x = torch.ones(5, 3)
    >>> with coherent():
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
    """The same for particles without plate dimensions behind them, as ``Predictive(parallel=True)`` gives them: a
    sampled bias ``(S, Q)`` would meet an activation ``(S, B, Q)`` along the wrong axis."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHANNELS_SECOND:
            raise ValueError(
                f"expected functions that take samples as leading dimensions, got {func.__name__} on shape "
                f"{tuple(args[0].shape)}, where it would take rows for channels. Use vsd.predict, or "
                "Predictive(parallel=False)."
            )
        if func in _ELEMENTWISE:
            dims = max(a.dim() for a in args if isinstance(a, ParticleTensor))
            samples = next(a.shape[0] for a in args if isinstance(a, ParticleTensor))
            for other in args:
                plain = isinstance(other, Tensor) and not isinstance(other, ParticleTensor)
                if plain and 2 <= other.dim() < dims and other.shape[0] == samples:
                    raise ValueError(
                        f"expected samples that keep the plates' dimensions, got shape {tuple(other.shape)} beside an "
                        f"activation with {samples} samples. Use vsd.predict, or Predictive(parallel=False)."
                    )
        return super().__torch_function__(func, types, args, kwargs or {})


class Draw:
    """The noise of one draw, shared by all views of its weight: made on first use, then kept.

    :param law: the posterior the draw comes from.
    :param batch_shape: sample and batch dimensions of the draw.
    """

    #: where set, rows of standard normals come from here (``predict`` sets it), else from torch's global generator
    generator: torch.Generator | None = None
    #: the same for the dense draw
    dense_generator: torch.Generator | None = None
    #: where set, each example draws its own z from this LogNormal (``predict`` sets it)
    scale_law: Any = None
    #: where set, memory that passes without gradients use again (``predict`` sets it)
    workspace: dict[Any, Tensor] | None = None
    #: which axis of a sequence input counts the examples
    example_dim: int = 0
    #: the site's name, for messages
    name: str = "weight"

    def __init__(self, law: "StructuredDropout", batch_shape: torch.Size):
        self.law = law
        self.batch_shape = batch_shape
        # Pyro puts particles left of the plates; the rightmost plate is the one the examples run along. A batch of
        # weights of its own (replicas) is kept whole.
        self._own = law.theta.dim() > len(law.event_shape) or law.terms.std.dim() > 1
        strip = not self._own and len(batch_shape) > 1 and batch_shape[-1] == 1
        self.particles = batch_shape[:-1] if strip else batch_shape
        self.met: set[int] = set()  # numbers of examples met
        self.used_dense = False  # whether some operation met the dense draw
        self._rows: dict[int, Tensor] = {}
        self._eps: dict[int, Tensor] = {}  # normals of rows made without gradients
        self._shared: dict[str, Tensor] = {}  # the dense draw, shared with draws made by `again`
        self._origin: Draw | None = None  # the draw whose noise this one shows in another batch shape

    def again(self) -> "Draw":
        """The same dense draw for another pass, in which the noise per example is drawn anew."""
        new = self.reshaped(self.batch_shape)
        new._origin, new._shared = None, self._shared
        return new

    def reshaped(self, batch_shape: torch.Size) -> "Draw":
        """The same noise with another batch shape of as many elements."""
        new = Draw(self.law, batch_shape)
        new.generator, new.dense_generator, new.scale_law = self.generator, self.dense_generator, self.scale_law
        new.example_dim, new.name, new.workspace = self.example_dim, self.name, self.workspace
        new._origin = self
        return new

    @property
    def mark(self) -> type[ParticleTensor]:
        """The class of activations that this draw gives particles to."""
        return ParticleTensor if self._own or self.particles != self.batch_shape else PlatelessTensor

    def rows(self, n: int) -> Tensor:
        """``z ⊙ ξ`` for ``n`` examples: ``particles + (n, K)``, the same for each use of the draw."""
        self.met.add(n)
        if _COHERENT.get():
            unit = self.unit_noise()
            return unit.reshape(self.particles + (1, unit.shape[-1]))
        if self._origin is not None:
            rows = self._origin.rows(n)
            return rows.reshape(self.particles + rows.shape[-2:])
        if n not in self._rows or (n in self._eps and torch.is_grad_enabled()):
            self._rows[n] = self._draw_rows(n)
        return self._rows[n]

    def _kept_normals(self, kept: dict[Any, Tensor], key: Any, size: Any, generator: torch.Generator | None) -> Tensor:
        """Normals, the same ones again where noise first used without gradients is then wanted with them."""
        eps = kept.pop(key, None)
        if eps is None:
            eps = self._normals(torch.Size(size), generator)
        if not torch.is_grad_enabled() and self.law.requires_grad:
            kept[key] = eps
        return eps

    def scratch(self, name: str, shape: Any) -> Tensor:
        """Memory of the workspace, its content of no more use."""
        assert self.workspace is not None
        key = (name, *shape)
        if key not in self.workspace:
            self.workspace[key] = self.law.terms.std.new_empty(shape)
        return self.workspace[key]

    def _normals(
        self, shape: torch.Size, generator: torch.Generator | None, out: Tensor | None = None
    ) -> Tensor:
        std = self.law.terms.std
        if generator is None:
            return torch.randn(shape, dtype=std.dtype, device=std.device)
        # Torch fills normals in blocks of 16: whole blocks per row make a row's numbers independent of how the rows
        # are cut into batches.
        width = -(-shape[-1] // 16) * 16
        size = shape[:-1] + (width,)
        full = torch.randn(size, dtype=std.dtype, device=generator.device, generator=generator, out=out)
        return full[..., : shape[-1]].to(std.device)

    def _draw_rows(self, n: int) -> Tensor:
        law = self.law
        K = law.num_units
        terms = law.terms
        plain = law.scale is None and not self.batch_shape
        if self.workspace is not None and plain and not torch.is_grad_enabled():
            eps = self._normals(torch.Size((n, K)), self.generator, self.scratch("normals", (n, -(-K // 16) * 16)))
            return structured_noise_(eps, terms.std, terms.N, terms.S)
        # one call for both normals of a row: its numbers stay together however rows are cut into batches
        per_row = 1 if self.scale_law is None else 2
        eps = self._kept_normals(self._eps, n, (*self.particles, n, per_row * K), self.generator)
        eps, eps_z = eps[..., :K], eps[..., K:]
        xi = structured_noise(eps, terms.std, terms.N, terms.S)
        if self.scale_law is not None:
            return xi * (self.scale_law.loc + self.scale_law.scale * eps_z).exp()
        if law.scale is None:
            return xi
        scale = law.scale  # (..., K), with the batch shape of the draw where particles are vectorised
        return xi * scale.expand(self.batch_shape + (K,)).reshape(self.particles + (1, K))

    def unit_noise(self) -> Tensor:
        """``z ⊙ ξ`` of the dense draw: ``batch_shape + (K,)``."""
        if self._origin is not None:
            return self._origin.unit_noise().reshape(self.batch_shape + (-1,))
        if "unit" not in self._shared or ("eps" in self._shared and torch.is_grad_enabled()):
            law, terms = self.law, self.law.terms
            size = (*self.batch_shape, 1, law.num_units)
            eps = self._kept_normals(self._shared, "eps", size, self.dense_generator)
            xi = structured_noise(eps, terms.std, terms.N, terms.S).squeeze(-2)
            self._shared["unit"] = xi if law.scale is None else xi * law.scale
        return self._shared["unit"]

    def dense(self) -> Tensor:
        """``diag(z ⊙ ξ) Θ``: ``batch_shape + event_shape``."""
        self.used_dense = True
        if self._origin is not None:
            self._origin.used_dense = True
        law = self.law
        dense = self._shared.get("dense")
        if dense is None or (torch.is_grad_enabled() and law.requires_grad and not dense.requires_grad):
            noise = law._along(self.unit_noise())
            dense = self._shared["dense"] = law.theta * noise.to(law.theta.dtype)
        return dense


class _Mean(Tensor):
    """The mean of a weight. Calling it averages the draw's entries, as ``Tensor.mean`` does."""

    _draw: Draw

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._draw.dense().mean(*args, **kwargs)


class LazyWeight(Tensor):
    """A draw of :class:`~pyro_vsd.distributions.StructuredDropout`; see the module's text.

    :ivar draw: the noise, shared by all views.
    :ivar transposed: whether the last two axes are swapped.
    """

    draw: Draw
    transposed: bool

    @staticmethod
    def __new__(cls, draw: Draw, transposed: bool = False) -> "LazyWeight":
        law = draw.law
        shape = list(draw.batch_shape + law.event_shape)
        if transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        weight = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=law.theta.dtype,
            device=law.theta.device,
            requires_grad=torch.is_grad_enabled() and law.requires_grad,
        )
        weight.draw, weight.transposed = draw, transposed
        return weight

    def dense(self) -> Tensor:
        """The dense draw, a plain tensor with gradients; the same for all uses."""
        return self._seen(self.draw.dense())

    def _seen(self, value: Tensor) -> Tensor:
        return value.mT if self.transposed else value

    @property
    def mean(self) -> Any:
        """Θ (times z): the mean of the weight, given z."""
        mean = self._seen(self.draw.law.loc).as_subclass(_Mean)
        mean._draw = self.draw
        return mean

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight(shape={tuple(self.shape)}, noise_dim={self.draw.law.noise_dim}, dtype={self.dtype})"

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
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(_densify, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below autograd: a dense draw made here would lose its gradient.
        raise RuntimeError(
            f"expected {func} to meet a lazy weight through torch's function protocol, which was switched off around "
            "it. Pass weight.dense() there."
        )


def _densify(value: Any) -> Any:
    return value.dense() if isinstance(value, LazyWeight) else value


def getters(*names: str) -> set[Any]:
    """What torch calls to read these attributes of a tensor."""
    return {getattr(Tensor, name).__get__ for name in names}


# With as many rows as channels these would go on with wrong numbers; most others raise by themselves.
_CHANNELS_SECOND: set[Any] = {F.batch_norm, F.group_norm, F.instance_norm}
_ELEMENTWISE: set[Any] = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")
    if hasattr(owner, name)
}
_METADATA: set[Any] = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.get_device,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_signed,
    Tensor.is_inference,
    Tensor.is_conj,
    Tensor.is_neg,
    Tensor.stride,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    *getters("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_sparse", "is_leaf"),
    *getters("itemsize", "nbytes"),
    *getters("is_quantized", "is_meta", "is_mps", "is_nested", "is_xpu", "is_mkldnn"),
}
_HANDLERS: dict[Any, Callable[..., Any]] = {}


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler for torch functions; it may return ``NotImplemented`` to let the dense draw serve."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _HANDLERS[function] = handler
        return handler

    return register
