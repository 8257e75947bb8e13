"""The splits of a UCI set as one tensor, and the parts of their training rows that are held out for tuning."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.paper.uci_training import generators
from pyro_vsd.datasets import uci

__all__ = ["Splits", "Twins", "held_out", "load_splits"]


class Splits(NamedTuple):
    """All splits of a set, standardised by their own training rows: P splits."""

    x: Tensor  # (P, n, D)
    y: Tensor  # (P, n)
    x_test: Tensor  # (P, m, D)
    y_test: Tensor  # (P, m)
    y_std: Tensor  # (P,)


class Twins(NamedTuple):
    """Training rows cut in two, F times for each split: P = splits × F."""

    x: Tensor  # (P, n, D)
    y: Tensor  # (P, n)
    x_held: Tensor  # (P, m, D)
    y_held: Tensor  # (P, m)


def load_splits(name: str, root: str | Path, num_splits: int) -> Splits:
    """The first ``num_splits`` published splits, in float32."""
    pairs = [uci(name, root, split, dtype=torch.float32) for split in range(num_splits)]
    lengths = {(len(train), len(test)) for train, test in pairs}
    if len(lengths) > 1:
        raise ValueError(f"{name}: expected splits of equal length, (train, test), got {sorted(lengths)}.")
    return Splits(
        torch.stack([train.x for train, _ in pairs]),
        torch.stack([train.y for train, _ in pairs]),
        torch.stack([test.x for _, test in pairs]),
        torch.stack([test.y for _, test in pairs]),
        torch.tensor([train.y_std for train, _ in pairs], dtype=torch.float64),
    )


def held_out(data: Splits, share: float, folds: int, seed: int) -> Twins:
    """Disjoint parts of the training rows, ``folds`` of ``share`` each, held out in turn; test rows are not looked at.

    The rows keep the scale of the whole training part, as the final network's do.
    """
    P, n, _ = data.x.shape
    m = round(share * n)
    if folds * m > n:
        raise ValueError(f"folds: expected at most {n // m} parts of {share:.0%} of the rows, got {folds}.")
    order = torch.rand(P, n, generator=generators(seed, 11)).argsort(-1)
    rows = torch.arange(P)[:, None]
    parts = []
    for fold in range(folds):
        before, out, after = order.split([fold * m, m, n - (fold + 1) * m], 1)
        kept = torch.cat([before, after], 1)
        parts.append((data.x[rows, kept], data.y[rows, kept], data.x[rows, out], data.y[rows, out]))
    # (split, fold) in one axis, folds of a split side by side
    return Twins(*(torch.stack(tensors, 1).flatten(0, 1) for tensors in zip(*parts, strict=True)))
