r"""Several processes: what ``torchrun`` and ``DistributedDataParallel`` leave to do.

The module form of the objective is what torch distributes. Models of ``vsd.nn`` have all parameters from the start;
hand-written ones call ``guide.setup(x, y)`` first::

    torch.distributed.init_process_group()
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(whole_training_set))
    guide = vsd.VSDGuide(model)
    vsd.training.distributed.seed_everything(0)                    # different noise in each process
    loss = DistributedDataParallel(vsd.VSD_ELBO()(model, guide))   # the same start in each process
    optimizer = torch.optim.Adam(guide.parameter_groups())
    loader = DataLoader(data, 100, sampler=DistributedSampler(data))

``fully_shard(loss)`` may stand in place of ``DistributedDataParallel(loss)``, in processes that were seeded alike
before the model was made.

``num_data`` stays the size of the whole training set. A process with B of the rows scales its likelihood by N/B, and
the mean of the gradients over P processes is the gradient for the PB rows together:

.. math:: \frac1P \sum_p \Big( -\frac NB \sum_{n \in p} \log p(y_n \mid x_n, W) + \mathrm{KL} \Big)
          = -\frac{N}{PB} \sum_n \log p(y_n \mid x_n, W) + \mathrm{KL}
"""

import math
import random
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributions import Distribution
from torch.utils._pytree import tree_map

from pyro_vsd import infer
from pyro_vsd._utils import mix_seed, num_rows, take_rows, tensors_in
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["Group", "predict", "seed_everything"]

_T = TypeVar("_T")


def seed_everything(seed: int) -> None:
    """Seeds torch, NumPy and Python from ``seed`` and the rank of the process, so that each draws its own noise.

    >>> seed_everything(0)
    >>> first = torch.rand(1)
    >>> seed_everything(0)
    >>> torch.equal(torch.rand(1), first)
    True
    """
    mixed = mix_seed(seed, Group().rank)
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def predict(model: Any, guide: Any, *inputs: Any, seed: int | None = None, **options: Any) -> Prediction:
    """:func:`pyro_vsd.predict` with the rows split over the processes; each gets the whole prediction.

    All processes must call it, with the same inputs. Under the same seed the result is that of one process, up to
    rounding; with ``coherent=False`` rows have the same distribution but different draws.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> predict(model, vsd.VSDGuide(model), torch.randn(5, 4), num_samples=10).probs.shape
    torch.Size([5, 3])
    """
    group = Group()
    if group.size == 1:
        return infer.predict(model, guide, *inputs, seed=seed, **options)
    rows = num_rows(inputs, "inputs")
    seed = group.same(int(torch.randint(2**62, ()).item()) if seed is None else seed)
    own = slice(rows * group.rank // group.size, rows * (group.rank + 1) // group.size)
    found: Prediction | str | None = None
    if own.stop > own.start:
        own_seed = seed if options.get("coherent", True) else mix_seed(seed, group.rank)
        try:
            found = infer.predict(model, guide, *take_rows(inputs, own), seed=own_seed, **options).to("cpu")
        except (ValueError, TypeError) as error:  # all processes wait for this one: they raise the same
            found = str(error)
    parts = group.gather(found)
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise ValueError(f"process {rank}: {part}")
    device = next(tensor.device for tensor in tensors_in(inputs) if tensor.dim())
    return join([part for part in parts if isinstance(part, Prediction)]).to(device)


def join(parts: list[Prediction]) -> Prediction:
    """One prediction for the rows of several, in their order."""
    first, num_samples = parts[0], parts[0].num_samples

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    def kept(name: str) -> Tensor | None:
        return None if getattr(first, name) is None else torch.cat([getattr(part, name) for part in parts], 1)

    if isinstance(first, ClassificationPrediction):
        return ClassificationPrediction(rows("probs"), rows("expected_entropy"), num_samples, samples=kept("samples"))
    if isinstance(first, RegressionPrediction):
        moments = rows("mean"), rows("aleatoric"), rows("epistemic")
        return RegressionPrediction(*moments, num_samples, samples=kept("samples"), scales=kept("scales"))
    components = None if first.components is None else _Rows([part.components for part in parts])
    return Prediction(rows("mean"), rows("variance"), num_samples, samples=kept("samples"), components=components)


class _Rows(Distribution):
    """The components of several predictions side by side: batch shape ``(S, N)``."""

    arg_constraints: dict[str, Any] = {}

    def __init__(self, parts: list[Any]):
        self.parts = parts
        shape = torch.Size((parts[0].batch_shape[0], sum(part.batch_shape[1] for part in parts)))
        super().__init__(shape, parts[0].event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = value.split([part.batch_shape[1] for part in self.parts])
        return torch.cat([part.log_prob(piece) for part, piece in zip(self.parts, pieces, strict=True)], 1)


class Group:
    """All processes of torch's default process group. Without one it is a group of one that sends nothing.

    Inside of ``with Group() as group`` flags and objects travel by gloo, on the CPU: no device has to be waited for.

    >>> group = Group()
    >>> group.rank, group.size, group.any(True), group.gather("mine")
    (0, 1, True, ['mine'])
    """

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        self.size: int = dist.get_world_size() if active else 1
        self._channel: Any = None

    def __enter__(self) -> "Group":
        if self.size > 1:
            self._channel = dist.new_group(backend="gloo")
        return self

    def __exit__(self, *error: Any) -> None:
        if self._channel is not None and dist.is_initialized():
            dist.destroy_process_group(self._channel)
            self._channel = None

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, in their order, in each of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._channel)
        return values

    def same(self, value: _T) -> _T:
        """The first process's value, in all of them."""
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._channel)
        return bool(found)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes; on a GPU nothing waits for it."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def mean_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """The mean over all processes of each number in a nested dict."""
        if self.size == 1:
            return record
        means: dict[str, Any] = tree_map(lambda *found: math.fsum(found) / self.size, *self.gather(record))
        return means

    def share_buffers(self, module: Any) -> None:
        """Gives all processes the running statistics of the first."""
        if self.size > 1 and isinstance(module, nn.Module):
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def in_step(self, steps: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """The batches of each step; raises in all processes where some have run out of them."""
        done = 0
        while True:
            batches = next(steps, [])
            counts = self.gather(len(batches))
            if len(set(counts)) > 1:
                raise ValueError(f"data must have as many batches in each process; one has only {done + min(counts)}.")
            if not batches:
                return
            done += len(batches)
            yield batches
