"""The rows that members are trained on, and those that they are judged by."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_vsd._utils import num_rows, split_target, take_rows, tensors_in

__all__ = ["as_rows", "joined", "split"]

Rows = tuple[Any, ...]


def as_rows(data: Any, name: str) -> Rows:
    """``(x, y)``, all as tensors; inputs of a dict are one ``x``."""
    if hasattr(data, "batches"):  # vsd.datasets.Data
        data = (data.x, data.y)
    elif isinstance(data, Mapping):
        (inputs,), y = split_target(data)
        if y is None:
            raise ValueError(f"{name} must have its targets under 'labels' or 'y'; its keys are {list(data)}.")
        data = (inputs, y)
    if not isinstance(data, tuple) or len(data) < 2:
        kinds = "vsd.datasets.Data, a tuple (x, y) or a dict of tensors"
        raise TypeError(f"{name} must be {kinds}, not a {type(data).__name__}.")
    if not num_rows(data, name):
        raise ValueError(f"{name} has no rows.")
    return data


def split(rows: Rows, validation: Any, seed: int) -> tuple[Rows, Rows | None]:
    """Rows for training and rows held out: a share, rows of their own, or none."""
    if validation is None:
        return rows, None
    if not isinstance(validation, numbers.Real):
        held_out = as_rows(validation, "validation")
        _check_held_out(rows, held_out)
        return rows, held_out
    if not 0 < float(validation) < 1:
        raise ValueError(f"validation must be a share between 0 and 1, data, or None, not {validation!r}.")
    chosen = _chosen(rows[-1], num_rows(rows), float(validation), seed)
    return take_rows(rows, ~chosen), take_rows(rows, chosen)


def joined(rows: Rows, held_out: Rows) -> Rows:
    """All rows of both."""

    def join(one: Any, other: Any) -> Any:
        return torch.cat([one, other]) if isinstance(one, Tensor) and one.dim() else one

    both: Rows = tree_map(join, rows, held_out)
    return both


def _chosen(y: Any, rows: int, share: float, seed: int) -> Tensor:
    """Which rows are held out: that share of each class, at least one row of a class that has two."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    labels = y.cpu() if isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point() else None
    if labels is not None:
        order = order[labels[order].sort(stable=True).indices]
    wanted = math.ceil(share * rows)
    if wanted >= rows:
        raise ValueError(f"validation={share} leaves no row for training: data has {rows}.")
    # evenly along the order
    places = (torch.arange(wanted, dtype=torch.float64) + 0.5) * (rows / wanted)
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[order[places.long()]] = True
    if labels is not None:
        for label in labels.unique():
            own = (labels == label).nonzero().squeeze(-1)
            if len(own) > 1 and not bool(chosen[own].any()):
                chosen[own[0]] = True
            if len(own) > 1 and bool(chosen[own].all()):
                chosen[own[0]] = False
    return chosen


def _check_held_out(rows: Rows, held_out: Rows) -> None:
    """Raises where the held-out rows cannot judge."""
    y, held_y = rows[-1], held_out[-1]
    if isinstance(y, Tensor) and not y.is_floating_point() and y.dim() == 1:
        missing = sorted(set(y.tolist()) - set(held_y.tolist()))
        if missing:
            raise ValueError(f"validation has no row with the labels {missing}, which data has. Add some of each.")
    flat, held = (
        torch.cat([t.reshape(num_rows(part), -1).double().cpu() for t in tensors_in(part) if t.dim()], 1)
        for part in (rows, held_out)
    )
    if flat.shape[1] == held.shape[1]:
        known = {row.numpy().tobytes() for row in flat}
        twice = sum(row.numpy().tobytes() in known for row in held)
        if twice > len(held) / 2:  # a few rows may well be equal by chance
            raise ValueError(f"validation: {twice} of its {len(held)} rows are training rows. Hold them out of data.")
