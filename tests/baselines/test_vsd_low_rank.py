"""The low-rank form: vectors from networks of the rank asked for."""

import torch

import pyro_vsd as vsd
from pyro_vsd.baselines.vsd_low_rank import VSDLowRank


def test_vectors_come_from_networks_of_the_rank():
    method = VSDLowRank(vsd.nn.mlp([40, 30, 2]), num_data=10, rank=3, num_reflections=4)
    assert (method.guide.vector_kind, method.guide.rank) == ("low_rank", 3)
    assert method.guide.noise("net.0.weight").vectors.shape == (4, 40)
    shapes = {tuple(p.shape) for n, p in method.guide.named_parameters() if n.startswith("vectors.net.0.")}
    assert {(3, 40), (40, 3)} <= shapes


def test_folding_keeps_predictions():
    method = VSDLowRank(vsd.nn.mlp([4, 5, 2]), num_data=10)
    x = torch.randn(3, 4)
    before = method.predict(x, num_samples=5, seed=0).samples
    method.guide.fold()
    torch.testing.assert_close(method.predict(x, num_samples=5, seed=0).samples, before)
