"""The noise of one weight: its draw, and all that a training step needs of its parameters, with hand-written gradients.

A step spends its time in many small operators on ``T × K`` and ``T × T`` numbers. Each function here is one node of the
autograd graph. Dense twins and ``gradcheck`` stand in ``tests/ops/test_noise.py``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_vsd.ops.householder import inverse_factor, unit_vectors

__all__ = ["NoiseTerms", "noise_terms", "structured_noise"]


class NoiseTerms(NamedTuple):
    """What a step needs of ``log_alpha (..., K)`` and ``vectors (..., T, K)``."""

    std: Tensor  # (..., K): √α
    N: Tensor  # (..., T, K): unit rows
    S: Tensor  # (..., T, T)
    log_ratio: Tensor  # (...): Σ_i log((1 + s_i) / α_i)


def noise_terms(log_alpha: Tensor, vectors: Tensor) -> NoiseTerms:
    r"""Standard deviations, WY form and the KL's sum :math:`\sum_i \log\frac{1 + s_i}{\alpha_i}` of one site, in one node.

    The empirical-Bayes KL is ``num_columns / 2`` times that sum. Small numbers are formed in float64; ``std``, ``N``
    and ``S`` come back in the dtype given, the sum in at least float32. Costs :math:`O(K T^2)`, forward and backward.

    >>> noise_terms(torch.zeros(3), torch.zeros(0, 3)).log_ratio  # 3 log 2
    tensor(2.0794)
    """
    return NoiseTerms(*_NoiseTerms.apply(log_alpha, vectors))


class _NoiseTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_alpha: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a = log_alpha.double().exp()
        std = a.sqrt()
        if vectors.shape[-2] == 0 and vectors.dim() == 2:
            N = vectors.double()
            norm = S = N.new_zeros(N.shape[:-1] + (0,))
            s = a
        else:
            N, norm = unit_vectors(vectors)
            S = inverse_factor(N)
            s = _rotated_diag(N, N.mT @ S, a).clamp_(min=0)  # rounding, where reflections cancel
        log_ratio = (s.log1p() - log_alpha).sum(-1)
        ctx.save_for_backward(a, N, norm, S, s)
        ctx.dtypes = log_alpha.dtype, vectors.dtype
        ctx.shapes = log_alpha.shape, vectors.shape
        # Copies, so that an output is never one of the tensors saved.
        N, S = N.to(vectors.dtype, copy=True), S.to(vectors.dtype, copy=True)
        return std.to(log_alpha.dtype), N, S, log_ratio.to(torch.promote_types(log_alpha.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g_std, g_N, g_S, g_ratio = (g.double() for g in grads)
        a, N, norm, S, s = ctx.saved_tensors
        w = g_ratio.unsqueeze(-1) / (1 + s)  # (..., K): gradient in s
        g_log_alpha = 0.5 * g_std * a.sqrt() - g_ratio.unsqueeze(-1)
        if N.shape[-2] == 0 and N.dim() == 2:
            g_log_alpha = _sum_to(g_log_alpha + w * a, ctx.shapes[0])
            return g_log_alpha.to(ctx.dtypes[0]), torch.zeros(ctx.shapes[1], dtype=ctx.dtypes[1], device=a.device)
        # s_i = Σ_j U_ij² α_j, so the gradient in α is the same diagonal for Uᵀ.
        g_log_alpha = g_log_alpha + a * _rotated_diag(N, N.mT @ S.mT, w)
        # s = α − 2 α (Y ⊙ Nᵀ)·1 + diag(Y M Yᵀ), with Y = Nᵀ S and M = N diag(α) Nᵀ.
        NT = N.mT
        Y = NT @ S
        Na = N * a.unsqueeze(-2)
        w_ = w.unsqueeze(-1)
        g_Y = 2 * w_ * (Y @ (Na @ NT) - Na.mT)
        g_NT = 2 * (Na.mT @ ((Y * w_).mT @ Y) - a.unsqueeze(-1) * w_ * Y) + g_Y @ S.mT
        g_L = torch.tril(-S.mT @ (NT.mT @ g_Y + g_S) @ S.mT, -1)
        g_unit = g_N + g_NT.mT + (g_L + g_L.mT) @ N
        g_vectors = (g_unit - N * (N * g_unit).sum(-1, keepdim=True)) / norm
        return (
            _sum_to(g_log_alpha, ctx.shapes[0]).to(ctx.dtypes[0]),
            _sum_to(g_vectors, ctx.shapes[1]).to(ctx.dtypes[1]),
        )


def _rotated_diag(N: Tensor, Y: Tensor, a: Tensor) -> Tensor:
    """``diag(U diag(a) Uᵀ)`` for ``U = I − Y N``; ``(..., K)``."""
    M = (N * a.unsqueeze(-2)) @ N.mT
    return a + (((Y @ M) - 2 * a.unsqueeze(-1) * N.mT) * Y).sum(-1)


def _sum_to(grad: Tensor, shape: torch.Size) -> Tensor:
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def structured_noise(eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
    r"""The noise :math:`\xi = 1 + U (\sqrt\alpha \odot \epsilon)` for rows of standard normals, in ``O(TK)`` per row.

    :param eps: standard normals ``batch_shape + (n, K)``.
    :param std: :math:`\sqrt\alpha`, ``batch_shape + (K,)``.
    :param N: unit rows of the WY form, ``batch_shape + (T, K)``.
    :param S: its small factor, ``batch_shape + (T, T)``.

    >>> structured_noise(torch.tensor([[1.0, -1.0]]), torch.tensor([0.1, 0.2]), torch.zeros(0, 2), torch.zeros(0, 0))
    tensor([[1.1000, 0.8000]])
    """
    if not torch.is_autocast_enabled(eps.device.type):
        out: Tensor = _StructuredNoise.apply(eps, std, N, S)
        return out
    # A rotation in half precision is none: the draw keeps the dtype of its parameters.
    with torch.autocast(eps.device.type, enabled=False):
        return structured_noise(eps, std, N, S)


class _StructuredNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
        ctx.shapes = eps.shape, std.shape, N.shape, S.shape
        ctx.flat = std.dim() == 1 and N.dim() == 2
        if ctx.flat:  # one law for all rows: matrix products instead of batched ones
            eps = eps.reshape(-1, eps.shape[-1])
        out = torch.addcmul(eps.new_ones(()), eps, std.unsqueeze(-2))  # (..., n, K)
        if N.shape[-2] == 0 and N.dim() == 2:
            ctx.save_for_backward(eps, std)
        else:
            c = eps @ (N * std.unsqueeze(-2)).mT  # (..., n, T): N η
            d = c @ S.mT
            ctx.save_for_backward(eps, std, N, S, c, d)
            # In place and in one pass: at this size memory costs more than arithmetic.
            out = out.addmm_(d, N, alpha=-1) if ctx.flat else out - d @ N
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
            g_d = g @ N.mT  # minus the gradient in d
            g_c = g_d @ S
            back = g_c.mT @ eps  # (..., T, K): what N and std need of η, formed from eps to save passes over η
            g_std = g_std - (back * N).sum(-2)
            g_N = -(d.mT @ g) - back * std.unsqueeze(-2)
            g_S = -(g_d.mT @ c)
            g_eta = g - g_c @ N if ctx.needs_input_grad[0] else g
        g_eps = None
        if ctx.needs_input_grad[0]:
            g_eps = g_eta * std.unsqueeze(-2)
            g_eps = g_eps.view(eps_shape) if ctx.flat else _sum_to(g_eps, eps_shape)
        return g_eps, _sum_to(g_std, std_shape), _sum_to(g_N, N_shape), _sum_to(g_S, S_shape)
