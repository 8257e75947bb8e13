"""Plain values: what a checkpoint may hold, so that reading one never needs to run code."""

import numbers
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["to_plain"]


def to_plain(value: Any, name: str) -> Any:
    """``value`` as tensors, numbers, strings, ``None``, and lists, tuples and dicts of these.

    Parameters become tensors, NumPy's numbers Python's, mappings dicts.

    :param name: what to call the value where a part of it cannot be written.

    >>> to_plain({"rate": numpy.float64(0.5), "shape": torch.Size([2])}, "extra")
    {'rate': 0.5, 'shape': (2,)}
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if isinstance(value, (bool, numpy.bool_)):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_plain_key(k, name): to_plain(v, f"{name}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(
        f"{name}: expected tensors, numbers, strings, None, lists, tuples and dicts, got {type(value).__name__}. A "
        "checkpoint holds nothing else, so that reading one cannot run code."
    )


def _plain_tensor(value: Tensor) -> Tensor:
    tensor = value.detach().as_subclass(Tensor)
    # A view would take its whole storage with it.
    viewed = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if viewed else tensor


def _plain_key(key: Any, name: str) -> Any:
    if key is None or isinstance(key, (bool, int, float, str)):
        return to_plain(key, name)
    if isinstance(key, tuple):
        return tuple(_plain_key(k, name) for k in key)
    raise TypeError(f"{name}: expected strings and numbers as keys, got the {type(key).__name__} {key!r}.")
