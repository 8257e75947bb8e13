"""The table of layers: the module class, the torch function, and whether it convolves."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "Layer", "layer_of"]


@dataclass(frozen=True)
class Layer:
    """One kind of product of an activation and a weight; ``convolution`` holds for transposed ones too."""

    module: type[nn.Module]
    function: Callable[..., Tensor]
    transposed: bool = False
    convolution: bool = True


LAYERS: tuple[Layer, ...] = (
    Layer(nn.Linear, F.linear, convolution=False),
    Layer(nn.Conv1d, F.conv1d),
    Layer(nn.Conv2d, F.conv2d),
    Layer(nn.Conv3d, F.conv3d),
    Layer(nn.ConvTranspose1d, F.conv_transpose1d, transposed=True),
    Layer(nn.ConvTranspose2d, F.conv_transpose2d, transposed=True),
    Layer(nn.ConvTranspose3d, F.conv_transpose3d, transposed=True),
)


def layer_of(module: nn.Module) -> Layer | None:
    """The row of a module, subclasses included."""
    return next((layer for layer in LAYERS if isinstance(module, layer.module)), None)
