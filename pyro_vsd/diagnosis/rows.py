"""Rows of data in whatever form they come: tuples of tensors, ``vsd.datasets.Data``, or a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_vsd.training.data import arguments

__all__ = ["Rows", "concatenated", "count_rows", "mapped", "sliced"]

# Where neither the caller nor a loader says: what `vsd.fit` takes.
_BATCH_SIZE = 100


class Rows:
    """Batches of some data, in an order that a seed decides where the data does not decide it.

    :ivar num_rows: rows of the whole, or ``None`` where that is not known.
    :ivar batch_size: of training: as given, else the loader's own, else that of ``vsd.fit``, which is ``assumed``.
    :ivar seen: rows of the longest pass so far.
    :ivar not_finite: where in the batches so far there were NaN or infinite entries, as ``data[0]``.

    >>> rows = Rows("data", (torch.arange(5.0), torch.arange(5)), 2)
    >>> [len(x) for x, y in rows.batches(seed=0, at_most=4)]
    [2, 2]
    """

    def __init__(self, name: str, data: Any, batch_size: int | None):
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size: expected an integer >= 1 or None, got {batch_size!r}.")
        self.name, self.data, self.num_rows = name, data, None
        self.seen, self.not_finite = 0, set[str]()
        self._loader = False
        own = None
        if isinstance(data, tuple):
            self.num_rows = count_rows(data, name)
        elif hasattr(data, "batches"):
            self.num_rows = len(data)
        elif hasattr(data, "__iter__") and not isinstance(data, (Tensor, Iterator, dict, str)):
            self._loader, own = True, getattr(data, "batch_size", None)
            if isinstance(data, list):
                self.num_rows = sum(count_rows(batch, name) for batch in data)
            elif hasattr(getattr(data, "dataset", None), "__len__"):
                self.num_rows = len(data.dataset)
        else:
            raise TypeError(
                f"{name}: expected vsd.datasets.Data, a tuple (x, y), or a DataLoader, got a {type(data).__name__}."
            )
        if self.num_rows == 0:
            raise ValueError(f"{name}: expected at least one row, got none.")
        self.batch_size: int = batch_size or own or _BATCH_SIZE
        self.assumed = not (batch_size or own)

    def batches(self, seed: int, at_most: int, largest: int | None = None) -> Iterator[Any]:
        """One pass of batches until ``at_most`` rows were seen; none longer than ``largest``."""
        size = min(self.batch_size, largest or self.batch_size)
        if self._loader:
            source: Iterator[Any] = iter(self.data)
        elif isinstance(self.data, tuple):
            source = self._cut(size, seed)
        else:
            source = self.data.batches(size, seed=seed)
        seen = 0
        for batch in source:
            batch = sliced(batch, slice(min(largest or at_most, at_most - seen)))
            seen += count_rows(batch)
            self._note(batch, seen)
            yield batch
            if seen >= at_most:
                return
        if not seen:
            hint = "Is the DataLoader empty, or shorter than a batch with drop_last=True?"
            raise ValueError(f"{self.name}: expected at least one batch, got none. {hint}")

    def _note(self, batch: Any, seen: int) -> None:
        self.seen = max(self.seen, seen)
        args, kwargs = arguments(batch, None)
        for key, part in (*enumerate(args), *kwargs.items()):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors(part)):
                self.not_finite.add(f"{self.name}[{key!r}]")

    def _cut(self, size: int, seed: int) -> Iterator[Any]:
        assert self.num_rows is not None
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.num_rows, size):
            index = order[start : start + size]
            yield mapped(lambda t: t[index.to(t.device)] if t.dim() else t, self.data)  # noqa: B023

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Generators that a loader owns are put back afterwards."""
        owners = [self.data, getattr(self.data, "sampler", None)] if self._loader else []
        found = [g for g in (getattr(o, "generator", None) for o in owners) if isinstance(g, torch.Generator)]
        states = [generator.get_state() for generator in found]
        try:
            yield
        finally:
            for generator, state in zip(found, states, strict=True):
                generator.set_state(state)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested tensors, each put through a function."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def count_rows(value: Any, name: str = "data") -> int:
    """Rows of nested tensors, all of which have as many."""
    sizes = {len(tensor) for tensor in tensors(value) if tensor.dim()}
    if len(sizes) != 1:
        shapes = [tuple(tensor.shape) for tensor in tensors(value)]
        got = f"shapes {shapes}" if shapes else "no tensor. torch.as_tensor makes tensors of arrays"
        raise ValueError(f"{name}: expected tensors (x, y) with the same number of rows, got {got}.")
    return sizes.pop()


def concatenated(batches: list[Any]) -> Any:
    """Batches of one structure as one."""
    parts = zip(*(tensors(batch) for batch in batches), strict=True)
    whole = iter([torch.cat(part) if part[0].dim() else part[0] for part in parts])
    return mapped(lambda _: next(whole), batches[0])


def sliced(batch: Any, part: slice) -> Any:
    """These rows of nested tensors; scalars stay."""
    return mapped(lambda tensor: tensor[part] if tensor.dim() else tensor, batch)
