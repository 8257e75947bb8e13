"""What a loader returns: inputs and targets that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, eq=False, repr=False)
class Data(Dataset[tuple[Tensor, Tensor]]):
    """Inputs ``x`` and targets ``y`` with the same first dimension; also a PyTorch data set of pairs.

    >>> import torch
    >>> data = Data(torch.arange(10.).reshape(5, 2), torch.arange(5))
    >>> data
    Data(x=(5, 2) float64, y=(5,) int64)
    >>> [y.tolist() for _, y in data.batches(2, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    >>> data[:3]
    Data(x=(3, 2) float64, y=(3,) int64)
    >>> data[0]
    (tensor([0., 1.]), tensor(0))

    :param x: inputs, ``(N, ...)``.
    :param y: targets, ``(N, ...)``.
    :param y_mean: what was subtracted from the targets.
    :param y_std: what they were then divided by: ``y * y_std + y_mean`` are the targets in their own units. In these
        units an RMSE is ``y_std`` times as large and a log-density smaller by ``log(y_std)``.
    """

    x: Tensor
    y: Tensor
    y_mean: float = 0.0
    y_std: float = 1.0

    def __post_init__(self) -> None:
        if self.x.dim() == 0 or self.y.dim() == 0 or len(self.x) != len(self.y):
            raise ValueError(
                f"expected x and y with the same first dimension, got shapes {tuple(self.x.shape)} "
                f"and {tuple(self.y.shape)}. Rows of x belong to rows of y."
            )

    def __len__(self) -> int:
        return len(self.x)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> Data: ...

    def __getitem__(self, index: int | slice | Tensor) -> tuple[Tensor, Tensor] | Data:
        """One pair for a number; a smaller :class:`Data` for a slice, a mask or a tensor of row numbers."""
        if isinstance(index, slice) or (isinstance(index, Tensor) and index.dim() > 0):
            return replace(self, x=self.x[index], y=self.y[index])
        return self.x[index], self.y[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))

    def __repr__(self) -> str:
        x, y = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (self.x, self.y))
        return f"Data(x={x}, y={y})"

    def batches(
        self, size: int, seed: int | None = None, *, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over the data in batches ``(x, y)``, in a new order each time; the last one may be shorter.

        >>> import pyro_vsd as vsd
        >>> train, _ = vsd.datasets.digits()
        >>> sum(len(y) for _, y in train.batches(100)) == len(train)
        True

        :param size: number of rows in a batch.
        :param seed: of the order. Without it the order comes from torch's global generator, which
            ``torch.manual_seed`` sets.
        :param shuffle: whether to shuffle; without, rows come as they are stored.
        :param drop_last: whether to leave out a last batch that is shorter than ``size``.
        """
        if size < 1:
            raise ValueError(f"expected size >= 1, got size={size}")
        if seed is not None and not shuffle:
            raise ValueError(f"expected no seed with shuffle=False, got seed={seed}: rows then come as they are stored")
        return self._batches(size, seed, shuffle, drop_last)

    def _batches(
        self, size: int, seed: int | None, shuffle: bool, drop_last: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        stop = len(self) - size + 1 if drop_last else len(self)
        starts = range(0, stop, size)
        if not shuffle:
            yield from ((self.x[i : i + size], self.y[i : i + size]) for i in starts)
            return
        # On the CPU, so that a seed gives the same order on every device.
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).to(self.x.device)
        for i in starts:
            rows = order[i : i + size]
            yield self.x[rows], self.y[rows]

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Data:
        """The same data on another device or in another floating-point type; integer tensors keep theirs.

        >>> import torch
        >>> Data(torch.zeros(3, 2), torch.arange(3)).to(torch.float32)
        Data(x=(3, 2) float32, y=(3,) int64)
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return replace(self, x=move(self.x), y=move(self.y))


def standardized(
    x: Tensor, y: Tensor, train_rows: Tensor, test_rows: Tensor, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Splits a regression set and gives inputs and targets mean 0 and standard deviation 1 on the training rows.

    :param x: inputs, ``(N, D)``; a column that is constant on the training rows is only centred.
    :param y: targets, ``(N,)``.
    """
    dtype = dtype or torch.get_default_dtype()
    x, y = x.double(), y.double()
    x_mean, x_std = x[train_rows].mean(0), _positive_std(x[train_rows])
    y_mean, y_std = y[train_rows].mean(0), _positive_std(y[train_rows])
    x, y = ((x - x_mean) / x_std).to(dtype), ((y - y_mean) / y_std).to(dtype)
    train, test = (Data(x[rows], y[rows], y_mean.item(), y_std.item()) for rows in (train_rows, test_rows))
    return train, test


def _positive_std(rows: Tensor) -> Tensor:
    std = rows.std(0, correction=0)
    return torch.where(std > 0, std, torch.ones_like(std))
