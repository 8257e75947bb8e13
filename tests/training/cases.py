"""Models and helpers that the tests of ``pyro_vsd.training`` share."""

import random
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_vsd as vsd

N, D = 24, 3


def data(rows: int = N) -> vsd.datasets.Data:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, D, generator=generator)
    return vsd.datasets.Data(x, x.sum(-1) + 0.1 * torch.randn(rows, generator=generator))


def classes(rows: int = N) -> vsd.datasets.Data:
    x = data(rows).x
    return vsd.datasets.Data(x, (x.sum(-1) > 0).long())


def regressor(num_data: int = N, noise: Any = "learned", **options: Any) -> vsd.nn.Regressor:
    net = vsd.nn.bayesianize(vsd.nn.mlp([D, 5, 1]), **options)
    return vsd.nn.Regressor(net, num_data=num_data, noise=noise)


def classifier(num_data: int = N) -> vsd.nn.Classifier:
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([D, 5, 2])), num_data=num_data)


def batch_norm(num_data: int = N) -> vsd.nn.Regressor:
    net = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
    return vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=num_data)


def function(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A model that is a function, with a parameter in Pyro's store."""
    sigma = pyro.param("sigma", torch.tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([D, 1]).to_event(2))
    with pyro.plate("data", N, subsample=torch.arange(len(x))):
        return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), sigma), obs=y)


def values(*modules: Any) -> dict[str, Tensor]:
    """All numbers of the modules and of Pyro's store, copied."""
    found = {}
    for i, module in enumerate(modules):
        if isinstance(module, nn.Module):
            found |= {f"{i}.{k}": v.clone() for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return found


def store() -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in pyro.get_param_store().named_parameters()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(v, second[k]) for k, v in first.items())


def draw_all() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), random.random(), random.gauss(0, 1)


class TorchRun:
    """Training by the module form; every piece can be saved."""

    def __init__(self, make_model: Any, make_optimizer: Any, make_scheduler: Any = None, **options: Any):
        self.data = data()
        self.model = function if make_model is function else make_model()
        self.guide = vsd.VSDGuide(self.model, **options).setup(self.data.x, self.data.y)
        self.elbo = vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(7))
        self.loss = self.elbo(self.model, self.guide)
        self.optimizer = make_optimizer(self.guide.parameter_groups(lr=0.01))
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None

    def parts(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("model", "guide", "optimizer", "scheduler", "elbo")
            if getattr(self, name) is not None
        }  # fmt: skip

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in self.data.batches(10):
                self.optimizer.zero_grad()
                self.loss(x, y).backward()
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def values(self) -> dict[str, Tensor]:
        return values(self.model, self.guide)


class PyroRun(TorchRun):
    """Training by ``SVI`` and a Pyro optimiser."""

    def __init__(self, make_model: Any, make_optimizer: Any, **options: Any):
        super().__init__(make_model, lambda groups: None, **options)
        self.optimizer = make_optimizer()
        self.svi = SVI(self.model, self.guide, self.optimizer, self.elbo)

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in self.data.batches(10):
                self.svi.step(x, y)
            if hasattr(self.optimizer, "step"):
                self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        found = super().values()
        sigma = dict(pyro.get_param_store().named_parameters()).get("sigma")
        return found if sigma is None else {**found, "sigma": sigma.detach().clone()}
