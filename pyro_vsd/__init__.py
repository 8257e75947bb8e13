"""Bayesian neural networks by Variational Structured Dropout, for Pyro and PyTorch.

>>> import pyro_vsd as vsd
>>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 10])), num_data=1442)
>>> guide = vsd.VSDGuide(model, num_reflections=2)
>>> elbo = vsd.VSD_ELBO()
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from pyro_vsd import datasets, diagnosis, distributions, ensemble, export, infer, metrics, nn, ops, posthoc, training
from pyro_vsd.diagnosis import diagnose
from pyro_vsd.distributions import coherent
from pyro_vsd.ensemble import Ensemble
from pyro_vsd.infer import VSD_ELBO, VSDGuide, predict
from pyro_vsd.posthoc import calibrate, from_trained
from pyro_vsd.prediction import Calibration, ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.training import compile_step, fit, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    # Not in __all__: a star import must not need matplotlib, scikit-learn, Lightning or transformers, nor import
    # the baselines.
    from pyro_vsd import baselines as baselines
    from pyro_vsd import plots as plots

__version__ = "0.1.0.dev0"

__all__ = [
    "Calibration",
    "ClassificationPrediction",
    "Ensemble",
    "Prediction",
    "RegressionPrediction",
    "VSDGuide",
    "VSD_ELBO",
    "calibrate",
    "coherent",
    "compile_step",
    "datasets",
    "diagnose",
    "diagnosis",
    "distributions",
    "ensemble",
    "export",
    "fit",
    "from_trained",
    "infer",
    "load_checkpoint",
    "metrics",
    "nn",
    "ops",
    "posthoc",
    "predict",
    "save_checkpoint",
    "training",
]

# Imported when first asked for, since they import more than training needs.
_ON_REQUEST = ("baselines", "lightning", "plots", "sklearn", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_REQUEST:
        return import_module(f"pyro_vsd.{name}")
    raise AttributeError(f"module 'pyro_vsd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_REQUEST})
