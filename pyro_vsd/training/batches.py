"""Batches in an order that a seed decides, so that an epoch can be taken up in its middle."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pyro_vsd.training.group import Group

__all__ = ["Batches", "epoch_seed"]


class Batches:
    """Passes over training data: an object with ``batches(size, seed)`` (``vsd.datasets.Data``), a tuple of tensors
    ``(x, y)``, or an iterable of batches such as a ``DataLoader``.

    In a group of P processes each takes its share of batches of ``P * size`` rows. They are the same in all; where the
    last has too few rows to be shared equally, some count twice.

    >>> batches = Batches((torch.arange(5.0), torch.arange(5)), size=2, seed=0)
    >>> [len(x) for x, y in batches.epoch(0)]
    [2, 2, 1]
    """

    def __init__(self, data: Any, size: int, seed: int, group: Group | None = None):
        self.group = group or Group()
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size: expected an integer >= 1, got {size!r}.")
        self.data, self.size, self.seed = data, size, seed
        self.rows: int | None = None  # None: an iterable, which cuts its batches by itself
        if isinstance(data, tuple):
            self.rows = count_rows(data)
        elif hasattr(data, "batches"):
            self.rows = len(data)
        elif not hasattr(data, "__iter__") or isinstance(data, (Tensor, Iterator)):
            raise TypeError(
                f"data: expected vsd.datasets.Data, a tuple (x, y), or a DataLoader, got a {type(data).__name__}, "
                "which cannot be gone through once for each epoch."
            )
        if self.rows == 0:
            raise ValueError("data: expected at least one row, got none.")
        if self.group.size > 1 and self.rows is None:
            _check_shared(data, self.group.size)

    def __len__(self) -> int:
        """Batches in an epoch; 0 where that is not known."""
        if self.rows is not None:
            return -(-self.rows // (self.size * self.group.size))
        try:
            return len(self.data)
        except TypeError:
            return 0

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of one epoch."""
        if self.rows is None:
            sampler: Any = getattr(self.data, "sampler", None)
            if hasattr(sampler, "set_epoch"):  # a DistributedSampler shuffles by the epoch's number
                sampler.set_epoch(number)
            return iter(self.data)
        return map(self._own, self._cut(epoch_seed(self.seed, number)))

    def _cut(self, seed: int) -> Iterator[Any]:
        """The batches of all processes together."""
        size = self.size * self.group.size
        if not isinstance(self.data, tuple):
            yield from self.data.batches(size, seed=seed)
            return
        assert self.rows is not None
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.rows, size):
            yield take(self.data, order[start : start + size])

    def _own(self, batch: Any) -> Any:
        """This process's rows of a batch."""
        if self.group.size == 1:
            return batch
        rows = count_rows(batch)
        share = -(-rows // self.group.size)
        return take(batch, torch.arange(self.group.rank, share * self.group.size, self.group.size) % rows)

    # A loader's own generators go on from epoch to epoch.

    def _generators(self) -> list[torch.Generator]:
        owners = [self.data, getattr(self.data, "sampler", None)] if self.rows is None else []
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def state(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def set_state(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state.cpu())


def is_shared(data: Any) -> bool:
    """Whether a loader gives each process rows of its own."""
    return isinstance(getattr(data, "sampler", None), DistributedSampler)


def _check_shared(data: Any, size: int) -> None:
    mapped = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    if mapped and not is_shared(data) and isinstance(data.batch_sampler, torch.utils.data.BatchSampler):
        raise ValueError(
            f"data: expected a DataLoader with a DistributedSampler for {size} processes, got one that gives each of "
            "them all rows. Make it with sampler=DistributedSampler(dataset), or pass Data or tensors (x, y)."
        )


def count_rows(data: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
    sizes = {len(leaf) if leaf.dim() else -1 for leaf in leaves}
    if len(sizes) != 1 or sizes == {-1}:
        got = f"shapes {[tuple(leaf.shape) for leaf in leaves]}"
        if not leaves:
            got = f"{[type(leaf).__name__ for leaf in tree_leaves(data)]}. torch.as_tensor makes tensors of arrays"
        raise ValueError(f"data: expected tensors (x, y) with the same number of rows, got {got}.")
    return sizes.pop()


def take(data: Any, rows: Tensor) -> Any:
    return tree_map(lambda leaf: leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, data)


def arguments(batch: Any, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model's arguments, on the device of the parameters."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device != device else leaf

    if device is not None:
        batch = tree_map(move, batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), batch
    raise TypeError(f"data: expected batches (x, y) or dicts of arguments, got a {type(batch).__name__}.")


def epoch_seed(seed: int, number: int) -> int:
    """A seed for one epoch: far apart for neighbours (the golden ratio, as in splitmix)."""
    return (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63
