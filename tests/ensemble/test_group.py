"""An ensemble whose members are shared by two processes."""

import contextlib
import io
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pyro_vsd as vsd
from tests.training import workers
from tests.training.test_distributed import run, two_processes

WEIGHTS = [0.1, 1.0, None, None, 3.0]


def data():
    x = torch.linspace(-2, 2, 80, dtype=torch.float64)[:, None]
    return x, x[:, 0].sin()


def make():
    net = vsd.nn.bayesianize(vsd.nn.mlp([1, 8, 1]).double())
    return vsd.nn.Regressor(net, num_data=80, noise="learned")


def trained(weights=WEIGHTS, **options):
    ensemble = vsd.Ensemble(make, members=len(weights), kl_weight=weights)
    return ensemble.fit(data(), **{"validation": 0.7, "epochs": 3, "batch_size": 20, "progress": False, **options})


def found(ensemble):
    prediction = ensemble.predict(data()[0], num_samples=20, seed=0)
    stopped = ensemble.history.stopped
    return {"state": ensemble.state_dict(), "records": list(ensemble.history), "mean": prediction.mean, "stop": stopped}


def same(one, two):
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b) for a, b in pairs)


def work(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.manual_seed(rank)
    result = {"whole": found(trained())}
    path = Path(os.environ["FOLDER"]) / "run.ckpt"
    presses = [0]
    step = vsd.ensemble.training.Run._step

    def pressing(self, *args):
        step(self, *args)
        presses[0] += 1
        if rank == 1 and presses[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)

    vsd.ensemble.training.Run._step = pressing
    result["interrupted"] = found(trained(checkpoint=path))
    vsd.ensemble.training.Run._step = step
    result["resumed"] = found(trained(checkpoint=path))
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        trained(progress=True)
    result["shown"] = shown.getvalue()
    result["few"] = workers.message(lambda: trained([1.0]))
    return result


@pytest.mark.slow
@two_processes
def test_two_processes_share_the_members(tmp_path):
    first, second = run(work, tmp_path)
    for name in ("whole", "interrupted", "resumed"):
        assert same(first[name], second[name])
    whole = first["whole"]
    assert same(first["resumed"], whole)
    assert not same(first["interrupted"], whole)
    assert first["interrupted"]["stop"] == "interrupt"
    assert "fit" in first["shown"]
    assert second["shown"] == ""
    assert "members" in first["few"]

    alone = found(trained())
    for m, (one, two) in enumerate(zip(alone["state"]["members"], whole["state"]["members"], strict=True)):
        close = all(torch.allclose(one["model"][name], two["model"][name]) for name in one["model"])
        assert close == (WEIGHTS[m] is None)  # the same batches, other noise
    losses = [(one["losses"], two["losses"]) for one, two in zip(alone["records"], whole["records"], strict=True)]
    assert all(len(two) == len(WEIGHTS) for _, two in losses)
    for one, two in losses:
        assert [a == pytest.approx(b) for a, b in zip(one, two, strict=True)] == [w is None for w in WEIGHTS]
    assert whole["state"]["stacking"]["weights"].tolist() != [0.2] * 5
