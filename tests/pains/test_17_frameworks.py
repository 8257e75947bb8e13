"""Elsewhere several GPUs, Lightning and ``torch.compile`` meet guides whose parameters come too late (pyro#3171,
scvi-tools#1226, #2256). Here the objective is a module with all its parameters from the start: any torch optimiser
takes them, ``DistributedDataParallel`` wraps it, and the mean network compiles in one graph.

More of it: ``tests/training/test_distributed.py`` (two processes).
"""

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import pyro_vsd as vsd
from tests.infer import models


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("noise", [0.5, "learned", "latent"])
def test_distributed_data_parallel_finds_every_parameter_used(group, noise):
    """It raises in the second step where a parameter got no gradient in the first."""
    model, (x, y) = models.regressor(noise=noise), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    wrapped = DistributedDataParallel(loss)
    torch.manual_seed(0)
    wrapped(x, y).backward()
    found = {name: p.grad.clone() for name, p in loss.named_parameters()}
    wrapped.zero_grad()
    wrapped(x, y).backward()
    loss.zero_grad()
    torch.manual_seed(0)
    loss(x, y).backward()
    for name, parameter in loss.named_parameters():
        torch.testing.assert_close(parameter.grad, found[name])


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.LBFGS])
def test_any_torch_optimiser(optimizer):
    model, (x, y) = models.regressor(noise="learned"), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    before = models.snapshot(loss)
    steps = optimizer(loss.parameters(), lr=0.001)

    def closure():
        steps.zero_grad()
        value = loss(x, y)
        value.backward()
        return value

    steps.step(closure)
    assert models.moved(before, loss) == set(before)


def test_the_mean_network_compiles_without_a_break():
    """The network that is served: one graph, the same numbers."""
    model, (x, _) = models.classifier(), models.data()
    net = vsd.nn.mean_network(model, vsd.VSDGuide(model))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
