"""The guide, the objective and the predictive distribution."""

from pyro_vsd.infer.elbo import VSD_ELBO
from pyro_vsd.infer.guide import VSDGuide
from pyro_vsd.infer.predictive import predict
from pyro_vsd.infer.schedules import cosine_warmup, cyclical, linear_warmup

__all__ = ["VSDGuide", "VSD_ELBO", "cosine_warmup", "cyclical", "linear_warmup", "predict"]
