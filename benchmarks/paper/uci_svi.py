"""The same networks one by one through the library's front door: ``VSDGuide``, ``SVI``, ``VSD_ELBO``, ``predict``.

Slow, and there to show that the program with the replica axes trains what a user trains: the start's law, the batches,
the rate and the number of steps are the same. ``tests/benchmarks/test_uci_agreement.py`` has the exact equality of
losses and of training paths.
"""

import math
from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import LambdaLR
from torch import Tensor

import pyro_vsd as vsd
from benchmarks.paper.uci_training import batches

__all__ = ["SVINetworks", "regressor", "train_one"]


class SVINetworks:
    """VSD for each training set and setting, each with its own model and guide.

    :param sizes: inputs, hidden units, one output.
    :param options: numbers of each replica, ``{name: (P, C)}``.
    """

    rows_per_pass = 1_000_000

    def __init__(
        self, sizes: tuple[int, int, int], options: Mapping[str, Tensor], generator: torch.Generator, T: int = 2
    ):
        self.sizes, self.options, self.T = sizes, options, T
        self.shape = tuple(options["kl_weight"].shape)
        self.seed = int(torch.randint(2**31, (), generator=generator))
        self.pairs: list[tuple[Any, Any]] = []

    def train(
        self, x: Tensor, y: Tensor, *, steps: int, lr: float, batch: int, order: torch.Generator, noise: torch.Generator
    ) -> list[float]:
        """As :func:`benchmarks.paper.uci_training.train`; returns the mean last loss per row."""
        P, C = self.shape
        orders = list(batches(P, x.shape[1], batch, steps, order))
        last = 0.0
        for p in range(P):
            for c in range(C):
                pyro.set_rng_seed(self.seed + p * C + c)
                pyro.clear_param_store()
                options = {key: float(value[p, c]) for key, value in self.options.items()}
                model, guide = regressor(self.sizes, x.shape[1], self.T, options["init_alpha"])
                scale = "weight" if options["per_weight"] > 0 else "unit"
                elbo = vsd.VSD_ELBO(kl_weight=options["kl_weight"], kl_scale=scale)
                rows = (index[p] for index in orders)
                last += train_one(model, guide, elbo, x[p], y[p], rows, steps, lr) / (P * C * x.shape[1])
                self.pairs.append((model, guide))
        return [last]

    def __call__(self, x: Tensor, generator: torch.Generator, samples: int = 1) -> tuple[Tensor, None]:
        """Means of every draw ``(P, C, samples, n)`` for rows ``x (P, n, D)``."""
        P, C = self.shape
        seeds = torch.randint(2**31, (P * C,), generator=generator).tolist()
        made = []
        for i, (model, guide) in enumerate(self.pairs):
            prediction = vsd.predict(model, guide, x[i // C], num_samples=samples, seed=seeds[i], progress=False)
            made.append(prediction.samples)
        return torch.stack(made).view(P, C, samples, -1), None


def regressor(sizes: tuple[int, int, int], num_data: int, T: int, init_alpha: float = 0.2) -> tuple[Any, Any]:
    """The model and its guide."""
    net = vsd.nn.bayesianize(vsd.nn.mlp(list(sizes)))
    model = vsd.nn.Regressor(net, num_data=num_data, noise="learned")
    return model, vsd.VSDGuide(model, num_reflections=T, init_alpha=init_alpha, scale_vectors=False)


def train_one(model: Any, guide: Any, elbo: Any, x: Tensor, y: Tensor, rows: Any, steps: int, lr: float) -> float:
    """SVI with Adam and a cosine to zero; the last loss."""

    def cosine(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / steps))

    optimizer = LambdaLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "lr_lambda": cosine})
    svi = SVI(model, guide, optimizer, elbo)
    loss = math.nan
    for index in rows:
        loss = svi.step(x[index], y[index])
        optimizer.step()
    return float(loss)
