"""The noise of one weight: its draw, and all that a training step needs of its parameters, with hand-written gradients.

A step spends its time in many small operators on ``T × K`` and ``T × T`` numbers. Each function here is one node of the
autograd graph. Dense twins and ``gradcheck`` stand in ``tests/ops/test_noise.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_vsd.ops.householder import inverse_factor, unit_vectors

__all__ = ["NoiseTerms", "joint_noise_terms", "noise_terms", "structured_noise", "structured_noise_"]


class NoiseTerms(NamedTuple):
    """What a step needs of ``log_alpha (..., K)`` and ``vectors (..., T, K)``."""

    std: Tensor  # (..., K): √α
    N: Tensor  # (..., T, K): unit rows
    S: Tensor  # (..., T, T)
    log_ratio: Tensor  # (...): Σ_i log((1 + s_i) / α_i)


def noise_terms(log_alpha: Tensor, vectors: Tensor) -> NoiseTerms:
    r"""Standard deviations, WY form and the KL's sum :math:`\sum_i \log\frac{1 + s_i}{\alpha_i}` of a site: one node.

    The empirical-Bayes KL is ``num_columns / 2`` times that sum. Small numbers are formed in float64; ``std``, ``N``
    and ``S`` come back in the dtype given, the sum in at least float32. Costs :math:`O(K T^2)`, forward and backward.

    >>> noise_terms(torch.zeros(3), torch.zeros(0, 3)).log_ratio  # 3 log 2
    tensor(2.0794)
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # a trace that is to be saved cannot hold a Python function
        return NoiseTerms(*_outputs(log_alpha, vectors, _terms(log_alpha, vectors)))
    return NoiseTerms(*_NoiseTerms.apply(log_alpha, vectors))


class _Saved(NamedTuple):
    """What the gradient of the terms needs, in float64."""

    a: Tensor
    N: Tensor
    norm: Tensor
    S: Tensor
    s: Tensor


def _terms(log_alpha: Tensor, vectors: Tensor, source: torch.dtype | None = None) -> _Saved:
    a = log_alpha.double().exp()
    if vectors.shape[-2] == 0 and vectors.dim() == 2:
        N = vectors.double()
        empty = N.new_zeros(N.shape[:-1] + (0,))
        return _Saved(a, N, empty, empty, a)
    N, norm = unit_vectors(vectors, source)
    S = inverse_factor(N)
    s = _rotated_diag(N, S.mT @ N, a).clamp(min=0)  # rounding, where reflections cancel
    return _Saved(a, N, norm, S, s)


def _outputs(log_alpha: Tensor, vectors: Tensor, saved: _Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_ratio = (saved.s.log1p() - log_alpha).sum(-1)
    # Copies, so that an output is never one of the tensors saved.
    N, S = saved.N.to(vectors.dtype, copy=True), saved.S.to(vectors.dtype, copy=True)
    return (
        saved.a.sqrt().to(log_alpha.dtype),
        N,
        S,
        log_ratio.to(torch.promote_types(log_alpha.dtype, torch.float32)),
    )


def _gradients(saved: _Saved, g_std: Tensor, g_N: Tensor, g_S: Tensor, g_ratio: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in ``log_alpha`` and ``vectors`` (``None`` for T = 0), from float64 gradients in the outputs."""
    a, N, norm, S, s = saved
    w = g_ratio.unsqueeze(-1) / (1 + s)  # (..., K): gradient in s
    g_log_alpha = 0.5 * g_std * a.sqrt() - g_ratio.unsqueeze(-1)
    if N.shape[-2] == 0 and N.dim() == 2:
        return g_log_alpha + w * a, None
    Y = S.mT @ N
    # s_i = Σ_j U_ij² α_j, so the gradient in α is the same diagonal for Uᵀ.
    g_log_alpha = g_log_alpha + a * _rotated_diag(N, S @ N, w)
    # s = α − 2 α 1·(Y ⊙ N) + diag(Yᵀ M Y), with Y = Sᵀ N and M = N diag(α) Nᵀ.
    # In place where it can be: with many units, fresh memory costs more than arithmetic.
    Na = N * a.unsqueeze(-2)
    g_Y = (Na @ N.mT @ Y).sub_(Na).mul_((2 * w).unsqueeze(-2))
    g_L = torch.tril(-S.mT @ (N @ g_Y.mT + g_S) @ S.mT, -1)
    Yw = torch.mul(Y, w.unsqueeze(-2), out=Na)
    g_unit = (Yw @ Y.mT @ N).sub_(Yw).mul_((2 * a).unsqueeze(-2)).add_(g_N)
    g_unit += S @ g_Y
    g_unit += (g_L + g_L.mT) @ N
    along = torch.linalg.vecdot(N, g_unit).unsqueeze(-1)  # a unit vector's gradient is at right angles to it
    return g_log_alpha, g_unit.addcmul_(N, along, value=-1).div_(norm)


class _NoiseTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_alpha: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        saved = _terms(log_alpha, vectors)
        ctx.save_for_backward(*saved)
        ctx.dtypes = log_alpha.dtype, vectors.dtype
        ctx.shapes = log_alpha.shape, vectors.shape
        return _outputs(log_alpha, vectors, saved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g_std, g_N, g_S, g_ratio = (g.double() for g in grads)
        g_log_alpha, g_vectors = _gradients(_Saved(*ctx.saved_tensors), g_std, g_N, g_S, g_ratio)
        if g_vectors is None:
            g_vectors = torch.zeros(ctx.shapes[1], dtype=ctx.dtypes[1], device=g_log_alpha.device)
        return (
            _sum_to(g_log_alpha, ctx.shapes[0]).to(ctx.dtypes[0]),
            _sum_to(g_vectors, ctx.shapes[1]).to(ctx.dtypes[1]),
        )


def joint_noise_terms(log_alphas: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[NoiseTerms]:
    """:func:`noise_terms` of many sites in one node: each ``log_alpha (K_l,)`` and ``vectors (T, K_l)`` padded with
    zeros to the widest. The cost is that of a few operators, not of a few for each site.

    >>> terms = joint_noise_terms([torch.zeros(3), torch.zeros(2)], [torch.ones(1, 3), torch.ones(1, 2)])
    >>> [tuple(term.N.shape) for term in terms]
    [(1, 3), (1, 2)]
    """
    if len(log_alphas) == 1 or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return [noise_terms(*pair) for pair in zip(log_alphas, vectors, strict=True)]
    flat = _JointNoiseTerms.apply(len(log_alphas), *log_alphas, *vectors)
    return [NoiseTerms(*flat[4 * i : 4 * i + 4]) for i in range(len(log_alphas))]


class _JointNoiseTerms(torch.autograd.Function):
    # Zeros change nothing: a padded unit has α = 0, so s = 0 and no share in the sum, and no vector points to it.

    @staticmethod
    def forward(ctx: Any, sites: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        log_alphas, vectors = tensors[:sites], tensors[sites:]
        ctx.widths = [v.shape[-1] for v in log_alphas]
        ctx.dtype = log_alphas[0].dtype
        padded = torch.full((sites, max(ctx.widths)), -torch.inf, dtype=torch.float64, device=log_alphas[0].device)
        wide = padded.new_zeros((sites, vectors[0].shape[-2], max(ctx.widths)))
        for i, (log_alpha, vector, width) in enumerate(zip(log_alphas, vectors, ctx.widths, strict=True)):
            padded[i, :width] = log_alpha
            wide[i, :, :width] = vector
        saved = _terms(padded, wide, ctx.dtype)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        std = saved.a.sqrt().to(ctx.dtype)
        N, S = saved.N.to(ctx.dtype, copy=True), saved.S.to(ctx.dtype, copy=True)
        padded[padded == -torch.inf] = 0.0
        ratio = (saved.s.log1p() - padded).sum(-1).to(torch.promote_types(ctx.dtype, torch.float32))
        outputs: list[Tensor] = []
        for i, width in enumerate(ctx.widths):
            outputs += [std[i, :width].clone(), N[i, :, :width].contiguous(), S[i].clone(), ratio[i].clone()]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        g_std, g_N, g_S = torch.zeros_like(saved.a), torch.zeros_like(saved.N), torch.zeros_like(saved.S)
        g_ratio = saved.a.new_zeros(len(ctx.widths))
        for i, width in enumerate(ctx.widths):
            targets = (g_std[i, :width], g_N[i, :, :width], g_S[i], g_ratio[i])
            for target, grad in zip(targets, grads[4 * i : 4 * i + 4], strict=True):
                if grad is not None:
                    target.copy_(grad)
        g_log_alpha, g_vectors = _gradients(saved, g_std, g_N, g_S, g_ratio)
        assert g_vectors is not None
        g_log_alpha, g_vectors = g_log_alpha.to(ctx.dtype), g_vectors.to(ctx.dtype)
        result: list[Tensor | None] = [None] * (1 + 2 * len(ctx.widths))
        for i, width in enumerate(ctx.widths):
            result[1 + i] = g_log_alpha[i, :width]
            result[1 + len(ctx.widths) + i] = g_vectors[i, :, :width]
        return tuple(result)


def _rotated_diag(N: Tensor, Y: Tensor, a: Tensor) -> Tensor:
    """``diag(U diag(a) Uᵀ)`` for ``U = I − Yᵀ N``, with Y and N of shape ``(..., T, K)``; ``(..., K)``.

    Rows are long and T is small: sums over T of contiguous rows are several times faster than over a last axis of T.
    """
    Na = N * a.unsqueeze(-2)
    return a + ((Na @ N.mT @ Y - 2 * Na) * Y).sum(-2)


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
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # a trace that is to be saved cannot hold a Python function
        eta = eps * std.unsqueeze(-2)
        return 1 + eta - ((eta @ N.mT) @ S.mT) @ N
    if _is_autocast(eps.device.type):
        # A rotation in half precision is none: the draw keeps the dtype of its parameters.
        with torch.autocast(eps.device.type, enabled=False):
            return structured_noise(eps, std, N, S)
    out: Tensor = _StructuredNoise.apply(eps, std, N, S)
    return out


def structured_noise_(eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
    """:func:`structured_noise` in the memory of ``eps (n, K)``, without gradients: for predictions, where fresh memory
    for each pass costs as much as the arithmetic.

    >>> structured_noise_(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 0))
    tensor([[1.1000, 0.8000]])
    """
    if _is_autocast(eps.device.type):
        with torch.autocast(eps.device.type, enabled=False):
            return structured_noise_(eps, std, N, S)
    d = S @ ((N * std) @ eps.mT)  # (T, n)
    torch.addcmul(eps.new_ones(()), eps, std, out=eps)
    return eps.addmm_(d.mT, N, alpha=-1) if len(N) else eps


class _StructuredNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
        ctx.shapes = eps.shape, std.shape, N.shape, S.shape
        ctx.flat = std.dim() == 1 and N.dim() == 2
        if ctx.flat:  # one distribution for all rows: matrix products instead of batched ones
            eps = eps.reshape(-1, eps.shape[-1])
        out = torch.addcmul(eps.new_ones(()), eps, std.unsqueeze(-2))  # (..., n, K)
        if N.shape[-2] == 0 and N.dim() == 2:
            ctx.save_for_backward(eps, std)
        else:
            # Thin products with T rows, not T columns: several times faster on a CPU.
            c = (N * std.unsqueeze(-2)) @ eps.mT  # (..., T, n): N η
            d = S @ c
            ctx.save_for_backward(eps, std, N, S, c, d)
            # In place and in one pass: at this size memory costs more than arithmetic.
            out = out.addmm_(d.mT, N, alpha=-1) if ctx.flat else out - d.mT @ N
        return out.view(ctx.shapes[0]) if ctx.flat else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        eps_shape, std_shape, N_shape, S_shape = ctx.shapes
        if ctx.flat:
            g = g.reshape(-1, g.shape[-1])
        eps, std, *rest = ctx.saved_tensors
        g_std = (g * eps).sum(-2)
        if not rest:
            g_N, g_S = g.new_zeros(N_shape), g.new_zeros(S_shape)
            g_eta = g
        else:
            N, S, c, d = rest
            g_d = N @ g.mT  # (..., T, n): minus the gradient in d
            g_c = S.mT @ g_d
            back = g_c @ eps  # (..., T, K): what N and std need of η, formed from eps to save passes over η
            g_std = g_std - (back * N).sum(-2)
            g_N = -(d @ g) - back * std.unsqueeze(-2)
            g_S = -(g_d @ c.mT)
            g_eta = g - g_c.mT @ N if ctx.needs_input_grad[0] else g
        g_eps = g_eta * std.unsqueeze(-2) if ctx.needs_input_grad[0] else None
        if ctx.flat:
            return None if g_eps is None else g_eps.view(eps_shape), g_std, g_N, g_S
        g_eps = None if g_eps is None else _sum_to(g_eps, eps_shape)
        return g_eps, _sum_to(g_std, std_shape), _sum_to(g_N, N_shape), _sum_to(g_S, S_shape)
