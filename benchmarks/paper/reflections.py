r"""The best noise that T reflections can make, to second order: what the family could find, and a start for training.

With the curvature ``A`` of the loss in the noise and the strength c of the KL, the part of the objective that the noise
of a layer decides is (see :mod:`pyro_vsd.diagnosis`)

.. math:: F = \tfrac12 \operatorname{tr}(\Sigma A) + \tfrac c2 \sum_i \log\frac{1 + \Sigma_{ii}}{\alpha_i},
          \qquad \Sigma = U \operatorname{diag}(\alpha)\,U^\top.
"""

import torch
from torch import Tensor

from pyro_vsd.ops.noise import NoiseTerms, noise_terms

__all__ = ["best_reflections", "family_objective", "reflections_onto"]

# A unit that the loss does not feel wants infinite noise; α stops at 1e4, as in pyro_vsd.diagnosis.
_SMALLEST = 1e-8
# Of the fixed point; further ones changed F by less than a thousandth of the gain.
_ITERATIONS = 30


def family_objective(log_alpha: Tensor, vectors: Tensor, A: Tensor, strength: float) -> Tensor:
    """F of ``log_alpha (..., K)`` and ``vectors (..., T, K)`` under ``A (..., K, K)``; shape ``(...)``. O(K² T).

    >>> family_objective(torch.zeros(1), torch.zeros(0, 1), torch.tensor([[2.0]]), 1.0)  # 1 + log(2) / 2
    tensor(1.3466)
    """
    terms = noise_terms(log_alpha, vectors)
    _, curvature = _rotated(terms, A)
    return 0.5 * (log_alpha.exp() * curvature).sum(-1) + 0.5 * strength * terms.log_ratio


def _rotated(terms: NoiseTerms, A: Tensor) -> tuple[Tensor, Tensor]:
    """U ``(..., K, K)``, and the diagonal of Uᵀ A U ``(..., K)``."""
    U = torch.eye(A.shape[-1], dtype=A.dtype) - terms.N.mT @ (terms.S @ terms.N)
    return U, (U * (A @ U)).sum(-2)


def reflections_onto(directions: Tensor) -> Tensor:
    """Vectors ``(..., T, K)`` whose rotation takes T unit vectors to the orthonormal ``directions (..., K, T)``.

    Each direction goes with the coordinate where it is largest, so that the other coordinates turn as little as may be.

    >>> vectors = reflections_onto(torch.tensor([[0.6], [0.8]]))
    >>> terms = noise_terms(torch.zeros(2), vectors)
    >>> torch.eye(2) - terms.N.mT @ terms.S @ terms.N  # the second column is the direction
    tensor([[-0.8000,  0.6000],
            [ 0.6000,  0.8000]])
    """
    rest, found = directions.clone(), []
    used = rest.new_zeros(rest.shape[:-1])
    for t in range(directions.shape[-1]):
        r = rest[..., t]
        index = (r.abs() - 2 * used).argmax(-1, keepdim=True)
        unit = torch.zeros_like(r).scatter(-1, index, 1.0)
        used = used + unit
        v = r - r.gather(-1, index).sign() * unit
        v = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        rest = rest - 2 * v.unsqueeze(-1) * (v.unsqueeze(-2) @ rest)
        found.append(v)
    # H_T ... H_1: the first one made is applied last
    return torch.stack(found[::-1], -2) if found else rest.mT


def best_reflections(A: Tensor, strength: float, T: int, polish: int = 100) -> tuple[Tensor, Tensor]:
    r"""``log_alpha (..., K)`` and ``vectors (..., T, K)`` of small F, for a batch of matrices, in float64.

    The T leading eigenvectors of A, where noise hurts most, become directions of the noise. Given U, the α that
    minimise F solve :math:`1/\alpha_j = a_j/c + \sum_i U_{ij}^2/(1 + s_i)` with :math:`a = \operatorname{diag}(U^\top A
    U)`: a fixed point that never raises F (the tangent of :math:`\log(1 + s_i)` bounds it). Then L-BFGS in both. From
    random vectors the search ends far worse: it is not convex. Beyond ``K - 1``, vectors are zero: no reflections.

    :param polish: iterations of L-BFGS for each matrix.
    """
    A, K = A.detach().double() / strength, A.shape[-1]
    _, directions = torch.linalg.eigh(A)
    vectors = reflections_onto(directions[..., max(1, K - T) :].flip(-1))  # K - 1 make any rotation
    vectors = torch.cat([vectors, vectors.new_zeros(*A.shape[:-2], T - vectors.shape[-2], K)], -2)
    terms = noise_terms(torch.zeros_like(A[..., 0]), vectors)
    U, curvature = _rotated(terms, A)
    curvature = curvature.clamp(min=_SMALLEST)
    alpha = 2 / (curvature * (1 + (1 + 4 / curvature).sqrt()))  # the optimum for T = 0
    squares = U.square()
    for _ in range(_ITERATIONS if T else 0):
        s = (squares @ alpha.unsqueeze(-1)).squeeze(-1)
        alpha = 1 / (curvature + (squares.mT @ (1 / (1 + s)).unsqueeze(-1)).squeeze(-1))
    log_alpha = alpha.log()
    if T and polish:
        flat = (t.reshape(-1, *t.shape[t.dim() - n :]) for t, n in ((log_alpha, 1), (vectors, 2), (A, 2)))
        both = [_polished(*one, polish) for one in zip(*flat, strict=True)]
        log_alpha = torch.stack([one[0] for one in both]).view_as(log_alpha)
        vectors = torch.stack([one[1] for one in both]).view_as(vectors)
    return log_alpha, vectors


def _polished(log_alpha: Tensor, vectors: Tensor, A: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        log_alpha, vectors = log_alpha.clone().requires_grad_(), vectors.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [log_alpha, vectors], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = family_objective(log_alpha, vectors, A, 1.0)
            loss.backward()
            return loss

        optimizer.step(closure)
    return log_alpha.detach(), vectors.detach()
