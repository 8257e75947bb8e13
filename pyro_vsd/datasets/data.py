"""What a loader returns: inputs and targets that fit in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyro_vsd._utils import check_integer, split_rows

__all__ = ["Data", "standardized"]


@dataclass(frozen=True, eq=False, repr=False)
class Data(Dataset[tuple[Tensor, Tensor]]):
    """Inputs ``x`` and targets ``y`` with the same first dimension; also a PyTorch data set of pairs.

    :param x: inputs, ``(N, ...)``.
    :param y: targets, ``(N, ...)``.
    :param y_mean: what was subtracted from the targets.
    :param y_std: what they were then divided by: ``y * y_std + y_mean`` are the targets in their own units. In these
        units an RMSE is ``y_std`` times as large and a log-density smaller by ``log(y_std)``.

    >>> data = Data(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    >>> data
    Data(x=(5, 2) float64, y=(5,) int64)
    >>> data[:3]
    Data(x=(3, 2) float64, y=(3,) int64)
    >>> data[0]
    (tensor([0., 1.]), tensor(0))
    """

    x: Tensor
    y: Tensor
    y_mean: float = 0.0
    y_std: float = 1.0

    def __post_init__(self) -> None:
        if self.x.dim() == 0 or self.y.dim() == 0 or len(self.x) != len(self.y):
            shapes = f"{tuple(self.x.shape)} and {tuple(self.y.shape)}"
            raise ValueError(f"x and y must have the same first dimension; their shapes are {shapes}.")

    def __len__(self) -> int:
        return len(self.x)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> "Data": ...

    def __getitem__(self, index: int | slice | Tensor) -> "tuple[Tensor, Tensor] | Data":
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
        """One pass over the data in batches ``(x, y)``, in a new order each time.

        Their sizes differ by at most one row: a short last batch would give each of its rows far too much weight.

        :param size: the largest number of rows in a batch.
        :param seed: of the order; without it the order comes from torch's global generator.
        :param shuffle: whether to shuffle; without, rows come as they are stored.
        :param drop_last: batches of exactly ``size`` rows; the rows that are left over are dropped.

        >>> data = Data(torch.zeros(7, 2), torch.arange(7))
        >>> [y.tolist() for _, y in data.batches(3, shuffle=False)]
        [[0, 1, 2], [3, 4], [5, 6]]
        """
        check_integer("size", size, 1)
        if seed is not None and not shuffle:
            raise ValueError(f"seed={seed} has no effect with shuffle=False. Leave one of them out.")
        return self._batches(split_rows(len(self) // size * size if drop_last else len(self), size), seed, shuffle)

    def _batches(self, parts: list[slice], seed: int | None, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
        order = None
        if shuffle:  # on the CPU, so that a seed gives the same order on every device
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self), generator=generator).to(self.x.device)
        for part in parts:
            rows = part if order is None else order[part]
            yield self.x[rows], self.y[rows]

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> "Data":
        """The same data on a different device or in a different floating-point type; integer tensors keep theirs.

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
    """Splits regression data and gives inputs and targets mean 0 and standard deviation 1 on the training rows.

    :param x: inputs, ``(N, D)``; a column that is constant on the training rows is only centred.
    :param y: targets, ``(N,)``.
    """
    dtype = dtype or torch.get_default_dtype()

    def scaled(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = values.double()
        mean, std = values[train_rows].mean(0), values[train_rows].std(0, correction=0)
        std = torch.where(std > 0, std, torch.ones_like(std))
        return ((values - mean) / std).to(dtype), mean, std

    x, (y, mean, std) = scaled(x)[0], scaled(y)
    train, test = (Data(x[rows], y[rows], mean.item(), std.item()) for rows in (train_rows, test_rows))
    return train, test
