"""What the two processes of the distributed tests do; a module of its own, since they import it anew."""

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as pyro_dist
import pyro.optim
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
    return model, vsd.VSDGuide(model, init_alpha=alpha, scale_vectors=False)


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


def by_torchrun(rank: int) -> dict[str, Any]:
    """A loop of one's own, then ``fit``."""
    return {"own": training(rank), "fit": fitted(epochs=3, batch_size=4)}


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


class Recorder(vsd.VSD_ELBO):
    """Keeps each loss of its own process; at a step, presses Ctrl-C in it."""

    def __init__(self, press: int = -1, **options: Any):
        super().__init__(**options)
        self.press, self.losses = press, []

    def differentiable_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.step == self.press:
            os.kill(os.getpid(), signal.SIGINT)
        loss = super().differentiable_loss(*args, **kwargs)
        self.losses.append(loss.detach())
        return loss


def fitted(
    alpha: float = 0.2, data: Any = None, make: Any = None, scale: bool = False, **options: Any
) -> dict[str, Any]:
    """One call of ``fit`` and all that came of it. Processes start elsewhere, which ``fit`` brings together."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = (make or cases.regressor)()
    guide = vsd.VSDGuide(model, init_alpha=alpha, scale_vectors=scale)
    elbo = options.pop("elbo", None) or Recorder(kl_weight=vsd.infer.linear_warmup(5))
    torch.manual_seed(7)  # as scripts do, the same in all: without a seed of its own fit gives each its noise
    history = fit(model, guide, cases.data() if data is None else data, elbo=elbo, **{"seed": 0, **options})
    return {
        "values": cases.values(model, guide), "history": list(history), "stopped": history.stopped, "step": elbo.step,
        "best_epoch": history.best_epoch, "losses": torch.stack(elbo.losses) if elbo.losses else None,
    }  # fmt: skip


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Adam would make differences in rounding as large as steps where a gradient is next to nothing."""
    return torch.optim.SGD(groups, lr=1e-4)


def shared_loader() -> DataLoader[Any]:
    pairs = TensorDataset(cases.data().x, cases.data().y)
    return DataLoader(pairs, batch_size=6, sampler=DistributedSampler(pairs))


def fitting(rank: int) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(os.environ["FOLDER"])
    run = {"epochs": 4, "batch_size": 4, "make": cases.batch_norm, "validation": cases.data()}
    result: dict[str, Any] = {
        "quiet": fitted(1e-24, epochs=3, batch_size=6, optimizer=sgd),
        "accumulated": fitted(1e-24, epochs=3, batch_size=3, accumulate=2, optimizer=sgd),
        "loader": fitted(data=shared_loader(), epochs=2, validation=shared_loader()),
        "unseeded": fitted(epochs=1, seed=None),
        "scaled": fitted(data=shared_loader(), epochs=1, scale=True),
        "measured": fitted(1e-24, epochs=1, batch_size=12, optimizer=sgd, validation=cases.data(25)),
        "callback": fitted(epochs=9, callbacks=[lambda history: rank == 1 and len(history) == 2]),
        "early": fitted(epochs=50, validation=(lambda *_: {"nll": float(rank)}), early_stopping=3),
    }
    saves = []
    loop: Any = sys.modules["pyro_vsd.training.fitting"]
    loop.save_checkpoint = lambda *args, **kwargs: (saves.append(1), vsd.save_checkpoint(*args, **kwargs))
    for name, press in (("whole", -1), ("interrupted", 7), ("resumed", -1)):
        elbo = Recorder(press if rank == 1 else -1, kl_weight=vsd.infer.linear_warmup(5))
        path = None if name == "whole" else folder / "run.ckpt"
        result[name] = fitted(elbo=elbo, checkpoint=path, **run)
    result["saves"] = len(saves)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        fitted(epochs=1, progress=True)
    result["shown"] = shown.getvalue()
    spoilt = cases.data()
    spoilt.y[[1]] = float("nan")
    uneven = [(cases.data().x, cases.data().y)] * (2 + rank)
    plain = DataLoader(TensorDataset(cases.data().x, cases.data().y))
    result["errors"] = {
        "spoilt": message(lambda: fitted(data=spoilt, epochs=1, batch_size=12)),
        "uneven": message(lambda: fitted(data=uneven, epochs=1)),
        "plain": message(lambda: fitted(data=plain, epochs=1)),
        "pyro": message(lambda: fitted(epochs=1, optimizer=pyro.optim.Adam({}))),
    }
    return result


def message(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def errors(rank: int) -> dict[str, str]:
    model, guide = build(0.2)
    x = torch.zeros(4, cases.D)
    return {
        "options": message(lambda: distributed.predict(model, guide, x, num_samples=0)),
        "inputs": message(lambda: distributed.predict(model, guide, "x")),
    }


def main(rank: int, task: Any, folder: str) -> None:
    """:param task: a function of the rank, or the name of one here."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _work(task, folder, init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)


def _work(task: Any, folder: str, **meeting: Any) -> None:
    os.environ["FOLDER"] = folder
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **meeting)
    try:
        rank = dist.get_rank()
        found = globals()[task](rank) if isinstance(task, str) else task(rank)
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":  # by torchrun, which says in the environment who is who
    _work("by_torchrun", sys.argv[1])
