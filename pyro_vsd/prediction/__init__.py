"""What a prediction is: the predictive distribution of every row, averaged over posterior samples.

``N`` rows, ``S`` posterior samples, ``C`` classes, ``D`` outputs. Variances over samples divide by ``S``, so that one
sample has none. Every tensor is detached.
"""

from pyro_vsd.prediction.base import Prediction
from pyro_vsd.prediction.calibration import Calibration
from pyro_vsd.prediction.classification import ClassificationPrediction
from pyro_vsd.prediction.regression import RegressionPrediction
from pyro_vsd.prediction.stacking import Stacking, mixture, stack, with_base_rate

__all__ = [
    "Calibration",
    "ClassificationPrediction",
    "Prediction",
    "RegressionPrediction",
    "Stacking",
    "mixture",
    "stack",
    "with_base_rate",
]
