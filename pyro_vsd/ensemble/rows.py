"""The rows that members are trained on, and those that they are judged by."""

import math
import numbers
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_vsd._utils import evaluation_mode, num_rows, split_target, take_rows, tensors_in
from pyro_vsd.infer import VSDGuide, predict
from pyro_vsd.prediction import ClassificationPrediction
from pyro_vsd.training.data import all_rows, arguments, inputs_and_target, num_known

__all__ = ["has_labels", "joined", "split"]

# (x, y), (x1, x2, y), or a dict.
Rows = Any


def has_labels(model: Any, rows: Rows) -> bool:
    """Whether the targets are labels of classes: whole numbers may also be counts, or rounded."""
    y = split_target(rows)[1]
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point():
        return False
    device = next((p.device for p in model.parameters()), None)
    args, kwargs = arguments(rows, device, model)
    guide = VSDGuide(model)
    if hasattr(model, "num_data"):
        model.num_data = num_rows(rows)
    with torch.random.fork_rng(devices=[]), evaluation_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the members' guides warn
        guide.setup(*args, **kwargs)
        inputs, _ = inputs_and_target(take_rows(rows, slice(0, 1)), device)
        found = predict(model, guide, *inputs, num_samples=1, seed=0, progress=False)
    return isinstance(found, ClassificationPrediction)


def split(rows: Rows, validation: Any, seed: int, labelled: bool) -> tuple[Rows, Rows | None]:
    """Rows for training and rows held out: a share, rows of their own, or none.

    :param labelled: whether targets are labels of classes.
    """
    if validation is None:
        return rows, None
    labels = split_target(rows)[1].cpu() if labelled else None
    if not isinstance(validation, numbers.Real):
        held_out = _alike(rows, all_rows(validation, "validation"))
        _check_held_out(rows, held_out, labels)
        return rows, held_out
    if not 0 < float(validation) < 1:
        raise ValueError(f"validation must be a share between 0 and 1, data, or None, not {validation!r}.")
    chosen = _chosen(labels, num_rows(rows), float(validation), seed)
    return take_rows(rows, ~chosen), take_rows(rows, chosen)


def joined(rows: Rows, held_out: Rows) -> Rows:
    """All rows of both."""
    return tree_map(lambda t, u: torch.cat([t, u]) if isinstance(t, Tensor) and t.dim() else t, rows, held_out)


def _chosen(labels: Tensor | None, rows: int, share: float, seed: int) -> Tensor:
    """Which rows are held out: that share of each class, at least one row of a class that has two."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
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


def _alike(rows: Rows, held_out: Rows) -> Rows:
    """The held-out rows in the order of ``rows``; raises where their tensors differ."""

    def fits(t: Any, u: Any) -> bool:
        if not isinstance(t, Tensor) or not isinstance(u, Tensor):
            return type(t) is type(u)
        dtypes = {v.dtype for v in (t, u) if v.is_floating_point()}
        return t.shape[1:] == u.shape[1:] and len(dtypes) < 2

    try:
        held_out = tree_map(lambda _, u: u, rows, held_out)
        same = all(tree_leaves(tree_map(fits, rows, held_out)))
    except (ValueError, KeyError):
        same = False
    if not same:
        shapes = " and ".join(str([(tuple(t.shape), t.dtype) for t in tensors_in(tree)]) for tree in (rows, held_out))
        raise ValueError(f"validation must have tensors like those of data; shapes and dtypes are {shapes}.")
    return held_out


def _check_held_out(rows: Rows, held_out: Rows, labels: Tensor | None) -> None:
    """Raises where the held-out rows cannot judge."""
    if labels is not None:
        missing = sorted(set(labels.tolist()) - set(split_target(held_out)[1].tolist()))
        if missing:
            raise ValueError(f"validation has no row with the labels {missing}, which data has. Add some of each.")
    y = split_target(held_out)[1]
    if isinstance(y, Tensor) and not bool(y.isfinite().all()):
        raise ValueError("validation has targets that are not finite. Leave these rows out.")
    twice, number = num_known(rows, held_out), num_rows(held_out)
    if twice > number / 2:  # a few rows may well be equal by chance
        raise ValueError(
            f"validation: {twice} of its {number} rows are equal to rows of data. Hold them out, or give a share."
        )
