"""Figures of predictions, noise and training runs, with matplotlib (extra ``plots``).

Every function draws on ``ax``, or on a new figure without one, and returns the ``Axes``. Colours are safe for
colour-blind readers; line styles, markers and hatches differ too, for grey print.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("pyro_vsd.plots needs matplotlib. Install it: pip install 'pyro_vsd[plots]'") from error

from pyro_vsd.plots.classification import entropy_cdf, entropy_histogram, ood_roc, reliability, risk_coverage
from pyro_vsd.plots.ensembles import members
from pyro_vsd.plots.noise import droprates, noise_covariance, noise_variances
from pyro_vsd.plots.regression import band
from pyro_vsd.plots.training import diagnosis, elbo_terms

__all__ = [
    "band",
    "diagnosis",
    "droprates",
    "elbo_terms",
    "entropy_cdf",
    "entropy_histogram",
    "members",
    "noise_covariance",
    "noise_variances",
    "ood_roc",
    "reliability",
    "risk_coverage",
]
