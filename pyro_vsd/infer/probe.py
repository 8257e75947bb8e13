"""Finding the axis along which noise acts, from the first operation that meets a weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["WeightProbe", "noise_axis"]

_TENSOR: Any = Tensor  # its properties are descriptors, which the stubs hide
_TRANSPOSES = {_TENSOR.mT.__get__, _TENSOR.T.__get__, Tensor.t, torch.t}
_SWAPS = {Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes}
_PASS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.detach, Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.expand,
    Tensor.reshape, Tensor.view, Tensor.squeeze, Tensor.unsqueeze, torch.squeeze, torch.unsqueeze,
    torch.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point,
}  # fmt: skip
_CONVS = {F.conv1d, F.conv2d, F.conv3d}
_TRANSPOSED_CONVS = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv}


class WeightProbe(Tensor):
    """A weight's initial value that notes the first operation it meets, in ``notes`` shared with its views."""

    notes: dict[str, Any]
    transposed: bool

    @staticmethod
    def wrap(value: Tensor, notes: dict[str, Any], transposed: bool = False) -> "WeightProbe":
        probe = value.as_subclass(WeightProbe)
        probe.notes, probe.transposed = notes, transposed
        return probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        getter = getattr(func, "__name__", "") == "__get__"
        swapped = func in _TRANSPOSES or (func in _SWAPS and isinstance(args[0], WeightProbe) and args[0].dim() == 2)
        probe = args[0] if args else None
        if isinstance(out, Tensor) and out.dim() > 0 and (swapped or func in _PASS) and isinstance(probe, WeightProbe):
            return WeightProbe.wrap(out.as_subclass(Tensor), probe.notes, probe.transposed != swapped)
        if not getter and func not in _PASS:
            for position, arg in enumerate([*args, *kwargs.values()]):
                if isinstance(arg, WeightProbe):
                    arg.notes.setdefault("met", (func, position, arg.transposed))
        return out.as_subclass(Tensor) if isinstance(out, WeightProbe) else out


def noise_axis(notes: dict[str, Any], event_dim: int, conv_noise: str) -> int:
    """The negative noise axis for a weight that met ``notes["met"]``: inputs of a product, channels of a convolution.

    Where nothing told (a weight that only meets other operations, as in a recurrent layer), the last axis: the
    inputs in torch's layout.
    """
    func, position, transposed = notes.get("met", (None, 0, False))
    if func in _CONVS or func in _TRANSPOSED_CONVS:
        # (out, in, …), and (in, out, …) where transposed
        first = (conv_noise == "out") == (func in _CONVS)
        return -event_dim if first else 1 - event_dim
    axis = -1
    if (func in _MATMULS and position == 1) or (func is Tensor.__rmatmul__ and position == 0):
        axis = -2
    if func in (torch.addmm, Tensor.addmm) and position == 2:
        axis = -2
    return -3 - axis if transposed and event_dim == 2 else axis
