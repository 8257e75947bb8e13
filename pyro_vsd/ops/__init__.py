"""Tensors in, tensors out: Householder algebra and the noise kernels. Nothing of Pyro."""

from pyro_vsd.ops import householder, noise

__all__ = ["householder", "noise"]
