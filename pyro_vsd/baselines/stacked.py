"""Methods of several members, mixed with equal weights or by stacking."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd._utils import check_integer, mix_seed
from pyro_vsd.baselines.protocol import Method
from pyro_vsd.prediction import Prediction, Stacking, stack

__all__ = ["EnsembleMethod"]


class EnsembleMethod(Method):
    """Members that are methods themselves, trained together on the same batches. ``build`` sets ``members``.

    After :meth:`stack` predictions have the weights and factors that it found, until then equal weights.
    """

    members: Any
    stacking: Stacking | None = None

    def loss(self, x: Any, y: Tensor) -> Tensor:
        """The mean of the members' losses."""
        return torch.stack([member.loss(x, y) for member in self.members]).mean()

    def stack(self, x: Any, y: Tensor, num_samples: int = 100, seed: int = 0) -> Stacking:
        """Fits weights, and each member's σ or temperature, on rows that no member was trained on.

        :param num_samples: of each member.
        """
        self.stacking = stack(self._predictions(x, [num_samples] * len(self.members), seed, {}), y)
        return self.stacking

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_size: int | None = None, seed: int | None = None
    ) -> Prediction:
        """The mixture of the members' predictions; its samples are spread over them, at least one of each."""
        check_integer("num_samples", num_samples, 1)
        number = len(self.members)
        counts = [max(1, (num_samples + m) // number) for m in range(number)]
        options = {} if batch_size is None else {"batch_size": batch_size}
        found = self._predictions(x, counts, seed, options)
        return (self.stacking or Stacking.equal(number)).mix(found)

    def _predictions(self, x: Any, counts: list[int], seed: int | None, options: Any) -> list[Prediction]:
        seeds = [None if seed is None else mix_seed(seed, m) for m in range(len(counts))]
        pairs = zip(self.members, counts, seeds, strict=True)
        return [member.predict(x, num_samples=count, seed=own, **options) for member, count, own in pairs]

    def get_extra_state(self) -> dict[str, Any]:
        state = super().get_extra_state()
        return {**state, "stacking": None if self.stacking is None else asdict(self.stacking)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.stacking = None if state["stacking"] is None else Stacking(**state["stacking"])


Init = Callable[[nn.Module], Any]
