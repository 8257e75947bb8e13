"""Bayesian neural networks by Variational Structured Dropout, for Pyro and PyTorch."""

from pyro_vsd import datasets, distributions, metrics, ops
from pyro_vsd.distributions import coherent
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__version__ = "0.1.0.dev0"

__all__ = [
    "ClassificationPrediction",
    "Prediction",
    "RegressionPrediction",
    "coherent",
    "datasets",
    "distributions",
    "metrics",
    "ops",
]
