r"""The best noise for a layer, to second order in the noise.

With the curvature ``A`` of the loss in the noise :math:`\xi`, the part of the objective that depends on a layer's
noise is

.. math:: F(\Sigma) = \tfrac12 \operatorname{tr}(\Sigma A)
          + \tfrac c2 \bigl[\textstyle\sum_i \log(1 + \Sigma_{ii}) - \log\det\Sigma\bigr],

where c, the ``strength``, is the ``kl_weight`` for ``kl_scale="unit"`` and Q times that for ``kl_scale="weight"``.
"""

import torch
from torch import Tensor

from pyro_vsd._utils import check_positive
from pyro_vsd.ops.householder import compact_wy, dense

__all__ = [
    "best_covariance",
    "best_droprates",
    "best_scales",
    "best_variances",
    "leading_reflections",
    "noise_objective",
]

# A unit that does not change the loss has infinite noise at the optimum; here its KL is 5e-5 of the strength.
_LARGEST = 1e4
# Steps extrapolated by a larger factor gained nothing and led to singular matrices.
_LONGEST = 64.0
# Of the fixed point of α; further ones changed F by less than a thousandth of the gain.
_ITERATIONS = 30


def noise_objective(covariance: Tensor, A: Tensor, strength: float) -> float:
    """F of a covariance, in nats; lower is better. Costs O(K³), for independent noise O(K).

    :param covariance: Σ ``(K, K)``, or the variances ``(K,)`` of independent noise.
    :param A: curvature ``(K, K)``, see :func:`pyro_vsd.diagnosis.curvature`.
    :param strength: c > 0.

    >>> round(noise_objective(torch.tensor([1.0]), torch.tensor([[2.0]]), 1.0), 4)  # 1 + log(2) / 2
    1.3466
    """
    A, c = _checked(A, strength)
    S = covariance.detach().double()
    if S.shape not in (A.shape, A.shape[:1]):
        raise ValueError(f"covariance of shape {tuple(S.shape)} does not fit A of shape {tuple(A.shape)}.")
    if S.dim() == 1:
        return float(0.5 * (S * A.diagonal()).sum() + 0.5 * c * (S.log1p() - S.log()).sum())
    log_det = 2 * torch.linalg.cholesky(S).diagonal().log().sum()
    return float(0.5 * (S * A).sum() + 0.5 * c * (S.diagonal().log1p().sum() - log_det))


def best_droprates(A: Tensor, strength: float) -> Tensor:
    r"""The best independent noise, :math:`\alpha_i = \frac12 (\sqrt{1 + 4 c / A_{ii}} - 1)`, ``(K,)``.

    At most 1e4, for units without curvature. Only the diagonal of A is used: ``A`` may be given as ``(K,)``.

    >>> best_droprates(torch.tensor([2.0, 12.0]), strength=24.0)
    tensor([3., 1.])
    """
    if A.dim() == 2:
        A = A.diagonal()
    check_positive("strength", strength)
    a = _finite(A, A) + strength / _LARGEST**2
    return (2 * strength / (a * (1 + (1 + 4 * strength / a).sqrt()))).clamp(max=_LARGEST)


def best_covariance(A: Tensor, strength: float, *, tolerance: float = 1e-7, max_steps: int = 200) -> Tensor:
    r"""The best noise of any covariance, ``(K, K)``.

    The fixed point of :math:`\Sigma^{-1} = A/c + \operatorname{diag}(1/(1+\Sigma_{ii}))`, a Laplace-like posterior.
    Each step minimises a bound that touches F from above (the tangent of :math:`\log(1 + \Sigma_{ii})`), so F never
    rises; steps are extrapolated where that lowers F further. Some ten steps of O(K³) each; ``A`` may have any rank.
    A guide needs T = K - 1 reflections to reach the result exactly.

    :param A: curvature ``(K, K)``.
    :param strength: c > 0.
    :param tolerance: the last step lowers F by less than this times c K.

    >>> A = torch.tensor([[4.0, 2.0], [2.0, 4.0]])
    >>> S = best_covariance(A, 1.0)
    >>> torch.allclose(S.inverse(), A.double() + (1 / (1 + S.diagonal())).diag(), rtol=1e-3)
    True
    """
    A, c = _checked(A, strength)

    def step(s: Tensor) -> tuple[Tensor, Tensor, float]:
        """The next variances, their Σ, and its F."""
        factor = torch.linalg.cholesky(A / c + (1 / (1 + s)).diag())
        S = torch.cholesky_inverse(factor)
        new = S.diagonal().clone()
        value = 0.5 * (S * A).sum() + 0.5 * c * (new.log1p().sum() + 2 * factor.diagonal().log().sum())
        return new, S, float(value)

    s, best, lowest = step(best_droprates(A, c))
    for _ in range(max_steps):
        first, _, _ = step(s)
        second, S, value = step(first)
        # extrapolated in the logs, along the last two steps, by as much as they shrink
        change, bend = (first / s).log(), (second * s / first.square()).log()
        length = float(change.norm() / bend.norm().clamp(min=1e-300))
        if length > 1:
            length = min(length, _LONGEST)
            guess = (s.log() + 2 * length * change + length**2 * bend).exp().clamp(1e-12, _LARGEST)
            further, S_further, value_further = step(guess)
            if value_further < value:
                second, S, value = further, S_further, value_further
        gained, s, best, lowest = lowest - value, second, S, value
        if gained < tolerance * c * len(A):
            break
    return best


def leading_reflections(A: Tensor, num_reflections: int) -> Tensor:
    """Reflections that turn the noise into the directions in which it hurts most, ``(T, K)``; O(K³).

    The T leading eigenvectors of A become directions of the noise, each in the place of the unit with its largest
    entry. From T = K - 1 on, when all directions are eigenvectors, further vectors are zero: no reflections.

    :param A: curvature ``(K, K)``.
    :param num_reflections: T.

    >>> vectors = leading_reflections(torch.tensor([[4.0, 2.0], [2.0, 4.0]]), 1)
    >>> vsd.ops.householder.dense(vsd.ops.householder.compact_wy(vectors)).abs()
    tensor([[0.7071, 0.7071],
            [0.7071, 0.7071]])
    """
    A, _ = _checked(A, 1.0)
    K, T = len(A), min(num_reflections, len(A) - 1)
    vectors = torch.zeros(num_reflections, K, dtype=A.dtype, device=A.device)
    if T == 0:
        return vectors
    directions = torch.linalg.eigh(A)[1].flip(-1)[:, :T]
    order = _own_units(directions)
    # Householder's QR of orthonormal columns: its reflections take the first T units to them, up to signs
    below, factors = torch.geqrf(directions[order])
    rows = torch.tril(below, -1).mT + torch.eye(T, K, dtype=A.dtype, device=A.device)
    # U = H_T ... H_1, and the first reflection of the QR is applied last
    vectors[:T, order] = (rows * (factors != 0).unsqueeze(-1)).flip(0)
    return vectors


def best_variances(A: Tensor, vectors: Tensor, strength: float) -> Tensor:
    r"""The best noise variances α for given reflections, ``(K,)``; O(K² T).

    They solve :math:`1/\alpha_j = a_j/c + \sum_i U_{ij}^2/(1 + s_i)` with :math:`a = \operatorname{diag}(U^\top A U)`
    and :math:`s_i = \sum_j U_{ij}^2 \alpha_j`: a fixed point that never raises F. At most 1e4.

    :param A: curvature ``(K, K)``.
    :param vectors: of the reflections, ``(T, K)``.
    :param strength: c > 0.

    >>> best_variances(torch.tensor([2.0, 12.0]).diag(), torch.zeros(0, 2), strength=24.0)
    tensor([3., 1.])
    """
    A, c = _checked(A, strength)
    U = dense(compact_wy(vectors.to(A)))
    # curvatures in float32 are positive semidefinite to rounding alone
    squares, a = U.square(), ((U * (A @ U)).sum(0) / c).clamp(min=_LARGEST**-2)
    alpha = 2 / (a * (1 + (1 + 4 / a).sqrt()))  # the optimum without reflections
    for _ in range(_ITERATIONS if len(vectors) else 0):
        alpha = 1 / (a + squares.mT @ (1 / (1 + squares @ alpha)))
    return alpha.clamp(max=_LARGEST)


def _own_units(directions: Tensor) -> Tensor:
    """A permutation ``(K,)`` of the units: first, for each direction ``(K, T)`` in turn, the free unit with its largest
    entry, so that the other units turn as little as possible."""
    sizes = directions.abs().clone()
    chosen = []
    for column in sizes.unbind(-1):
        chosen.append(int(column.argmax()))
        sizes[chosen[-1]] = -1
    taken = set(chosen)
    rest = [unit for unit in range(len(directions)) if unit not in taken]
    return torch.tensor(chosen + rest, device=directions.device)


def best_scales(covariance: Tensor, A: Tensor, strength: float) -> Tensor:
    """The covariance with the given correlations and the best variance of each unit, ``(K, K)``.

    The decrease of F is due to the size of the noise alone; the rest, down to :func:`best_covariance`, is due to its
    correlations. By L-BFGS in the logs of the scales, O(K²) a step.

    >>> best_scales(torch.eye(2), torch.tensor([2.0, 12.0]).diag(), strength=24.0).diagonal()
    tensor([3., 1.])
    """
    given, (A, c) = covariance.detach().double(), _checked(A, strength)
    scale = given.diagonal().sqrt()
    R = given / scale.unsqueeze(-1) / scale
    weights = A * R
    with torch.enable_grad():
        log_scale = (0.5 * best_droprates(A, c).log()).requires_grad_()
        optimizer = torch.optim.LBFGS([log_scale], max_iter=200, tolerance_grad=1e-7 * c, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            d = log_scale.exp()
            loss = 0.5 * d @ weights @ d + c * (0.5 * d.square().log1p() - log_scale).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    d = log_scale.detach().exp()
    return R * d.unsqueeze(-1) * d


def _checked(A: Tensor, strength: float) -> tuple[Tensor, float]:
    """A in float64 with a smallest diagonal, and the strength."""
    if A.dim() != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise ValueError(f"A must have the shape (K, K), not {tuple(A.shape)}.")
    check_positive("strength", strength)  # without a KL the best noise is none
    A = _finite(A, A.diagonal())
    return A + (strength / _LARGEST**2) * torch.eye(len(A), dtype=A.dtype, device=A.device), float(strength)


def _finite(A: Tensor, diagonal: Tensor) -> Tensor:
    if not bool(A.isfinite().all()) or float(diagonal.min()) < 0:
        raise ValueError("A must be finite with a non-negative diagonal.")
    return A.detach().double()
