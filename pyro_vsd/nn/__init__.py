"""Making networks Bayesian: priors, observation models, and the networks of the paper."""

from pyro_vsd.nn.bayesian_network import BayesianNetwork, bayesianize
from pyro_vsd.nn.export import PrunedNetwork, mean_network, prune, rank_units
from pyro_vsd.nn.likelihoods import BinaryClassifier, Classifier, ObservationModel, Regressor
from pyro_vsd.nn.lora import bayesianize_lora
from pyro_vsd.nn.networks import alexnet, convnet, lenet5, mlp, preresnet110, resnet18, xavier_uniform_
from pyro_vsd.nn.priors import GaussianPrior, HierarchicalPrior, Prior

__all__ = [
    "BayesianNetwork",
    "BinaryClassifier",
    "Classifier",
    "GaussianPrior",
    "HierarchicalPrior",
    "ObservationModel",
    "Prior",
    "PrunedNetwork",
    "Regressor",
    "alexnet",
    "bayesianize",
    "bayesianize_lora",
    "convnet",
    "lenet5",
    "mean_network",
    "mlp",
    "preresnet110",
    "prune",
    "rank_units",
    "resnet18",
    "xavier_uniform_",
]
