"""Pictures of predictions, noise and training, with matplotlib (extra ``plots``).

Every function takes the ``ax`` to draw on, makes a new figure without, and returns the ``Axes``. Colours are safe for
colour-blind readers, and line styles, markers and hatches tell series apart in grey print.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "expected matplotlib for pyro_vsd.plots, got none. Install it: pip install 'pyro_vsd[plots]'"
    ) from error

from pyro_vsd.plots.classification import entropy_cdf, entropy_histogram, ood_roc, reliability
from pyro_vsd.plots.health import diagnosis
from pyro_vsd.plots.noise import droprates, noise_covariance
from pyro_vsd.plots.regression import band
from pyro_vsd.plots.selective import risk_coverage
from pyro_vsd.plots.training import elbo_terms

__all__ = [
    "band",
    "diagnosis",
    "droprates",
    "elbo_terms",
    "entropy_cdf",
    "entropy_histogram",
    "noise_covariance",
    "ood_roc",
    "reliability",
    "risk_coverage",
]
