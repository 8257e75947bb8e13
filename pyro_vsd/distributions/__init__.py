"""Pyro distributions of structured dropout, their KL divergences, and the lazy weight that a draw is."""

from pyro_vsd.distributions import kl, lazy_operations
from pyro_vsd.distributions.column_product import ColumnProduct
from pyro_vsd.distributions.empirical_bayes import beta_star, empirical_bayes_kl, hierarchical_kl
from pyro_vsd.distributions.householder_normal import HouseholderNormal
from pyro_vsd.distributions.lazy_weight import LazyWeight, coherent
from pyro_vsd.distributions.structured_dropout import StructuredDropout
from pyro_vsd.distributions.weight_prior import ScaleMixtureNormal, WeightNormal, WeightPrior

__all__ = [
    "ColumnProduct",
    "HouseholderNormal",
    "LazyWeight",
    "ScaleMixtureNormal",
    "StructuredDropout",
    "WeightNormal",
    "WeightPrior",
    "beta_star",
    "coherent",
    "empirical_bayes_kl",
    "hierarchical_kl",
    "kl",
    "lazy_operations",
]
