"""The networks of the paper: shapes, parameter counts of the literature, initialisation."""

import pytest
import torch
from torch import nn

from pyro_vsd.nn import alexnet, convnet, lenet5, mlp, preresnet110, resnet18, xavier_uniform_

CASES = [
    # make, input, outputs, parameters, weights of Linear and convolution layers
    (lambda: mlp([784, 400, 400, 10]), (784,), 10, 478_410, 3),
    (lambda: mlp([13, 50, 1], nn.Tanh), (13,), 1, 751, 2),
    (convnet, (3, 32, 32), 10, 579_402, 4),
    (lambda: convnet(5, 1, 28), (1, 28, 28), 5, 454_277, 4),
    (lenet5, (1, 28, 28), 10, 61_706, 5),
    (lambda: lenet5(10, 3, 32), (3, 32, 32), 10, 62_006, 5),
    (alexnet, (3, 32, 32), 10, 2_472_266, 6),
    (lambda: alexnet(100, 1, 64), (1, 64, 64), 100, 2_556_708, 6),
    (resnet18, (3, 32, 32), 10, 11_173_962, 21),
    (lambda: resnet18(100, 1), (1, 32, 32), 100, 11_218_980, 21),
    (preresnet110, (3, 32, 32), 10, 1_730_522, 112),
    (lambda: preresnet110(100), (3, 32, 32), 100, 1_736_372, 112),
]


@pytest.mark.parametrize(("make", "shape", "outputs", "parameters", "weights"), CASES)
def test_shapes_and_counts(make, shape, outputs, parameters, weights):
    net = make().eval()
    with torch.no_grad():
        assert net(torch.randn(2, *shape)).shape == (2, outputs)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in net.modules()) == weights


@pytest.mark.parametrize("make", [lambda: mlp([20, 50, 10]), convnet, lenet5, alexnet, preresnet110])
def test_xavier_uniform_start(make):
    for module in make().modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            weight = module.weight
            fan = (weight.shape[0] + weight.shape[1]) * weight[0, 0].numel()
            bound = (6 / fan) ** 0.5
            assert weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.25)
            assert module.bias is None or not module.bias.any()


def test_xavier_returns_the_network():
    net = nn.Linear(2, 3)
    assert xavier_uniform_(net) is net


def test_halves_of_resnet_resolution():
    net, sizes = resnet18().eval(), []
    for stage in net.stages:
        stage.register_forward_hook(lambda m, i, out: sizes.append(tuple(out.shape[1:])))
    with torch.no_grad():
        net(torch.randn(1, 3, 32, 32))
    assert sizes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


@pytest.mark.parametrize("sizes", [[], [3], [3, 0, 1], [3, 2.5]])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match=r"\bsizes\b"):
        mlp(sizes)


@pytest.mark.parametrize(("make", "size"), [(convnet, 3), (alexnet, 28), (lenet5, 0)])
def test_images_too_small(make, size):
    with pytest.raises(ValueError, match=r"\bimage_size\b"):
        make(image_size=size)


@pytest.mark.parametrize(("make", "size"), [(convnet, 4), (alexnet, 29), (lenet5, 1)])
def test_smallest_images(make, size):
    net = make(image_size=size)
    assert net(torch.randn(2, net.conv1.in_channels, size, size)).shape == (2, 10)


@pytest.mark.parametrize("make", [convnet, resnet18, preresnet110])
def test_bad_counts(make):
    with pytest.raises(ValueError, match=r"\bnum_classes\b"):
        make(num_classes=0)
