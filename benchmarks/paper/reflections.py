r"""The best noise that T reflections can make, to second order: what the family could find, and a start for training.

With the curvature ``A`` of the loss in the noise and the strength c of the KL, the part of the objective that the noise
of a layer decides is (see :mod:`pyro_vsd.diagnosis`)

.. math:: F = \tfrac12 \operatorname{tr}(\Sigma A) + \tfrac c2 \sum_i \log\frac{1 + \Sigma_{ii}}{\alpha_i},
          \qquad \Sigma = U \operatorname{diag}(\alpha)\,U^\top.
"""

import math

import torch
from torch import Tensor

from pyro_vsd.ops.noise import noise_terms

__all__ = ["best_reflections", "family_objective", "reflections_onto"]


def family_objective(log_alpha: Tensor, vectors: Tensor, A: Tensor, strength: float) -> Tensor:
    """F of ``log_alpha (..., K)`` and ``vectors (..., T, K)`` under ``A (..., K, K)``; shape ``(...)``. O(K² T).

    >>> family_objective(torch.zeros(1), torch.zeros(0, 1), torch.tensor([[2.0]]), 1.0)  # 1 + log(2) / 2
    tensor(1.3466)
    """
    terms = noise_terms(log_alpha, vectors)
    U = torch.eye(A.shape[-1], dtype=A.dtype) - terms.N.mT @ (terms.S @ terms.N)
    curvature = (U * (A @ U)).sum(-2)  # (..., K): the diagonal of Uᵀ A U
    return 0.5 * (log_alpha.exp() * curvature).sum(-1) + 0.5 * strength * terms.log_ratio


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


def best_reflections(A: Tensor, strength: float, T: int, steps: int = 600, lr: float = 0.03) -> tuple[Tensor, Tensor]:
    """``log_alpha (..., K)`` and ``vectors (..., T, K)`` of least F, for a batch of matrices at once, in float64.

    From the T leading eigenvectors of A and the best droprates for them, then Adam with a cosine. For ``T = 0`` the
    start is the optimum.
    """
    A = A.detach().double()
    _, directions = torch.linalg.eigh(A)
    vectors = reflections_onto(directions[..., A.shape[-1] - T :])
    terms = noise_terms(torch.zeros_like(A[..., 0]), vectors)
    U = torch.eye(A.shape[-1], dtype=A.dtype) - terms.N.mT @ (terms.S @ terms.N)
    curvature = (U * (A @ U)).sum(-2).clamp(min=strength * 1e-8)
    # ½ (√(1 + 4c/a) − 1) without cancellation, as in diagnosis.best_droprates
    log_alpha = (2 * strength / (curvature * (1 + (1 + 4 * strength / curvature).sqrt()))).log()
    if T == 0:
        return log_alpha, vectors
    with torch.enable_grad():
        log_alpha, vectors = log_alpha.requires_grad_(), vectors.clone().requires_grad_()
        best = family_objective(log_alpha, vectors, A, strength).detach()
        kept = log_alpha.detach().clone(), vectors.detach().clone()
        optimizer = torch.optim.Adam([log_alpha, vectors], lr=lr)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            family_objective(log_alpha, vectors, A, strength).sum().backward()
            optimizer.step()
        now = family_objective(log_alpha, vectors, A, strength).detach()
    better = (now < best).unsqueeze(-1)
    return (
        torch.where(better, log_alpha.detach(), kept[0]),
        torch.where(better.unsqueeze(-1), vectors.detach(), kept[1]),
    )
