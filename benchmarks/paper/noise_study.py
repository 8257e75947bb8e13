r"""How far the noise of a layer is from the best there is, to second order in the noise.

All values are :math:`F` of :mod:`pyro_vsd.diagnosis`, in nats, lower is better.
"""

import torch
from torch import Tensor

from benchmarks.paper.reflections import best_reflections, family_objective
from pyro_vsd.diagnosis import best_covariance, best_droprates, best_scales, noise_objective
from pyro_vsd.distributions import HouseholderNormal

__all__ = ["REFLECTIONS", "compared", "reach"]

#: the numbers of reflections whose reach is measured
REFLECTIONS = (1, 2, 5, 10, 20)


@torch.no_grad()
def compared(A: Tensor, log_alpha: Tensor, vectors: Tensor, strength: float) -> dict[str, float]:
    """F of the noise as trained, with its best sizes, of the best independent noise, of the best there is.

    :param A: curvature ``(K, K)``. :param log_alpha: ``(K,)``. :param vectors: ``(T, K)``.
    """
    A = A.double()
    covariance = HouseholderNormal(1.0, log_alpha.double().exp(), vectors.double()).covariance_matrix
    return {
        "trained": noise_objective(covariance, A, strength),
        "sized": noise_objective(best_scales(covariance, A, strength), A, strength),
        "independent": noise_objective(best_droprates(A, strength), A, strength),
        "best": noise_objective(best_covariance(A, strength), A, strength),
    }


def reach(A: Tensor, strength: float) -> dict[str, list[float]]:
    """The least F found with T reflections, ``reach1`` and so on, for matrices ``A (batch, K, K)``.

    More reflections can do all that fewer or none can, so where the search ends higher the best of fewer counts.
    """
    out: dict[str, list[float]] = {}
    lowest = torch.tensor([noise_objective(best_droprates(one, strength), one, strength) for one in A])
    for T in REFLECTIONS:
        if A.shape[-1] > T:
            noise = best_reflections(A, strength, T)
            lowest = torch.minimum(lowest, strength * family_objective(*noise, A.double() / strength, 1.0))
            out[f"reach{T}"] = lowest.tolist()
    return out
