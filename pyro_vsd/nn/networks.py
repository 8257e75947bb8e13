"""The networks of the paper's experiments, as plain modules: ``bayesianize`` makes them Bayesian.

All start with Xavier-uniform weights and zero biases, as in the paper. They flatten the last three dimensions, whatever
is in front: vectorised particles pass.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_vsd._utils import check_integer
from pyro_vsd.distributions.layers import MODULES

__all__ = ["alexnet", "convnet", "lenet5", "mlp", "preresnet110", "resnet18", "xavier_uniform_"]


Network = TypeVar("Network", bound=nn.Module)


def xavier_uniform_(net: Network) -> Network:
    """Draws the weights of all Linear and convolution layers Xavier-uniform and sets their biases to zero, in place.

    >>> xavier_uniform_(nn.Linear(2, 3)).bias
    Parameter containing:
    tensor([0., 0., 0.], requires_grad=True)
    """
    layers: list[Any] = [module for module in net.modules() if isinstance(module, MODULES)]
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return net


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them.

    :param sizes: the number of inputs, of units of each hidden layer, and of outputs.
    :param activation: makes the activation.

    >>> mlp([784, 400, 400, 10])[0]
    Linear(in_features=784, out_features=400, bias=True)
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes={sizes!r} is too short: give the number of inputs, of hidden units, and of outputs.")
    _check_sizes(**{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    layers = [layer for inputs, outputs in pairwise(sizes) for layer in (nn.Linear(inputs, outputs), activation())]
    return xavier_uniform_(nn.Sequential(*layers[:-1]))


def convnet(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """The paper's network for CIFAR-10 and SVHN: two convolutions of 32 and 64 kernels, then a hidden layer of 128.

    =========  ============================================  ==============
    layer                                                    32 × 32, RGB
    =========  ============================================  ==============
    ``conv1``  32 kernels 5 × 5, padding 2, ReLU, max pool   ``32 × 16 × 16``
    ``conv2``  64 kernels 5 × 5, padding 2, ReLU, max pool   ``64 × 8 × 8``
    ``fc1``    128, ReLU                                     ``128``
    ``fc2``    ``num_classes``                               ``10``
    =========  ============================================  ==============

    The paper does not state the kernel size. Its experiments put noise on the fully connected layers only:
    ``bayesianize(convnet(), include="fc*")``.
    """
    _check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    side = _side(image_size, image_size // 4, "two 2×2 poolings need at least 4")
    return _sequence(
        conv1=nn.Conv2d(in_channels, 32, 5, padding=2),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=2),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(-3),
        fc1=nn.Linear(64 * side * side, 128),
        fc2=nn.Linear(128, num_classes),
    )


def lenet5(num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling. Images below 32 × 32 are padded to that size, as MNIST is in the original.

    =========  ====================================  ===============
    layer                                            32 × 32
    =========  ====================================  ===============
    ``conv1``  6 kernels 5 × 5, ReLU, max pool       ``6 × 14 × 14``
    ``conv2``  16 kernels 5 × 5, ReLU, max pool      ``16 × 5 × 5``
    ``fc1``    120, ReLU                             ``120``
    ``fc2``    84, ReLU                              ``84``
    ``fc3``    ``num_classes``                       ``10``
    =========  ====================================  ===============
    """
    _check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    padding = max(0, (32 - image_size) // 2)
    side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
    return _sequence(
        conv1=nn.Conv2d(in_channels, 6, 5, padding=padding),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(-3),
        fc1=nn.Linear(16 * side * side, 120),
        fc2=nn.Linear(120, 84),
        fc3=nn.Linear(84, num_classes),
    )


def alexnet(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """AlexNet's convolutions for images of 32 × 32, with one Linear layer on top, as is usual at that size.

    =========  =====================================================  ===============
    layer                                                             32 × 32
    =========  =====================================================  ===============
    ``conv1``  64 kernels 11 × 11, stride 4, padding 5, ReLU, pool    ``64 × 4 × 4``
    ``conv2``  192 kernels 5 × 5, padding 2, ReLU, pool               ``192 × 2 × 2``
    ``conv3``  384 kernels 3 × 3, padding 1, ReLU                     ``384 × 2 × 2``
    ``conv4``  256 kernels 3 × 3, padding 1, ReLU                     ``256 × 2 × 2``
    ``conv5``  256 kernels 3 × 3, padding 1, ReLU, pool               ``256 × 1 × 1``
    ``fc``     ``num_classes``                                        ``10``
    =========  =====================================================  ===============
    """
    _check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    side = _side(image_size, (image_size + 3) // 4 // 8, "a stride of 4 and three 2×2 poolings need at least 29")
    return _sequence(
        conv1=nn.Conv2d(in_channels, 64, 11, stride=4, padding=5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(64, 192, 5, padding=2),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(192, 384, 3, padding=1),
        conv4=nn.Conv2d(384, 256, 3, padding=1),
        conv5=nn.Conv2d(256, 256, 3, padding=1),
        pool3=nn.MaxPool2d(2),
        flatten=nn.Flatten(-3),
        fc=nn.Linear(256 * side * side, num_classes),
    )


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet-18 for images of 32 × 32: a 3 × 3 stem without pooling, as is usual at that size.

    ==============  ===========================================  =================
    part                                                         32 × 32
    ==============  ===========================================  =================
    ``conv1, bn``   64 kernels 3 × 3                             ``64 × 32 × 32``
    ``stages.0``    2 blocks of two convolutions 3 × 3           ``64 × 32 × 32``
    ``stages.1``    2 blocks, the first with stride 2            ``128 × 16 × 16``
    ``stages.2``    2 blocks, the first with stride 2            ``256 × 8 × 8``
    ``stages.3``    2 blocks, the first with stride 2            ``512 × 4 × 4``
    ``fc``          global averages, ``num_classes``             ``10``
    ==============  ===========================================  =================

    Where a block changes the shape, its shortcut is a 1 × 1 convolution with batch norm.
    """
    _check_sizes(num_classes=num_classes, in_channels=in_channels)
    return xavier_uniform_(_ResNet(_Block, [64, 128, 256, 512], 2, num_classes, in_channels))


def preresnet110(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """PreResNet-110 for images of 32 × 32: batch norm and ReLU before each convolution.

    ==============  ============================================  ================
    part                                                          32 × 32
    ==============  ============================================  ================
    ``conv1``       16 kernels 3 × 3                              ``16 × 32 × 32``
    ``stages.0``    18 blocks of two convolutions 3 × 3           ``16 × 32 × 32``
    ``stages.1``    18 blocks, the first with stride 2            ``32 × 16 × 16``
    ``stages.2``    18 blocks, the first with stride 2            ``64 × 8 × 8``
    ``bn, fc``      batch norm, global averages, ``num_classes``  ``10``
    ==============  ============================================  ================

    Where a block changes the shape, its shortcut is a 1 × 1 convolution.
    """
    _check_sizes(num_classes=num_classes, in_channels=in_channels)
    return xavier_uniform_(_ResNet(_PreBlock, [16, 32, 64], 18, num_classes, in_channels))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class _Block(nn.Module):
    """Two convolutions with batch norm after each, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class _PreBlock(nn.Module):
    """Two convolutions with batch norm and ReLU before each, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), _conv(outputs, outputs, 3)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        return self.conv2(F.relu(self.bn2(out))) + self.shortcut(x)


class _ResNet(nn.Module):
    """Stages of blocks, each but the first at half the resolution, then global averages and a Linear layer."""

    def __init__(self, block: type[nn.Module], widths: list[int], num_blocks: int, num_classes: int, in_channels: int):
        super().__init__()
        self.conv1 = _conv(in_channels, widths[0], 3)
        # Blocks that norm their inputs need the extra norm last instead of first.
        self.pre = block is _PreBlock
        self.bn = nn.BatchNorm2d(widths[-1] if self.pre else widths[0])
        self.stages = nn.ModuleList()
        inputs = widths[0]
        for number, width in enumerate(widths):
            first = block(inputs, width, 2 if number else 1)
            self.stages.append(nn.Sequential(first, *(block(width, width, 1) for _ in range(num_blocks - 1))))
            inputs = width
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        if not self.pre:
            out = F.relu(self.bn(out))
        for stage in self.stages:
            out = stage(out)
        if self.pre:
            out = F.relu(self.bn(out))
        logits: Tensor = self.fc(torch.mean(out, (-2, -1)))
        return logits


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        check_integer(name, value, 1)


def _side(image_size: int, side: int, reason: str) -> int:
    """The side of an image after pooling."""
    if side < 1:
        raise ValueError(f"image_size={image_size} is too small: {reason}.")
    return side


def _sequence(**layers: nn.Module) -> nn.Sequential:
    """The layers with ``relu1``, ``relu2``, … after each that has weights, but the last."""
    net, count = OrderedDict[str, nn.Module](), 0
    for name, layer in layers.items():
        net[name] = layer
        if isinstance(layer, MODULES):
            count += 1
            net[f"relu{count}"] = nn.ReLU()
    net.popitem()
    return xavier_uniform_(nn.Sequential(net))
