"""Residual networks for images of 32 × 32: a 3 × 3 stem without pooling, as that literature uses them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_vsd.nn.networks import check_sizes, xavier_uniform_

__all__ = ["preresnet110", "resnet18"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Two convolutions with batch norm after each, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class PreBlock(nn.Module):
    """Two convolutions with batch norm and ReLU before each, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), _conv(outputs, outputs, 3)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + self.shortcut(x)


def _stage(block: type[nn.Module], inputs: int, outputs: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = block(inputs, outputs, stride)
    return nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(num_blocks - 1)))


class ResNet(nn.Module):
    """Stages of blocks, each but the first at half the resolution, then global averages and a Linear layer."""

    def __init__(self, block: type[nn.Module], widths: list[int], num_blocks: int, num_classes: int, in_channels: int):
        super().__init__()
        self.conv1 = _conv(in_channels, widths[0], 3)
        # Where the blocks norm their inputs, the norm comes last instead of first.
        self.pre = block is PreBlock
        self.bn = nn.BatchNorm2d(widths[-1] if self.pre else widths[0])
        stages = zip([widths[0], *widths], widths, [1] + [2] * len(widths), strict=False)
        self.stages = nn.ModuleList(_stage(block, a, b, num_blocks, stride) for a, b, stride in stages)
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


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet-18 with a 3 × 3 stem.

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

    Where a block changes the shape, the way around it is a 1 × 1 convolution with batch norm. 11,173,962 parameters
    for 10 classes.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    return xavier_uniform_(ResNet(Block, [64, 128, 256, 512], 2, num_classes, in_channels))


def preresnet110(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """PreResNet-110: batch norm and ReLU before each convolution.

    ==============  ============================================  ================
    part                                                          32 × 32
    ==============  ============================================  ================
    ``conv1``       16 kernels 3 × 3                              ``16 × 32 × 32``
    ``stages.0``    18 blocks of two convolutions 3 × 3           ``16 × 32 × 32``
    ``stages.1``    18 blocks, the first with stride 2            ``32 × 16 × 16``
    ``stages.2``    18 blocks, the first with stride 2            ``64 × 8 × 8``
    ``bn, fc``      batch norm, global averages, ``num_classes``  ``10``
    ==============  ============================================  ================

    Where a block changes the shape, the way around it is a 1 × 1 convolution. 1,730,522 parameters for 10 classes.

    >>> sum(p.numel() for p in preresnet110().parameters())
    1730522
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    return xavier_uniform_(ResNet(PreBlock, [16, 32, 64], 18, num_classes, in_channels))
