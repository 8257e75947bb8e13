"""What is wrong with a training run, and what to try: :func:`diagnose`.

Also the closed forms behind it: the curvature of the loss in a layer's noise, and the best noise for it.
"""

from pyro_vsd.diagnosis.covariance import (
    best_covariance,
    best_droprates,
    best_scales,
    best_variances,
    leading_reflections,
    noise_objective,
)
from pyro_vsd.diagnosis.findings import Finding
from pyro_vsd.diagnosis.gauss_newton import curvature
from pyro_vsd.diagnosis.report import Diagnosis, diagnose

__all__ = [
    "Diagnosis",
    "Finding",
    "best_covariance",
    "best_droprates",
    "best_scales",
    "best_variances",
    "curvature",
    "diagnose",
    "leading_reflections",
    "noise_objective",
]
