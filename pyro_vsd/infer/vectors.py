"""Where reflection vectors come from: free parameters, or the paper's small networks v_t = FC(v_{t−1})."""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd.infer.parameters import as_parameter

__all__ = ["VECTORS", "VectorNetwork", "make_vectors"]

VECTORS = ("free", "fc", "low_rank")


class VectorNetwork(nn.Module):
    r"""T vectors from a learned start: :math:`v_t = f(v_{t-1})`.

    ``f`` is one linear layer (``rank=None``, the paper's fc: ``K² + 2K`` numbers) or
    :math:`f(v) = A\,\mathrm{relu}(B v + b) + a` with ``rank`` hidden units (the paper's low-rank: about ``2 r K``).

    >>> VectorNetwork(3, 5, rank=2, scale=1.0, like=torch.zeros(()))().shape
    torch.Size([3, 5])
    """

    def __init__(self, T: int, K: int, rank: int | None, scale: float, like: Tensor):
        super().__init__()
        self.T = T
        factory: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.start = nn.Parameter(torch.randn(K, **factory) * scale)
        if rank is None:
            self.net: nn.Module = nn.Linear(K, K, **factory)
        else:
            self.net = nn.Sequential(nn.Linear(K, rank, **factory), nn.ReLU(), nn.Linear(rank, K, **factory))
        self._start_alive(scale)

    @torch.no_grad()
    def _start_alive(self, scale: float) -> None:
        """Draws the start until all T vectors differ. Where all hidden units are dead each vector is the last bias: two
        equal reflections cancel, and no gradient parts them again."""
        # A draw of two hidden units fails about every second time at T = 3: a hundred failures mean something else.
        for _ in range(100):
            for layer in self.net.modules():
                if isinstance(layer, nn.Linear):
                    # Xavier layers keep the scale from one vector to the next, biases give directions.
                    nn.init.xavier_normal_(layer.weight)
                    nn.init.normal_(layer.bias, std=scale)
            rows = self()
            if len(torch.unique(rows, dim=0)) == len(rows):
                return

    def forward(self) -> Tensor:
        rows: list[Tensor] = [self.start]
        for _ in range(self.T):
            rows.append(self.net(rows[-1]))
        return torch.stack(rows[1:]) if self.T else self.start.new_zeros(0, self.start.shape[0])


def make_vectors(
    kind: str, batch_shape: tuple[int, ...], T: int, K: int, rank: int | None, scale: float, like: Tensor
) -> nn.Parameter | nn.Module:
    """The module or parameter behind the vectors of one site: ``batch_shape + (T, K)``."""
    if kind == "free" or T == 0:
        return as_parameter(torch.randn(*batch_shape, T, K, dtype=like.dtype, device=like.device) * scale)
    if batch_shape:
        raise ValueError(
            f"vectors={kind!r}: expected a weight outside of plates, got one with plate dimensions {batch_shape}. "
            "Use vectors='free' for such models."
        )
    return VectorNetwork(T, K, rank if kind == "low_rank" else None, scale, like)
