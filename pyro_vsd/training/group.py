"""The processes that train together: who this one is, and what all of them must agree on."""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

__all__ = ["Group"]

_T = TypeVar("_T")


class Group:
    """All processes of torch's default process group; a group of one where there is none, and nothing is sent.

    >>> group = Group()
    >>> group.rank, group.size, group.any(True), group.gather("mine")
    (0, 1, True, ['mine'])
    """

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        self.size: int = dist.get_world_size() if active else 1
        # Flags and objects go by gloo, whose tensors are the CPU's: no device has to be waited for.
        self._talk: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it is so in any of the processes."""
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._talk)
        return bool(found)

    def same(self, value: _T) -> _T:
        """The value that the first process has, in all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._talk)
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, in their order, in each of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._talk)
        return values

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes; on a GPU nothing waits for it."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def wrap(self, loss: nn.Module) -> nn.Module:
        """The module whose gradients are the means over all processes, and whose start is the first one's."""
        return loss if self.size == 1 else nn.parallel.DistributedDataParallel(loss)

    def share_buffers(self, *modules: Any) -> None:
        """Gives all processes the first one's running statistics."""
        for module in modules:
            for buffer in module.buffers() if self.size > 1 and isinstance(module, nn.Module) else ():
                dist.broadcast(buffer, 0)

    def close(self) -> None:
        if self._talk is not None and dist.is_initialized():
            dist.destroy_process_group(self._talk)
            self._talk = None


def mean_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, number by number, of dicts of numbers and of dicts.

    >>> mean_records([{"loss": 1.0, "kl": {"w": 2.0}}, {"loss": 3.0, "kl": {"w": 2.0}}])
    {'loss': 2.0, 'kl': {'w': 2.0}}
    """
    if len(records) == 1:
        return records[0]
    return {
        key: mean_records([r[key] for r in records])
        if isinstance(value, dict)
        else math.fsum(r[key] for r in records) / len(records)
        for key, value in records[0].items()
    }
