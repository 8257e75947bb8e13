"""Pyro distributions of structured dropout, their KL divergences, and the lazy weight that a draw is."""

from pyro_vsd.distributions.householder_normal import HouseholderNormal
from pyro_vsd.distributions.kl import beta_star, empirical_bayes_kl, hierarchical_kl
from pyro_vsd.distributions.lazy_weight import LazyWeight, coherent
from pyro_vsd.distributions.scale_mixture import ScaleMixtureNormal
from pyro_vsd.distributions.structured_dropout import ColumnProduct, StructuredDropout

__all__ = [
    "ColumnProduct",
    "HouseholderNormal",
    "LazyWeight",
    "ScaleMixtureNormal",
    "StructuredDropout",
    "beta_star",
    "coherent",
    "empirical_bayes_kl",
    "hierarchical_kl",
]
