"""Ensembles: several networks, trained together and mixed by what they predict of held-out rows."""

from pyro_vsd.ensemble.contributions import Contributions
from pyro_vsd.ensemble.ensembles import Ensemble
from pyro_vsd.prediction import Stacking, mixture, stack, with_base_rate

__all__ = ["Contributions", "Ensemble", "Stacking", "mixture", "stack", "with_base_rate"]
