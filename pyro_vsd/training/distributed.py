r"""Many processes: what is left to do beside ``torchrun`` and ``DistributedDataParallel``.

The module form of the objective is what torch distributes. Models of ``vsd.nn`` have all parameters from the start;
hand-written ones call ``guide.setup(x, y)`` first::

    torch.distributed.init_process_group()
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(whole_training_set))
    guide = vsd.VSDGuide(model)
    vsd.training.distributed.seed_everything(0)                    # other noise in each process
    loss = DistributedDataParallel(vsd.VSD_ELBO()(model, guide))   # the same start in each process
    optimizer = torch.optim.Adam(guide.parameter_groups())
    loader = DataLoader(data, 100, sampler=DistributedSampler(data))

``num_data`` stays the size of the whole training set. A process with B of the rows scales its likelihood by N/B, and
the mean of the gradients over P processes is the gradient for the PB rows together:

.. math:: \frac1P \sum_p \Big( -\frac NB \sum_{n \in p} \log p(y_n \mid x_n, W) + \mathrm{KL} \Big)
          = -\frac{N}{PB} \sum_n \log p(y_n \mid x_n, W) + \mathrm{KL}
"""

import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from pyro_vsd import infer
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.training.batches import epoch_seed

__all__ = ["predict", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds torch, NumPy and Python from ``seed`` and the number of the process, so that each draws its own noise.

    >>> seed_everything(0)
    >>> first = torch.rand(1)
    >>> seed_everything(0)
    >>> torch.equal(torch.rand(1), first)
    True
    """
    mixed = epoch_seed(seed, _rank())
    torch.manual_seed(mixed)
    numpy.random.seed(mixed % 2**32)
    random.seed(mixed)


def predict(model: Any, guide: Any, *inputs: Any, seed: int | None = None, **options: Any) -> Prediction:
    """:func:`pyro_vsd.predict` with the rows split over the processes; each gets the whole prediction.

    All processes must call it, with the same inputs. Where there is one process it is ``vsd.predict`` itself. Rows have
    the same law as there, but other draws, except with ``coherent=True``: there all rows of a sample share one draw.

    :param inputs: tensors whose first dimension counts the rows, and other arguments.
    :param options: those of ``vsd.predict``.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> predict(model, vsd.VSDGuide(model), torch.randn(5, 4), num_samples=10).probs.shape
    torch.Size([5, 3])
    """
    if _size() == 1:
        return infer.predict(model, guide, *inputs, seed=seed, **options)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        raise ValueError("inputs: expected at least one tensor whose first dimension counts the rows, got none.")
    if seed is None:
        drawn = [int(torch.randint(2**62, ()).item())]
        dist.broadcast_object_list(drawn)
        seed = drawn[0]
    own = len(leaves[0]) * torch.tensor([_rank(), _rank() + 1]) // _size()
    start, stop = own.tolist()
    part: Prediction | None = None
    failed: str | None = None
    if stop > start:
        rows = tree_map(lambda v: v[start:stop] if isinstance(v, Tensor) and v.dim() > 0 else v, inputs)
        own_seed = seed if options.get("coherent") else epoch_seed(seed, _rank())
        try:
            part = infer.predict(model, guide, *rows, seed=own_seed, **options).to("cpu")
        except (ValueError, TypeError) as error:  # the others wait for this process: tell them
            failed = str(error)
    parts: list[Any] = [None] * _size()
    dist.all_gather_object(parts, failed or part)
    for rank, found in enumerate(parts):
        if isinstance(found, str):
            raise ValueError(f"process {rank}: {found}")
    return join([p for p in parts if p is not None]).to(leaves[0].device)


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
        num_rows = sum(part.batch_shape[1] for part in parts)
        shape = torch.Size((parts[0].batch_shape[0], num_rows))
        super().__init__(shape, parts[0].event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = value.split([part.batch_shape[1] for part in self.parts])
        return torch.cat([part.log_prob(piece) for part, piece in zip(self.parts, pieces, strict=True)], 1)


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _active() else 0


def _size() -> int:
    return dist.get_world_size() if _active() else 1
