"""Products of Householder reflections in compact WY form: thin products only, never a ``K × K`` matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CompactWY",
    "compact_wy",
    "covariance_diag",
    "dense",
    "rotate",
    "rotate_each",
    "rotate_inverse",
    "unit_vectors",
]


class CompactWY(NamedTuple):
    r"""An orthogonal matrix :math:`U = H_T \cdots H_1 = I - N^\top S N`.

    ``N (..., T, K)`` has unit rows (or zero rows: no reflection); ``S (..., T, T)`` is lower triangular.
    """

    N: Tensor
    S: Tensor


def unit_vectors(vectors: Tensor, source: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Rows of ``vectors (..., T, K)`` divided by their norms, and the norms ``(..., T, 1)``, both in float64.

    A row whose norm is below the smallest normal number counts as zero: the unit row is zero, its norm is infinite, so
    that whatever is divided by the norm in a gradient vanishes.

    :param source: the dtype the vectors were given in, where it is not theirs.

    >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))[0].tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    source = source or vectors.dtype
    tiny = torch.finfo(source).tiny
    rows = vectors.double()
    if source == torch.float64:
        # The square of a norm of 1e±200 does not exist: scale by the largest entry first.
        largest = rows.detach().abs().amax(-1, keepdim=True)
        largest = largest.masked_fill(largest < tiny, 1.0)
        norm = torch.linalg.vector_norm(rows / largest, dim=-1, keepdim=True) * largest
    else:
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    norm = norm.masked_fill(norm < tiny, torch.inf)
    return rows / norm, norm


def product(A: Tensor, B: Tensor) -> Tensor:
    """``A @ B``, which for three dimensions calls six operators where one is enough."""
    return torch.bmm(A, B) if A.dim() == B.dim() == 3 and A.shape[0] == B.shape[0] else A @ B


def inverse_factor(N: Tensor) -> Tensor:
    """``S = (½ I + strictly lower part of N Nᵀ)⁻¹``, the small factor of the WY form; ``(..., T, T)``."""
    T = N.shape[-2]
    two = 2 * torch.eye(T, dtype=N.dtype, device=N.device)
    if T <= 2:
        return torch.sub(two, torch.tril(product(N, N.mT), -1), alpha=4)
    gram = 2 * product(N, N.mT)
    # the solver takes a unit diagonal and reads the strictly lower part alone
    return torch.linalg.solve_triangular(gram, two.expand_as(gram), upper=False, unitriangular=True)


def compact_wy(vectors: Tensor) -> CompactWY:
    r"""The WY form of the reflections :math:`H_t = I - 2 v_t v_t^\top / \lVert v_t \rVert^2`, in :math:`O(K T^2)`.

    A zero vector means "no reflection", with zero gradients. The small numbers are formed in float64 whatever the
    dtype of ``vectors``, and returned in that dtype.

    :param vectors: raw vectors ``batch_shape + (T, K)``; ``T = 0`` is the identity.

    >>> wy = compact_wy(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    >>> rotate(wy, torch.tensor([3.0, 5.0]))
    tensor([-3., -5.])
    """
    if vectors.dim() < 2:
        raise ValueError(f"vectors must have a shape (..., T, K), not {tuple(vectors.shape)}.")
    N, _ = unit_vectors(vectors)
    return CompactWY(N.to(vectors.dtype), inverse_factor(N).to(vectors.dtype))


def rotate(wy: CompactWY, x: Tensor) -> Tensor:
    """``U x`` for rows ``x (..., K)``, in ``O(TK)`` per row.

    A batch of reflections ``batch_shape + (T, K)`` applies to ``x`` of shape ``batch_shape + (n, K)`` as a matrix
    product would; an ``x`` of shape ``batch_shape + (K,)`` is one row for each.

    >>> rotate(compact_wy(torch.eye(2)[:1]), torch.tensor([[3.0, 5.0]]))
    tensor([[-3.,  5.]])
    """
    return _reflect(_checked(x, wy), wy.N, wy.S.mT)


def rotate_inverse(wy: CompactWY, x: Tensor) -> Tensor:
    """``Uᵀ x`` for rows ``x``: undoes :func:`rotate`.

    >>> wy = compact_wy(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))
    >>> rotate_inverse(wy, rotate(wy, torch.tensor([3.0, 5.0])))
    tensor([3., 5.])
    """
    return _reflect(_checked(x, wy), wy.N, wy.S)


def _checked(x: Tensor, wy: CompactWY) -> Tensor:
    if x.dim() < 1 or x.shape[-1] != wy.N.shape[-1]:
        raise ValueError(f"x must have a shape (..., {wy.N.shape[-1]}), as wide as the vectors, not {tuple(x.shape)}.")
    return x


def _reflect(x: Tensor, N: Tensor, S: Tensor) -> Tensor:
    if N.dim() > 2 and x.shape[:-1] == N.shape[:-2]:  # one row per batch element
        return _reflect(x.unsqueeze(-2), N, S).squeeze(-2)
    if N.dim() == 2:  # one matrix for all rows: no temporary of the size of x
        flat = x.reshape(-1, x.shape[-1])
        # thin products with T rows, not T columns: faster on a CPU
        return torch.addmm(flat, (S.mT @ (N @ flat.mT)).mT, N, alpha=-1).reshape(x.shape)
    return x - ((x @ N.mT) @ S) @ N


def rotate_each(wy: CompactWY, x: Tensor, inverse: bool = False) -> Tensor:
    """``U x`` (or ``Uᵀ x``) for one row ``x (..., K)`` of each reflection; leading dimensions broadcast.

    >>> wy = compact_wy(torch.eye(2).unsqueeze(-2))  # two reflections, one row each
    >>> rotate_each(wy, torch.tensor([3.0, 5.0]))
    tensor([[-3.,  5.],
            [ 3., -5.]])
    """
    row = x.unsqueeze(-2)
    S = wy.S if inverse else wy.S.mT
    return (row - ((row @ wy.N.mT) @ S) @ wy.N).squeeze(-2)


def covariance_diag(wy: CompactWY, alpha: Tensor) -> Tensor:
    r"""The diagonal of :math:`\Sigma = U \operatorname{diag}(\alpha) U^\top`, in :math:`O(K T^2)`; ``(..., K)``.

    .. math:: s_i = \alpha_i - 2 \alpha_i (Y_i \cdot N^\top_i) + Y_i M Y_i^\top,
              \quad Y = N^\top S, \quad M = N \operatorname{diag}(\alpha) N^\top

    Formed in float64 and clamped at zero: it is a difference of nearly equal numbers where reflections cancel.

    >>> covariance_diag(compact_wy(torch.tensor([[1.0, 1.0]])), torch.tensor([1.0, 4.0]))
    tensor([4., 1.])
    """
    N, S, a = wy.N.double(), wy.S.double(), alpha.double()
    Y = N.mT @ S  # (..., K, T)
    M = (N * a.unsqueeze(-2)) @ N.mT  # (..., T, T)
    s = a - 2 * a * (Y * N.mT).sum(-1) + ((Y @ M) * Y).sum(-1)
    return s.clamp(min=0).to(alpha.dtype)


def dense(wy: CompactWY) -> Tensor:
    """``U`` as a dense ``(..., K, K)`` matrix: for tests and pictures, ``O(K²)`` memory.

    >>> dense(compact_wy(torch.eye(2)[:1]))
    tensor([[-1.,  0.],
            [ 0.,  1.]])
    """
    eye = torch.eye(wy.N.shape[-1], dtype=wy.N.dtype, device=wy.N.device)
    return eye - wy.N.mT @ wy.S @ wy.N
