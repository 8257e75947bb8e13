"""Numbers from predictions: quality, uncertainty, and whether the one matches the other.

Scalars are Python floats; a metric of single rows is a tensor ``(N,)``. Functions take tensors of any floating dtype
and arrays alike. A metric is one function in the file of its topic, listed in that file's ``__all__``; the decorator
``metric`` above it enters it in the report.
"""

# ruff: noqa: F403, I001 (the order of these lines is the order of the report)
from pyro_vsd.metrics import classification, calibration, regression, out_of_distribution, selective, network_norms
from pyro_vsd.metrics import ensembles
from pyro_vsd.metrics import base, reporting
from pyro_vsd.metrics.base import *
from pyro_vsd.metrics.classification import *
from pyro_vsd.metrics.calibration import *
from pyro_vsd.metrics.regression import *
from pyro_vsd.metrics.out_of_distribution import *
from pyro_vsd.metrics.selective import *
from pyro_vsd.metrics.network_norms import *
from pyro_vsd.metrics.ensembles import *
from pyro_vsd.metrics.reporting import *

__all__ = []
__all__ += base.__all__
__all__ += classification.__all__
__all__ += calibration.__all__
__all__ += regression.__all__
__all__ += out_of_distribution.__all__
__all__ += selective.__all__
__all__ += network_norms.__all__
__all__ += ensembles.__all__
__all__ += reporting.__all__
