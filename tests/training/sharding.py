"""What two processes do with a sharded loss, and with one that Accelerate prepares; ``test_sharding.py`` compares."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.training import distributed
from tests.training import cases

KINDS = ("mlp", "hierarchical", "convolution", "numbers", "networks")


def build(kind: str, alpha: float = 1e-24) -> tuple[Any, vsd.datasets.Data]:
    """A loss and data. Few sizes are even: parts differ, and one process has no part of a bias."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    data = cases.data()
    if kind == "convolution":
        data = vsd.datasets.Data(torch.randn(cases.N, 1, 3, 3), cases.classes().y)
        layers = nn.Conv2d(1, 3, 2), nn.ReLU(), nn.ConvTranspose2d(3, 5, 2), nn.Flatten(), nn.Linear(45, 2)
        model: Any = vsd.nn.Classifier(vsd.nn.bayesianize(nn.Sequential(*layers)), num_data=cases.N)
    elif kind == "hierarchical":
        model = cases.regressor(prior=vsd.nn.HierarchicalPrior("inverse_gamma", 3.0, 2.0))
    else:
        model = cases.regressor(noise="latent" if kind == "numbers" else "learned")
    options: dict[str, Any] = {"vectors": "low_rank", "rank": 2} if kind == "networks" else {}
    guide = vsd.VSDGuide(model, init_alpha=alpha, init_scale=alpha**0.5, scale_vectors=False, **options)
    return vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(5))(model, guide), data


def sgd(loss: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(loss.guide.parameter_groups(lr=1e-4), momentum=0.9)


def train(loss: Any, optimizer: Any, data: vsd.datasets.Data, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(data.x, data.y).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 100.0)
        optimizer.step()


def values(loss: Any) -> dict[str, Tensor]:
    """All parameters, put together again."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in loss.named_parameters()
    }


def state_of(loss: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, moments = get_state_dict(loss, optimizer)
    return {"loss": parameters, "optimizer": moments, "elbo": loss.elbo}


def task(rank: int) -> dict[str, Any]:
    # Gradients that are zero but for rounding are compared too, so steps are those of SGD.
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    def own(data: vsd.datasets.Data) -> vsd.datasets.Data:
        return vsd.datasets.Data(data.x[rank::2], data.y[rank::2])

    result: dict[str, Any] = {"quiet": {}, "noisy": {}}
    for kind in KINDS:
        loss, data = build(kind)
        fully_shard(loss)
        assert all(hasattr(p, "full_tensor") for p in loss.parameters())
        train(loss, sgd(loss), own(data))
        result["quiet"][kind] = values(loss)

    for name in ("replicated", "sharded", "sharded early"):
        loss, data = build("hierarchical", 0.2)
        wrapped = DistributedDataParallel(loss) if name == "replicated" else fully_shard(
            loss, reshard_after_forward=name == "sharded early"
        )  # fmt: skip
        distributed.seed_everything(5)
        train(wrapped, sgd(loss), own(data))
        result["noisy"][name] = values(loss)

    loss, data = build("hierarchical")
    optimizer = sgd(fully_shard(loss))
    train(loss, optimizer, own(data))
    checkpoint.save(state_of(loss, optimizer), checkpoint_id=os.environ["FOLDER"] + "/sharded")
    loss.unshard()
    result["mean"] = distributed.predict(loss.model, loss.guide, data.x, num_samples=4, seed=1).mean
    loss.reshard()
    result["errors"] = errors(loss, data, rank)
    if importlib.util.find_spec("accelerate"):
        result |= accelerated(rank)
    return result


def errors(loss: Any, data: vsd.datasets.Data, rank: int) -> dict[str, str]:
    from torch.distributed.fsdp import fully_shard

    def message(call: Any, kind: type[Exception] = ValueError) -> str:
        try:
            call()
        except kind as error:
            return str(error)
        return ""

    file = Path(os.environ["FOLDER"]) / f"{rank}.ckpt"
    found = {
        "guide": message(lambda: loss.guide(data.x, data.y)),
        "alpha": message(lambda: loss.guide.alpha("net.0.weight")),
        "predict": message(lambda: vsd.predict(loss.model, loss.guide, data.x)),
        "checkpoint": message(lambda: vsd.save_checkpoint(file, model=loss.model, guide=loss.guide), TypeError),
    }
    other, _ = build("mlp")
    fully_shard(other.guide)
    fully_shard(other)
    found["guide alone"] = message(lambda: other(data.x, data.y))
    return found


def accelerated(rank: int) -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # looked for, but the group exists
    accelerator, result = Accelerator(cpu=True), {}
    for name in (*KINDS, "sharded"):
        loss, data = build("mlp" if name == "sharded" else name)
        if name == "sharded":  # Accelerate offers it on GPUs only; the code behind it runs on a CPU too
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
            )
        loader = DataLoader(TensorDataset(data.x, data.y), batch_size=cases.N // 2)
        wrapped, optimizer, loader = accelerator.prepare(loss, sgd(loss), loader)
        assert isinstance(wrapped, DistributedDataParallel) == (name != "sharded")
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(wrapped(x, y))
                accelerator.clip_grad_norm_(wrapped.parameters(), 100.0)
                optimizer.step()
        result[name] = values(loss)
        if name == KINDS[0]:
            accelerator.save_state(os.environ["FOLDER"] + "/accelerated", safe_serialization=False)
        accelerator.free_memory()
    return {"accelerated": result}
