"""The table of layers: which argument of a torch function is the weight, and which of its axes are inputs and outputs.

The lazy weight, the guide's search for the noise axis, ``bayesianize`` and the baselines all read it. A new layer is
one row here and one handler in ``lazy_weight.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "MODULES", "Layer", "find_layer", "layer_of"]


@dataclass(frozen=True)
class Layer:
    """One kind of product of an activation and a weight.

    :ivar functions: the torch functions that compute it.
    :ivar position: the place of the weight among their arguments.
    :ivar input_axis: the weight's axis of input units, counted from the left of the weight's own shape.
    :ivar output_axis: the same for output units.
    :ivar module: the layer class, where there is one.

    >>> find_layer(torch.nn.functional.linear, 1).noise_dim(2)
    -1
    """

    functions: tuple[Callable[..., Any], ...]
    position: int
    input_axis: int
    output_axis: int
    module: type[nn.Module] | None = None
    convolution: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        return self.functions[0]

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution, whose weight is ``(in, out / groups, …)``."""
        return self.convolution and self.input_axis == 0

    def noise_dim(self, rank: int, conv_noise: str = "out") -> int:
        """The axis of the noise units of a weight of this rank, negative: inputs; for convolutions as asked."""
        on_output = self.convolution and conv_noise == "out"
        return (self.output_axis if on_output else self.input_axis) - rank


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
LINEAR = Layer((F.linear,), 1, input_axis=1, output_axis=0, module=nn.Linear)
WEIGHT_RIGHT = Layer(_MATMULS, 1, input_axis=0, output_axis=1)  # x @ W
WEIGHT_LEFT = Layer(_MATMULS, 0, input_axis=1, output_axis=0)  # W @ x
REVERSED = Layer((Tensor.__rmatmul__,), 0, input_axis=0, output_axis=1)  # W.__rmatmul__(x)
ADDMM = Layer((torch.addmm, Tensor.addmm), 2, input_axis=0, output_axis=1)
CONVOLUTIONS = tuple(
    Layer((function,), 1, input_axis=1, output_axis=0, module=module, convolution=True)
    for function, module in ((F.conv1d, nn.Conv1d), (F.conv2d, nn.Conv2d), (F.conv3d, nn.Conv3d))
)
TRANSPOSED_CONVOLUTIONS = tuple(
    Layer((function,), 1, input_axis=0, output_axis=1, module=module, convolution=True)
    for function, module in (
        (F.conv_transpose1d, nn.ConvTranspose1d),
        (F.conv_transpose2d, nn.ConvTranspose2d),
        (F.conv_transpose3d, nn.ConvTranspose3d),
    )
)

_PRODUCTS = (LINEAR, WEIGHT_RIGHT, WEIGHT_LEFT, REVERSED, ADDMM)
LAYERS: tuple[Layer, ...] = (*_PRODUCTS, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)
#: the layer classes whose weight can have structured noise
MODULES: tuple[type[nn.Module], ...] = tuple(layer.module for layer in LAYERS if layer.module is not None)

_BY_CALL = {(function, layer.position): layer for layer in LAYERS for function in layer.functions}


def find_layer(function: Any, position: int) -> Layer | None:
    """The row of a call in which argument ``position`` is a weight."""
    return _BY_CALL.get((function, position))


def layer_of(module: nn.Module) -> Layer | None:
    """The row of a module, subclasses included.

    >>> layer_of(torch.nn.ConvTranspose2d(1, 1, 3)).transposed
    True
    """
    return next((layer for layer in LAYERS if layer.module is not None and isinstance(module, layer.module)), None)
