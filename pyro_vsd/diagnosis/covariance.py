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

__all__ = ["best_covariance", "best_droprates", "best_scales", "noise_objective"]

# A unit that does not change the loss has infinite noise at the optimum; here its KL is 5e-5 of the strength.
_LARGEST = 1e4
# Steps extrapolated by a larger factor gained nothing and led to singular matrices.
_LONGEST = 64.0


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
    A, c = _checked(A if A.dim() == 2 else A.diag(), strength)
    return (2 * c / (A.diagonal() * (1 + (1 + 4 * c / A.diagonal()).sqrt()))).clamp(max=_LARGEST)


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
    A = A.detach().double()
    if not bool(A.isfinite().all()) or float(A.diagonal().min()) < 0:
        raise ValueError("A must be finite with a non-negative diagonal.")
    return A + (strength / _LARGEST**2) * torch.eye(len(A), dtype=A.dtype, device=A.device), float(strength)
