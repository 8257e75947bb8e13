"""Models and small helpers that the tests of ``pyro_vsd.infer`` share."""

from typing import Any

import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import pyro_vsd as vsd

N, D = 12, 3


def data(rows: int = N) -> tuple[Tensor, Tensor]:
    """Inputs ``(rows, 3)`` and targets ``(rows,)``."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, D, generator=generator)
    return x, x.sum(-1) + 0.1 * torch.randn(rows, generator=generator)


def labels(rows: int = N, classes: int = 3) -> Tensor:
    return torch.arange(rows) % classes


def regressor(num_data: int = N, sizes: Any = (D, 5, 1), noise: Any = 0.5, **options: Any) -> vsd.nn.Regressor:
    return vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp(list(sizes)), **options), num_data=num_data, noise=noise)


def classifier(num_data: int = N, sizes: Any = (D, 5, 3), **options: Any) -> vsd.nn.Classifier:
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(list(sizes)), **options), num_data=num_data)


def by_hand(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A function with a weight, a sampled bias and a latent scale."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([D, 1]).to_event(2))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((x @ w).squeeze(-1) + b, sigma), obs=y)


def one_weight(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A linear model with a weight alone."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[-1], 1]).to_event(2))
    with pyro.plate("data", x.shape[-2]):
        return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)


def extra_site(prior: Any) -> Any:
    """The linear model with one more latent site ``s``, which the likelihood does not meet."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        pyro.sample("s", prior)
        return one_weight(x, y)

    return model


class HandWritten(PyroModule):
    """Two layers with weights by ``PyroSample``; biases stay parameters."""

    def __init__(self, prior_scale: float = 1.0, hidden: int = 4):
        super().__init__()
        self.first = PyroModule[nn.Linear](D, hidden)
        self.first.weight = PyroSample(dist.Normal(0.0, prior_scale).expand([hidden, D]).to_event(2))
        self.last = PyroModule[nn.Linear](hidden, 1)
        self.last.weight = PyroSample(dist.Normal(0.0, prior_scale).expand([1, hidden]).to_event(2))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.last(self.first(x).tanh()).squeeze(-1)
        with pyro.plate("data", mean.shape[-1]):
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def hierarchical(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A weight under a scale mixture, written by hand; the name of z is left to be found."""
    z = pyro.sample("z", dist.InverseGamma(2.0, 2.0).expand([D]).to_event(1))
    w = pyro.sample("w", vsd.distributions.ScaleMixtureNormal(z, -2, (D, 1)))
    with pyro.plate("data", x.shape[-2]):
        return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)


def train(model: Any, guide: Any, *args: Any, steps: int = 3, elbo: Any = None, lr: float = 0.01) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), vsd.VSD_ELBO() if elbo is None else elbo)
    return [svi.step(*args) for _ in range(steps)]


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def moved(before: dict[str, Tensor], module: nn.Module) -> set[str]:
    """The names of the parameters that are not what they were."""
    return {name for name, value in module.named_parameters() if not torch.equal(before[name], value)}
