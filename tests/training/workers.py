"""What the two processes of ``test_distributed.py`` do; a module of its own, since they import it anew."""

import os
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as pyro_dist
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.training import distributed, fit
from tests.training import cases

WORLD = 2


def counts(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A hand-written model of counts: its prediction is of the generic kind."""
    w = pyro.sample("w", pyro_dist.Normal(0.0, 1.0).expand([cases.D, 1]).to_event(2))
    with pyro.plate("data", cases.N, subsample=torch.arange(len(x))):
        return pyro.sample("y", pyro_dist.Poisson((x @ w).squeeze(-1).exp()), obs=y)


def build(alpha: float) -> tuple[Any, Any]:
    model = cases.regressor()
    return model, vsd.VSDGuide(model, init_alpha=alpha)


def gradients(guide: Any, model: Any) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *guide.named_parameters()]
    return {name: p.grad.clone() for name, p in named}


def expected_gradient(rank: int) -> dict[str, Any]:
    """The gradient for half of the rows, without noise to speak of; and that of many noisy steps, averaged."""
    data = cases.data()
    half = slice(rank * cases.N // WORLD, (rank + 1) * cases.N // WORLD)
    result = {}
    for name, alpha, draws in (("quiet", 1e-24, 1), ("noisy", 0.2, 400)):
        torch.manual_seed(rank)  # other starts: DDP takes those of process 0
        model, guide = build(alpha)
        loss = DistributedDataParallel(vsd.VSD_ELBO()(model, guide))
        distributed.seed_everything(5)
        samples: dict[str, list[Tensor]] = {}
        for _ in range(draws):
            loss.zero_grad()
            loss(data.x[half], data.y[half]).backward()
            for key, value in gradients(guide, model).items():
                samples.setdefault(key, []).append(value)
        result[name] = {key: torch.stack(values) for key, values in samples.items()}
    return result


def training(rank: int) -> dict[str, Tensor]:
    """As a user would, from the first step."""
    torch.manual_seed(rank)
    data = cases.data()
    model, guide = build(0.2)
    distributed.seed_everything(1)
    noise = torch.rand(4)
    loss = DistributedDataParallel(vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(10))(model, guide))
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=0.01))
    pairs = TensorDataset(data.x, data.y)
    loader = DataLoader(pairs, batch_size=6, sampler=DistributedSampler(pairs))
    losses = []
    for epoch in range(30):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(x, y)
            value.backward()
            optimizer.step()
            losses.append(value.detach())
    return {"noise": noise, "losses": torch.stack(losses), **cases.values(model, guide)}


def hand_written(rank: int) -> dict[str, Tensor]:
    data = cases.data()
    guide = vsd.VSDGuide(counts).setup(data.x, data.y.abs().round())
    loss = DistributedDataParallel(vsd.VSD_ELBO()(counts, guide))
    distributed.seed_everything(1)
    loss(data.x[rank::2], data.y[rank::2].abs().round()).backward()
    return {name: p.grad.clone() for name, p in guide.named_parameters()}


def prediction(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    data = cases.data(25)
    result: dict[str, Any] = {}
    regressor, guide = build(0.2)
    for name, options in (("plain", {"seed": 3}), ("unseeded", {}), ("coherent", {"seed": 3, "coherent": True})):
        found = distributed.predict(regressor, guide, data.x, num_samples=200, **options)
        result[name] = {"mean": found.mean, "log_prob": found.log_prob(data.y), "samples": found.samples}
    classifier = cases.classifier()
    found = distributed.predict(classifier, vsd.VSDGuide(classifier), data.x, num_samples=5, keep_samples=False)
    result["classes"] = {"probs": found.probs, "mutual_information": found.mutual_information}
    y = data.y.abs().round()
    guide = vsd.VSDGuide(counts).setup(data.x[:5], y[:5])
    found = distributed.predict(counts, guide, data.x[:5], num_samples=7, seed=1)
    result["counts"] = {"mean": found.mean, "log_prob": found.log_prob(y[:5])}
    result["one"] = {"mean": distributed.predict(regressor, build(0.2)[1], data.x[:1], num_samples=3).mean}
    return result


def errors(rank: int) -> dict[str, str]:
    result = {}
    model, guide = build(0.2)
    x = torch.zeros(4, cases.D)
    calls = {
        "options": lambda: distributed.predict(model, guide, x, num_samples=0),
        "inputs": lambda: distributed.predict(model, guide, "x"),
        "fit": lambda: fit(model, guide, cases.data(), epochs=1),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            result[name] = str(error)
    return result


def main(rank: int, task: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _work(task, folder, init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)


def _work(task: str, folder: str, **meeting: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **meeting)
    try:
        rank = dist.get_rank()
        torch.save(globals()[task](rank), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":  # by torchrun, which says in the environment who is who
    _work("training", sys.argv[1])
