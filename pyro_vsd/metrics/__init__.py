"""Numbers from predictions: how good, how sure, how well the one knows the other.

Scalars are Python floats; a measure of single rows is a tensor ``(N,)``. Tensors of any floating dtype and arrays are
accepted alike.
"""

from pyro_vsd.metrics.acquisition import acquisition
from pyro_vsd.metrics.calibration import Bins, adaptive_ece, classwise_ece, ece, reliability_bins
from pyro_vsd.metrics.classification import accuracy, brier, error_rate, mutual_information, nll, predictive_entropy
from pyro_vsd.metrics.networks import spectral_norm, stable_rank
from pyro_vsd.metrics.ood import (
    ROC,
    aupr_in,
    aupr_out,
    auroc,
    detection_error,
    fpr_at_95_tpr,
    ood,
    ood_score,
    roc_curve,
)
from pyro_vsd.metrics.regression import calibration_error, coverage, crps, log_likelihood, rmse
from pyro_vsd.metrics.regularizer import Estimate, explicit_regularizer
from pyro_vsd.metrics.report import Report
from pyro_vsd.metrics.selective import RiskCoverage, aurc, risk_coverage
from pyro_vsd.metrics.stream import Stream, report

__all__ = [
    "ROC",
    "Bins",
    "Estimate",
    "Report",
    "RiskCoverage",
    "Stream",
    "accuracy",
    "acquisition",
    "adaptive_ece",
    "aupr_in",
    "aupr_out",
    "aurc",
    "auroc",
    "brier",
    "calibration_error",
    "classwise_ece",
    "coverage",
    "crps",
    "detection_error",
    "ece",
    "error_rate",
    "explicit_regularizer",
    "fpr_at_95_tpr",
    "log_likelihood",
    "mutual_information",
    "nll",
    "ood",
    "ood_score",
    "predictive_entropy",
    "reliability_bins",
    "report",
    "risk_coverage",
    "rmse",
    "roc_curve",
    "spectral_norm",
    "stable_rank",
]
