"""The noise of one weight: its draw, and all that a training step needs of its parameters, with hand-written gradients.

A step spends its time in many small operators on ``T × K`` and ``T × T`` numbers. Each function here is one node of the
autograd graph. Dense twins and ``gradcheck`` stand in ``tests/ops/test_noise.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_vsd.ops.householder import inverse_factor, product, unit_vectors

__all__ = [
    "NoiseTerms",
    "joint_noise_terms",
    "noise_terms",
    "rotated_noise",
    "rotated_noise_",
    "structured_noise",
    "structured_noise_",
]

# Log-variance of the units that pad a site: so much noise that log((1 + α) / α) is zero in float64.
_PADDING = 64.0


class NoiseTerms(NamedTuple):
    """What a step needs of ``log_alpha (..., K)`` and ``vectors (..., T, K)``."""

    std: Tensor  # (..., K): √α
    N: Tensor  # (..., T, K): unit rows
    W: Tensor  # (..., T, K): -S N diag(√α), so that U diag(√α) = diag(√α) + Nᵀ W
    log_ratio: Tensor  # (...): Σ_i log((1 + s_i) / α_i)

    @property
    def S(self) -> Tensor:  # noqa: N802 (its name in the formulas)
        """The small factor of the WY form, ``(..., T, T)``; computed, since a step needs W alone."""
        return inverse_factor(self.N.double()).to(self.N.dtype)


def noise_terms(log_alpha: Tensor, vectors: Tensor) -> NoiseTerms:
    r"""Standard deviations, WY form and the KL's sum :math:`\sum_i \log\frac{1 + s_i}{\alpha_i}` of a site: one node.

    The empirical-Bayes KL is ``num_columns / 2`` times that sum. Small numbers are formed in float64; ``std``, ``N``
    and ``W`` come back in the dtype given, the sum in at least float32. Costs :math:`O(K T^2)`, forward and backward.

    >>> noise_terms(torch.zeros(3), torch.zeros(0, 3)).log_ratio  # 3 log 2
    tensor(2.0794)
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # a trace that is to be saved cannot hold a Python function
        return NoiseTerms(*_outputs(_terms(log_alpha, vectors), log_alpha.dtype, vectors.dtype))
    return NoiseTerms(*_NoiseTerms.apply(log_alpha, vectors))


class _Saved(NamedTuple):
    """What the outputs and their gradients need, in float64."""

    log_alpha: Tensor
    std: Tensor
    N: Tensor
    norm: Tensor
    S: Tensor
    D: Tensor  # -S N
    W: Tensor
    s: Tensor


def _terms(log_alpha: Tensor, vectors: Tensor, source: torch.dtype | None = None) -> _Saved:
    log_alpha = log_alpha.double()
    a = log_alpha.exp()
    std = a.sqrt()
    if vectors.shape[-2] == 0 and vectors.dim() == 2:
        N = vectors.double()
        empty = N.new_zeros(N.shape[:-1] + (0,))
        return _Saved(log_alpha, std, N, empty, empty, N, N, a)
    N, norm = unit_vectors(vectors, source)
    S = inverse_factor(N)
    D = -product(S, N)
    r = std.unsqueeze(-2)
    W = D * r
    # s = diag((R + Nᵀ W)(R + Nᵀ W)ᵀ) with R = diag(√α). Rows are long and T is small: sums over T of contiguous rows
    # are several times faster than over a last axis of T.
    s = a + (product(product(W, W.mT), N).add_(W * r, alpha=2).mul_(N)).sum(-2)
    return _Saved(log_alpha, std, N, norm, S, D, W, s.clamp_(min=0))  # rounding, where reflections cancel


def _outputs(saved: _Saved, dtype: torch.dtype, vectors_dtype: torch.dtype) -> tuple[Tensor, ...]:
    log_ratio = (saved.s.log1p() - saved.log_alpha).sum(-1)
    # Copies, so that an output is never one of the tensors saved.
    return (
        saved.std.to(dtype, copy=True),
        saved.N.to(vectors_dtype, copy=True),
        saved.W.to(vectors_dtype, copy=True),
        log_ratio.to(torch.promote_types(dtype, torch.float32)),
    )


def _gradients(saved: _Saved, g_std: Tensor, g_N: Tensor, g_W: Tensor, g_ratio: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in ``log_alpha`` and ``vectors`` (``None`` for T = 0), from float64 gradients in the outputs."""
    _, std, N, norm, S, D, W, s = saved
    g_ratio = g_ratio.unsqueeze(-1)
    w = g_ratio / (1 + s)  # (..., K): gradient in s
    g_log_alpha = w * std.square() - g_ratio
    if N.shape[-2] == 0 and N.dim() == 2:
        return g_log_alpha.addcmul_(g_std, std, value=0.5), None
    r, w = std.unsqueeze(-2), (2 * w).unsqueeze(-2)
    # s = α + 1·(N ⊙ (W Wᵀ N + 2 √α W)), W = √α D, D = -S N. In place where it can be: with many units, fresh memory
    # costs more than arithmetic.
    Nw = N * w
    g_W = product(product(Nw, N.mT), W).addcmul_(Nw, r).add_(g_W)
    g_std = (g_W * D).addcmul_(Nw, W).sum(-2).add_(g_std)
    g_unit = product(product(W, W.mT), N).addcmul_(W, r).mul_(w).add_(g_N)
    g_unit -= (H := product(S.mT, g_W.mul_(r)))
    # S is the inverse of ½ I + the strictly lower part L of N Nᵀ, so its gradient reaches L as -Sᵀ g_S Sᵀ.
    g_L = torch.tril(product(H, D.mT), -1)
    g_unit -= product(g_L + g_L.mT, N)
    along = (N * g_unit).sum(-1, keepdim=True)  # a unit vector's gradient is at right angles to it
    return g_log_alpha.addcmul(g_std, std, value=0.5), g_unit.addcmul_(N, along, value=-1).div_(norm)


class _NoiseTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_alpha: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        saved = _terms(log_alpha, vectors)
        ctx.save_for_backward(*saved)
        ctx.dtypes = log_alpha.dtype, vectors.dtype
        ctx.shapes = log_alpha.shape, vectors.shape
        return _outputs(saved, *ctx.dtypes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g_log_alpha, g_vectors = _gradients(_Saved(*ctx.saved_tensors), *(g.double() for g in grads))
        if g_vectors is None:
            g_vectors = torch.zeros(ctx.shapes[1], dtype=ctx.dtypes[1], device=g_log_alpha.device)
        return (
            _sum_to(g_log_alpha, ctx.shapes[0]).to(ctx.dtypes[0]),
            _sum_to(g_vectors, ctx.shapes[1]).to(ctx.dtypes[1]),
        )


def joint_noise_terms(log_alphas: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[NoiseTerms]:
    """:func:`noise_terms` of many sites in one node: each ``log_alpha (K_l,)`` and ``vectors (T, K_l)`` padded to the
    widest. The cost is that of a few operators, not of a few for each site.

    >>> terms = joint_noise_terms([torch.zeros(3), torch.zeros(2)], [torch.ones(1, 3), torch.ones(1, 2)])
    >>> [tuple(term.N.shape) for term in terms]
    [(1, 3), (1, 2)]
    """
    if len(log_alphas) == 1 or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return [noise_terms(*pair) for pair in zip(log_alphas, vectors, strict=True)]
    flat, sites = _JointNoiseTerms.apply(len(log_alphas), *log_alphas, *vectors), len(log_alphas)
    return [NoiseTerms(*flat[i::sites]) for i in range(sites)]


class _JointNoiseTerms(torch.autograd.Function):
    # Padding changes nothing: no vector points to a padded unit, and _PADDING takes it out of the sum.

    @staticmethod
    def forward(ctx: Any, sites: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        log_alphas, vectors = tensors[:sites], tensors[sites:]
        ctx.widths = [v.shape[-1] for v in log_alphas]
        ctx.dtype = log_alphas[0].dtype
        saved = _terms(_padded(log_alphas, _PADDING), _padded(vectors), ctx.dtype)
        ctx.save_for_backward(*saved)
        *rows, ratio = _outputs(saved, ctx.dtype, ctx.dtype)
        return *(site for kind in rows for site in _cut(kind, ctx.widths)), *ratio.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, widths = _Saved(*ctx.saved_tensors), ctx.widths
        sites = len(widths)
        joint = [_padded(grads[i : i + sites]) for i in range(0, len(grads), sites)]
        g_log_alpha, g_vectors = _gradients(saved, *joint)
        assert g_vectors is not None
        return None, *_cut(g_log_alpha.to(ctx.dtype), widths), *_cut(g_vectors.to(ctx.dtype), widths)


def _padded(tensors: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Tensors of one shape but for the last axis, side by side in float64, as wide as the widest."""
    widths = [t.shape[-1] if t.dim() else 0 for t in tensors]
    width = max(widths)
    pad = torch.nn.functional.pad
    return torch.stack(
        [t if width == K else pad(t, (0, width - K), value=value) for t, K in zip(tensors, widths, strict=True)]
    ).double()


def _cut(joint: Tensor, widths: list[int]) -> list[Tensor]:
    """The tensors of the sites without their padding."""
    full = joint.shape[-1]
    return [t if full == K else t.narrow(-1, 0, K) for t, K in zip(joint.unbind(), widths, strict=True)]


def _sum_to(grad: Tensor, shape: torch.Size) -> Tensor:
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def _is_autocast(device: str) -> bool:
    """Torch raises for devices that have no autocast, such as ``meta``."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def structured_noise(eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
    r"""The noise :math:`\xi = 1 + U (\sqrt\alpha \odot \epsilon)` for rows of standard normals, in ``O(TK)`` per row.

    :param eps: standard normals ``batch_shape + (n, K)``.
    :param std: :math:`\sqrt\alpha`, ``batch_shape + (K,)``.
    :param N: unit rows of the WY form, ``batch_shape + (T, K)``.
    :param S: its small factor, ``batch_shape + (T, T)``.

    >>> structured_noise(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 0))
    tensor([[1.1000, 0.8000]])
    """
    if _is_autocast(eps.device.type):
        # A rotation in half precision is none: the draw keeps the dtype of its parameters.
        with torch.autocast(eps.device.type, enabled=False):
            return structured_noise(eps, std, N, S)
    return rotated_noise(eps, std, N, -(S @ N) * std.unsqueeze(-2))


def structured_noise_(eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
    """:func:`structured_noise` in the memory of ``eps (n, K)``, without gradients; see :func:`rotated_noise_`.

    >>> structured_noise_(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 0))
    tensor([[1.1000, 0.8000]])
    """
    if _is_autocast(eps.device.type):
        with torch.autocast(eps.device.type, enabled=False):
            return structured_noise_(eps, std, N, S)
    return rotated_noise_(eps, std, N, -(S @ N) * std)


def rotated_noise(eps: Tensor, std: Tensor, N: Tensor, W: Tensor) -> Tensor:
    """:func:`structured_noise` from the ``W`` of :class:`NoiseTerms`, which saves most of its small operators.

    >>> rotated_noise(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 2))
    tensor([[1.1000, 0.8000]])
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # a trace that is to be saved cannot hold a Python function
        return 1 + eps * std.unsqueeze(-2) + (eps @ W.mT) @ N
    if _is_autocast(eps.device.type):
        with torch.autocast(eps.device.type, enabled=False):
            return rotated_noise(eps, std, N, W)
    out: Tensor = _RotatedNoise.apply(eps, std, N, W)
    return out


def rotated_noise_(eps: Tensor, std: Tensor, N: Tensor, W: Tensor) -> Tensor:
    """:func:`rotated_noise` in the memory of ``eps (n, K)``, without gradients: for predictions, where fresh memory
    for each pass costs as much as the arithmetic.

    >>> rotated_noise_(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 2))
    tensor([[1.1000, 0.8000]])
    """
    if _is_autocast(eps.device.type):
        with torch.autocast(eps.device.type, enabled=False):
            return rotated_noise_(eps, std, N, W)
    d = W @ eps.mT  # (T, n)
    torch.addcmul(eps.new_ones(()), eps, std, out=eps)
    return eps.addmm_(d.mT, N) if len(N) else eps


class _RotatedNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: Tensor, std: Tensor, N: Tensor, W: Tensor) -> Tensor:
        ctx.shapes = eps.shape, std.shape, N.shape, W.shape
        ctx.flat = std.dim() == 1 and N.dim() == W.dim() == 2
        if ctx.flat:  # one distribution for all rows: matrix products instead of batched ones
            eps = eps.reshape(-1, eps.shape[-1]) if eps.dim() != 2 else eps
        out = torch.addcmul(eps.new_ones(()), eps, std if ctx.flat else std.unsqueeze(-2))  # (..., n, K)
        if N.shape[-2] == 0 and N.dim() == 2:
            ctx.save_for_backward(eps, std)
        else:
            # Thin products with T rows, not T columns: several times faster on a CPU.
            d = W @ eps.mT  # (..., T, n)
            ctx.save_for_backward(eps, std, N, W, d)
            # In place and in one pass: at this size memory costs more than arithmetic.
            out = out.addmm_(d.mT, N) if ctx.flat else out + d.mT @ N
        return out if out.shape == ctx.shapes[0] or not ctx.flat else out.view(ctx.shapes[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        eps_shape, std_shape, N_shape, W_shape = ctx.shapes
        if ctx.flat and g.dim() != 2:
            g = g.reshape(-1, g.shape[-1])
        eps, std, *rest = ctx.saved_tensors
        g_std = (g * eps).sum(-2)
        g_eps = g * std.unsqueeze(-2) if ctx.needs_input_grad[0] else None
        if not rest:
            g_N, g_W = g.new_zeros(N_shape), g.new_zeros(W_shape)
        else:
            N, W, d = rest
            g_d = N @ g.mT  # (..., T, n)
            g_N, g_W = d @ g, g_d @ eps
            g_eps = None if g_eps is None else g_eps + g_d.mT @ W
        g_eps = None if g_eps is None else g_eps.view(eps_shape) if ctx.flat else _sum_to(g_eps, eps_shape)
        return g_eps, _sum_to(g_std, std_shape), _sum_to(g_N, N_shape), _sum_to(g_W, W_shape)
