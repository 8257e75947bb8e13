"""The smaller networks of the paper's experiments, as plain modules: ``bayesianize`` makes them Bayesian.

All start with Xavier-uniform weights and zero biases, as in the paper.
"""

import numbers
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pyro_vsd.distributions.layers import MODULES as LAYERS

__all__ = ["alexnet", "convnet", "lenet5", "mlp", "xavier_uniform_"]


def xavier_uniform_(net: nn.Module) -> nn.Module:
    """Draws the weights of all Linear and convolution layers Xavier-uniform and sets their biases to zero, in place.

    >>> xavier_uniform_(nn.Linear(2, 3)).bias
    Parameter containing:
    tensor([0., 0., 0.], requires_grad=True)
    """
    for module in net.modules():
        if isinstance(module, LAYERS):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them.

    :param sizes: the number of inputs, of units of each hidden layer, and of outputs. Layers ``0, 2, 4, …`` of the
        result are Linear: :math:`\\sum_l (s_{l-1} + 1) s_l` parameters.
    :param activation: makes the activation.

    >>> mlp([784, 400, 400, 10])[0]
    Linear(in_features=784, out_features=400, bias=True)
    """
    if not isinstance(sizes, Sequence) or len(sizes) < 2 or not all(map(_is_size, sizes)):
        raise ValueError(f"sizes: expected two or more positive numbers, inputs to outputs, got {sizes!r}.")
    if not callable(activation) or not isinstance(activation(), nn.Module):
        raise TypeError(f"activation: expected a function that makes a module, such as nn.ReLU, got {activation!r}.")
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), activation()]
    net = nn.Sequential(*layers[:-1])
    xavier_uniform_(net)
    return net


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

    579,402 parameters (the paper does not tell the kernel size). Its experiments put noise on the fully connected
    layers only: ``bayesianize(convnet(), include="fc*")``.

    >>> sum(p.numel() for p in convnet().parameters())
    579402
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    side = _side("image_size", image_size, 2, 2)
    return _sequence(
        conv1=nn.Conv2d(in_channels, 32, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=_Flatten(),
        fc1=nn.Linear(64 * side * side, 128),
        relu3=nn.ReLU(),
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

    61,706 parameters for MNIST, 62,006 for CIFAR-10 (``in_channels=3, image_size=32``).

    >>> sum(p.numel() for p in lenet5().parameters())
    61706
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    padding = max(0, (32 - image_size) // 2)
    side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
    return _sequence(
        conv1=nn.Conv2d(in_channels, 6, 5, padding=padding),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=_Flatten(),
        fc1=nn.Linear(16 * side * side, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, num_classes),
    )


def alexnet(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """AlexNet's convolutions for images of 32 × 32, with one Linear layer on top, as that literature uses it.

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

    2,472,266 parameters for 10 classes.

    >>> sum(p.numel() for p in alexnet().parameters())
    2472266
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    side = _side("image_size", (image_size - 1) // 4 + 1, 2, 3)
    return _sequence(
        conv1=nn.Conv2d(in_channels, 64, 11, stride=4, padding=5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(64, 192, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(192, 384, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 256, 3, padding=1),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(256, 256, 3, padding=1),
        relu5=nn.ReLU(),
        pool3=nn.MaxPool2d(2),
        flatten=_Flatten(),
        fc=nn.Linear(256 * side * side, num_classes),
    )


class _Flatten(nn.Flatten):
    """Flattens channels, height and width, whatever dimensions are in front: vectorised particles pass."""

    def __init__(self) -> None:
        super().__init__(-3, -1)


def _is_size(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_sizes(**sizes: Any) -> None:
    """Raises where one of these is not a positive integer."""
    for name, value in sizes.items():
        if not _is_size(value):
            raise ValueError(f"{name}: expected a positive integer, got {value!r}.")


def _side(name: str, size: int, factor: int, times: int) -> int:
    """The side of an image after pooling."""
    for _ in range(times):
        size //= factor
    if size < 1:
        raise ValueError(f"{name}: expected images that {times} poolings leave something of, got too small ones.")
    return size


def _sequence(**layers: nn.Module) -> nn.Sequential:
    net = nn.Sequential(OrderedDict(layers))
    xavier_uniform_(net)
    return net
