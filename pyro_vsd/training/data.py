"""Cuts data into batches, and batches into the arguments of a model."""

import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from pyro_vsd._utils import (
    call_arguments,
    check_integer,
    map_tensors,
    mix_seed,
    num_rows,
    packs_inputs,
    split_rows,
    split_target,
    take_rows,
    tensors_in,
    to_device,
)

__all__ = ["BATCH_SIZE", "Batches", "ShortBatchWatch", "all_rows", "arguments", "inputs_and_target", "num_known"]

# Where neither the caller nor a loader says.
BATCH_SIZE = 100
# A batch is short if it has at most one in so many rows of the largest: its rows weigh that much more.
_SHORT = 4
# Rows that are compared at once.
_BLOCK = 4096


class Weighted(NamedTuple):
    """A batch, and how often each of its rows counts."""

    batch: Any
    weight: Tensor


class Batches:
    """⌈N/B⌉ batches, whose sizes differ by at most one, of N rows: tensors ``(x, y)``, ``(x1, x2, y)`` or a dict of
    them, ``vsd.datasets.Data``, or any map-style ``Dataset``. The batches of an iterable such as a ``DataLoader`` stay
    as they are.

    :param batch_size: largest batch; by default the loader's own, else :data:`BATCH_SIZE`.
    :param name: what errors call the data.
    :param weight: how often each row counts, ``(N,)``.
    :ivar num_rows: all rows, or ``None`` where a loader does not know.
    :ivar assumed: whether neither the caller nor a loader gave the batch size.

    >>> batches = Batches((torch.arange(7.0), torch.arange(7)), batch_size=3)
    >>> [len(x) for ((x, y),) in batches.steps(epoch=0, seed=0)]
    [3, 2, 2]
    """

    def __init__(
        self, data: Any, batch_size: int | None = None, name: str = "data", weight: Tensor | None = None
    ) -> None:
        if batch_size is not None:
            check_integer("batch_size", batch_size, 1)
        if hasattr(data, "batches"):  # vsd.datasets.Data
            data = (data.x, data.y)
        elif type(data) is TensorDataset:
            data = data.tensors
        elif isinstance(data, Mapping):
            data = dict(data)
        is_tensors = isinstance(data, (tuple, dict))
        rows = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, str, Tensor))
        self.dataset = data if rows and not is_tensors else None
        self.data, self.name, self.is_loader = data, name, not is_tensors and self.dataset is None
        self.num_rows: Any = None
        own = None
        if is_tensors:
            self.num_rows = num_rows(data, name)
        elif self.dataset is not None:
            self.num_rows = len(self.dataset)
        elif not hasattr(data, "__iter__") or isinstance(data, (Tensor, Iterator, str, IterableDataset)):
            kinds = "vsd.datasets.Data, tensors (x, y), a map-style Dataset or a DataLoader"
            raise TypeError(f"{name} must be {kinds}, not a {type(data).__name__}.")
        else:
            own = getattr(data, "batch_size", None)
            if isinstance(data, list):
                self.num_rows = sum(num_rows(batch, name) for batch in self._loaded())
            elif hasattr(getattr(data, "dataset", None), "__len__"):
                self.num_rows = len(data.dataset)
        if self.num_rows == 0:
            raise ValueError(f"{name} has no rows.")
        if weight is not None and (self.is_loader or tuple(weight.shape) != (self.num_rows,)):
            rows_of = "a loader's dicts have a key 'sample_weight'" if self.is_loader else f"shape ({self.num_rows},)"
            raise ValueError(f"sample_weight must have one entry for each row of data: {rows_of}.")
        self.weight = weight
        self.batch_size: int = batch_size or own or BATCH_SIZE
        self.assumed = not (batch_size or own)

    def take(self, rows: Any) -> Any:
        """A batch of these rows: a slice, or a tensor of row numbers."""
        if self.dataset is None:
            batch = take_rows(self.data, rows)
        else:
            numbers = range(self.num_rows)[rows] if isinstance(rows, slice) else rows.tolist()
            batch = default_collate([self.dataset[i] for i in numbers])
        return batch if self.weight is None else Weighted(batch, take_rows(self.weight, rows))

    def possible_rows(self) -> set[int]:
        """What the number of rows may be: a loader's sampler may take a part of its data set."""
        if not self.is_loader or self.num_rows is None:
            return {self.num_rows} - {None}
        sampler: Any = getattr(self.data, "sampler", None)
        taken = len(sampler) * getattr(sampler, "num_replicas", 1) if hasattr(sampler, "__len__") else self.num_rows
        return {self.num_rows, taken}

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
        batches = self._loaded()
        return iter(lambda: list(islice(batches, accumulate)), [])

    def num_steps(self, accumulate: int = 1, world: int = 1) -> int | None:
        """Length of :meth:`steps`, where it is known."""
        if not self.is_loader:
            return -(-int(self.num_rows) // (self.batch_size * accumulate * world))
        try:
            return -(-len(self.data) // accumulate)
        except TypeError:
            return None

    def num_batches(self, rows: int | None = None, accumulate: int = 1) -> int:
        """How many batches of a pass in one process have so many rows, or any number, as far as that is known.

        >>> batches = Batches((torch.arange(7.0), torch.arange(7)), batch_size=3)
        >>> batches.num_batches(3), batches.num_batches(2), batches.num_batches()
        (1, 2, 3)
        """
        if rows is None:
            return (self.num_steps(accumulate) or 1) * accumulate
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
            yield [self.take(rows[part]) for part in parts]

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
            source: Iterator[Any] = self._loaded()
        else:
            size = min(self.batch_size, largest or self.batch_size)
            source = (self.take(rows) for rows in self._shuffled(seed, size))
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
            return self._loaded() if self._distributed else islice(self._loaded(), rank, None, world)
        if self.dataset is not None:
            own = torch.arange(rank, self.num_rows, world)
            return (self.take(own[part]) for part in split_rows(len(own), self.batch_size))
        return iter([self.take(slice(rank, None, world))] if rank < self.num_rows else [])

    # ---- loaders

    def _loaded(self) -> Iterator[Any]:
        """A loader's batches, mappings as dicts."""
        return (dict(batch) if isinstance(batch, Mapping) else batch for batch in self.data)

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


class ShortBatchWatch:
    """Warns once of a batch that is much shorter than others of a training run: the likelihood of a batch of B rows is
    scaled by N/B, and the optimiser makes a full step for it."""

    def __init__(self) -> None:
        self.largest, self.warned = 0, False

    def look(self, batch: Any) -> None:
        rows = num_rows(batch, "batch")
        if _SHORT * rows <= self.largest and not self.warned:
            self.warned = True
            warnings.warn(
                f"a batch has {rows} row{'s' * (rows > 1)}, others have {self.largest}: each of its rows weighs "
                f"{self.largest / rows:.3g} times as much, which can ruin training. Make the DataLoader with "
                "drop_last=True, or pass tensors or the Dataset to vsd.fit, which makes batches of near-equal size.",
                stacklevel=3,
            )
        self.largest = max(self.largest, rows)


def arguments(
    batch: Any, device: torch.device | None = None, model: Any = None, target: str | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments of the model, on ``device``: as they are, ``model(*batch)`` or
    ``model(**batch)``; for models of ``vsd.nn`` all inputs as one, ``model(inputs, y)``.

    :param target: the key of the target in a dict; by default ``"labels"`` or ``"y"``.
    """
    plain, weight = _plain(batch)
    plain = to_device(plain, device)
    if not isinstance(plain, (tuple, list, dict)):
        raise TypeError(f"data must give batches (x, y) or dicts of arguments, not a {type(batch).__name__}.")
    if not packs_inputs(model):
        return (tuple(plain), {}) if not isinstance(plain, dict) else ((), plain)
    inputs, y = split_target(plain, target)
    if y is None and isinstance(plain, dict):
        raise ValueError(f"target must be the key of the targets in data, one of {list(plain)}, not {target!r}.")
    args, kwargs = call_arguments(model, inputs)
    return (*args, y), kwargs if weight is None else {"weight": to_device(weight, device)}


def inputs_and_target(
    batch: Any, device: torch.device | None = None, target: str | None = None
) -> tuple[tuple[Any, ...], Any]:
    """What ``vsd.predict`` takes of a batch, and its target, or ``None``."""
    return split_target(to_device(_plain(batch)[0], device), target)


def all_rows(data: Any, name: str) -> Any:
    """All rows of what :class:`Batches` takes, as one batch: ``(x, y)``, ``(x1, x2, y)`` or a dict.

    :raises TypeError: if there are no targets.
    """
    batches = list(Batches(data, name=name).share())
    if not all(split_target(batch)[1] is not None for batch in batches):
        raise TypeError(f"{name} must give inputs and targets, (x, y).")
    for batch in batches:
        num_rows(batch, name)
    parts = zip(*map(tensors_in, batches), strict=True)
    whole = iter([torch.cat(part) if len(part) > 1 and part[0].dim() else part[0] for part in parts])
    rows = map_tensors(lambda _: next(whole), batches[0])
    return tuple(rows) if isinstance(rows, list) else rows


def checksum(rows: Any) -> int:
    """A number that changes with any entry of the tensors: CRC-32 of their bytes."""
    found = 0
    for tensor in tensors_in(rows):
        found = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def num_known(rows: Any, held_out: Any) -> int:
    """How many held-out rows are equal to one of ``rows``: tensors in the same order."""

    def hashes(tree: Any) -> Iterator[int]:
        tensors = [t.detach() for t in tensors_in(tree) if t.dim()]
        for part in split_rows(len(tensors[0]), _BLOCK):
            block = torch.cat([t[part].reshape(len(t[part]), -1).double().cpu() for t in tensors], 1)
            yield from (hash(row.tobytes()) for row in block.numpy())

    known = set(hashes(rows))
    return sum(row in known for row in hashes(held_out))


def _plain(batch: Any) -> tuple[Any, Tensor | None]:
    """A batch of plain containers, and the weights of its rows."""
    if isinstance(batch, Weighted):
        return batch
    return (dict(batch), batch.get("sample_weight")) if isinstance(batch, Mapping) else (batch, None)
