"""Cuts data into batches: tuples of tensors, ``vsd.datasets.Data``, or the batches of a ``DataLoader``."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from pyro_vsd._utils import check_integer, mix_seed, num_rows, split_rows, take_rows, to_device

__all__ = ["BATCH_SIZE", "Batches", "arguments"]

# Where neither the caller nor a loader says.
BATCH_SIZE = 100


class Batches:
    """⌈N/B⌉ batches, whose sizes differ by at most one, of N rows: a tuple of tensors ``(x, y)`` or
    ``vsd.datasets.Data``. The batches of an iterable such as a ``DataLoader`` stay as they are.

    :param batch_size: largest batch; by default the loader's own, else :data:`BATCH_SIZE`.
    :param name: what errors call the data.
    :ivar num_rows: all rows, or ``None`` where a loader does not know.
    :ivar assumed: whether neither the caller nor a loader gave the batch size.

    >>> batches = Batches((torch.arange(7.0), torch.arange(7)), batch_size=3)
    >>> [len(x) for ((x, y),) in batches.steps(epoch=0, seed=0)]
    [3, 2, 2]
    """

    def __init__(self, data: Any, batch_size: int | None = None, name: str = "data"):
        if batch_size is not None:
            check_integer("batch_size", batch_size, 1)
        if hasattr(data, "batches"):  # vsd.datasets.Data
            data = (data.x, data.y)
        self.data, self.name, self.is_loader = data, name, not isinstance(data, tuple)
        self.num_rows: Any = None
        own = None
        if not self.is_loader:
            self.num_rows = num_rows(data, name)
        elif not hasattr(data, "__iter__") or isinstance(data, (Tensor, Iterator, dict, str)):
            kind = type(data).__name__
            raise TypeError(f"{name} must be vsd.datasets.Data, a tuple (x, y), or a DataLoader, not a {kind}.")
        else:
            own = getattr(data, "batch_size", None)
            if isinstance(data, list):
                self.num_rows = sum(num_rows(batch, name) for batch in data)
            elif hasattr(getattr(data, "dataset", None), "__len__"):
                self.num_rows = len(data.dataset)
        if self.num_rows == 0:
            raise ValueError(f"{name} has no rows.")
        self.batch_size: int = batch_size or own or BATCH_SIZE
        self.assumed = not (batch_size or own)

    def steps(self, epoch: int, seed: int, accumulate: int = 1, rank: int = 0, world: int = 1) -> Iterator[list[Any]]:
        """One pass: for each step of an optimiser a list of at most ``accumulate`` batches.

        :param seed: decides, with the epoch's number, the order of the rows; not that of a loader.
        :param rank: this process among ``world``. Each gets as many rows of each step; where they do not divide, some
            count twice.
        """
        if not self.is_loader:
            return self._cut(mix_seed(seed, epoch), accumulate, rank, world)
        sampler: Any = getattr(self.data, "sampler", None)
        if hasattr(sampler, "set_epoch"):  # a DistributedSampler shuffles by the epoch's number
            sampler.set_epoch(epoch)
        batches = iter(self.data)
        return iter(lambda: list(islice(batches, accumulate)), [])

    def num_steps(self, accumulate: int = 1, world: int = 1) -> int | None:
        """Length of :meth:`steps`, where it is known."""
        if not self.is_loader:
            return -(-int(self.num_rows) // (self.batch_size * accumulate * world))
        try:
            return -(-len(self.data) // accumulate)
        except TypeError:
            return None

    def num_batches(self, rows: int, accumulate: int = 1) -> int:
        """How many batches of a pass in one process have so many rows, as far as that is known.

        >>> batches = Batches((torch.arange(7.0), torch.arange(7)), batch_size=3)
        >>> batches.num_batches(3), batches.num_batches(2)
        (1, 2)
        """
        if self.is_loader:
            return max((self.num_steps() or 0) - 1, 1) if rows == self.batch_size else 1
        sizes = Counter(part.stop - part.start for part in split_rows(self.num_rows, self.batch_size * accumulate))
        if accumulate > 1:
            parts = [(part, count) for size, count in sizes.items() for part in split_rows(size, self.batch_size)]
            return sum(count for part, count in parts if part.stop - part.start == rows)
        return sizes[rows]

    def _cut(self, seed: int, accumulate: int, rank: int, world: int) -> Iterator[list[Any]]:
        for rows in self._shuffled(seed, self.batch_size * accumulate * world):
            if world > 1:
                share = -(-len(rows) // world)
                rows = rows[torch.arange(rank, share * world, world) % len(rows)]
            parts = split_rows(len(rows), self.batch_size) if accumulate > 1 else [slice(None)]
            yield [take_rows(self.data, rows[part]) for part in parts]

    def _shuffled(self, seed: int, size: int) -> Iterator[Tensor]:
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(seed))
        return (order[part] for part in split_rows(self.num_rows, size))

    def sample(self, seed: int, at_most: int, largest: int | None = None) -> Iterator[Any]:
        """Batches of one pass, of no more than ``largest`` rows, until ``at_most`` rows were seen.

        >>> rows = Batches((torch.arange(5.0), torch.arange(5)), 2)
        >>> [len(x) for x, y in rows.sample(seed=0, at_most=3)]
        [2, 1]
        """
        if self.is_loader:
            source: Iterator[Any] = iter(self.data)
        else:
            size = min(self.batch_size, largest or self.batch_size)
            source = (take_rows(self.data, rows) for rows in self._shuffled(seed, size))
        seen = 0
        for batch in source:
            batch = take_rows(batch, slice(min(largest or at_most, at_most - seen)))
            seen += num_rows(batch, self.name)
            yield batch
            if seen >= at_most:
                return
        if not seen:
            raise ValueError(f"{self.name} has no batch: is the DataLoader empty, or its only batch dropped?")

    def share(self, rank: int = 0, world: int = 1) -> Iterator[Any]:
        """All rows for an evaluation, in their own order, each in one process: tensors as one batch."""
        if self.is_loader:
            return iter(self.data) if self._distributed else islice(self.data, rank, None, world)
        return iter([take_rows(self.data, slice(rank, None, world))] if rank < self.num_rows else [])

    # ---- loaders

    @property
    def _distributed(self) -> bool:
        return isinstance(getattr(self.data, "sampler", None), DistributedSampler)

    def check_shared(self) -> None:
        """Raises where a loader would give all rows to each of several processes."""
        known = isinstance(self.data, DataLoader) and not isinstance(self.data.dataset, IterableDataset)
        if known and not self._distributed and isinstance(self.data.batch_sampler, BatchSampler):
            raise ValueError(f"{self.name} gives each process all rows. Make it with a DistributedSampler.")

    def _generators(self) -> list[torch.Generator]:
        if not self.is_loader:
            return []
        found = [getattr(owner, "generator", None) for owner in (self.data, getattr(self.data, "sampler", None))]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def state(self) -> list[Tensor]:
        """States of the generators that a loader owns, which go on from epoch to epoch."""
        return [generator.get_state() for generator in self._generators()]

    def set_state(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state.cpu())

    @contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Restores the generators that a loader owns afterwards."""
        states = self.state()
        try:
            yield
        finally:
            self.set_state(states)


def arguments(batch: Any, device: torch.device | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments of the model, on ``device``."""
    batch = to_device(batch, device)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), batch
    raise TypeError(f"data must give batches (x, y) or dicts of arguments, not a {type(batch).__name__}.")
