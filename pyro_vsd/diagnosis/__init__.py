"""What a trained guide is like, and what to change where it is ill: :func:`diagnose`.

Beside it the closed forms it rests on: the curvature of the loss in a layer's noise, and the best noise for it.
"""

from pyro_vsd.diagnosis.covariance import best_covariance, best_droprates, best_scales, noise_objective
from pyro_vsd.diagnosis.curvature import curvature
from pyro_vsd.diagnosis.diagnose import diagnose
from pyro_vsd.diagnosis.findings import Finding
from pyro_vsd.diagnosis.report import Diagnosis

__all__ = [
    "Diagnosis",
    "Finding",
    "best_covariance",
    "best_droprates",
    "best_scales",
    "curvature",
    "diagnose",
    "noise_objective",
]
