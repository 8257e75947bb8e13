"""Two processes on the loopback interface against one.

Elsewhere several GPUs, Lightning and ``torch.compile`` find guides whose parameters come too late (pyro#3171,
scvi-tools#1226, #2256). Here the objective is a module with all its parameters from the start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pyro_vsd as vsd
from pyro_vsd.training import distributed
from tests.infer import models
from tests.training import cases, workers

ROOT = Path(__file__).resolve().parents[2]
available = torch.distributed.is_available() and torch.distributed.is_gloo_available()
two_processes = pytest.mark.skipif(not available, reason="torch without gloo")


def run(task, tmp_path):
    torch.multiprocessing.spawn(workers.main, (task, str(tmp_path)), nprocs=workers.WORLD)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(workers.WORLD)]


@pytest.mark.slow
@two_processes
def test_two_processes_give_the_gradient_of_one(tmp_path):
    first, second = run("expected_gradient", tmp_path)
    data = cases.data()
    torch.manual_seed(0)
    model, guide = workers.build(1e-24)
    vsd.VSD_ELBO()(model, guide)(data.x, data.y).backward()
    for name, value in workers.gradients(guide, model).items():
        assert torch.equal(first["quiet"][name], second["quiet"][name])
        torch.testing.assert_close(first["quiet"][name][0], value, rtol=1e-9, atol=1e-9)

    torch.manual_seed(0)
    model, guide = workers.build(0.2)
    loss = vsd.VSD_ELBO()(model, guide)
    samples = {}
    for _ in range(400):
        loss.zero_grad()
        loss(data.x, data.y).backward()
        for name, value in workers.gradients(guide, model).items():
            samples.setdefault(name, []).append(value)
    scores = []
    for name, values in samples.items():
        one, two = torch.stack(values), first["noisy"][name]
        error = ((one.var(0) + two.var(0)) / 400).sqrt()
        scores.append(((one.mean(0) - two.mean(0)) / error).flatten())
    scores = torch.cat(scores)
    scores = scores[scores.isfinite()]
    assert len(scores) > 40
    assert scores.abs().max() < 4.5  # of about fifty normal scores
    assert 0.4 < scores.square().mean() < 2.0


@pytest.mark.slow
@two_processes
def test_noise_is_independent_and_parameters_are_the_same(tmp_path):
    first, second = run("training", tmp_path)
    assert not torch.equal(first.pop("noise"), second.pop("noise"))
    losses = [found.pop("losses") for found in (first, second)]
    assert not torch.equal(*losses)
    assert cases.same(first, second)
    assert losses[0][-10:].mean() < losses[0][:10].mean()


@pytest.mark.slow
@two_processes
def test_a_hand_written_model_after_set_up(tmp_path):
    first, second = run("hand_written", tmp_path)
    assert set(first) == {"theta.w", "log_alpha.w", "vectors.w"}
    assert cases.same(first, second)


@pytest.mark.slow
@two_processes
def test_predictions_are_split_and_gathered(tmp_path):
    first, second = run("prediction", tmp_path)
    for name, found in first.items():
        assert cases.same(found, second[name])
    data = cases.data(25)
    torch.manual_seed(0)
    model, guide = workers.build(0.2)
    one = vsd.predict(model, guide, data.x, num_samples=200, seed=3)
    error = ((one.samples.var(0) + first["plain"]["samples"].var(0)) / 200).sqrt()
    assert ((one.mean - first["plain"]["mean"]) / error).abs().max() < 4.5
    assert first["plain"]["log_prob"].shape == (25,)
    coherent = vsd.predict(model, guide, data.x, num_samples=200, seed=3, coherent=True)
    torch.testing.assert_close(first["coherent"]["samples"], coherent.samples)
    assert first["classes"]["probs"].shape == (25, 2)
    assert first["counts"]["log_prob"].shape == (5,)
    assert first["one"]["mean"].shape == (1,)


@pytest.mark.slow
@two_processes
def test_errors_reach_every_process(tmp_path):
    first, second = run("errors", tmp_path)
    assert first == second
    assert "num_samples" in first["options"]
    assert "inputs" in first["inputs"]


@pytest.mark.slow
@two_processes
def test_torchrun(tmp_path):
    """The command itself, as a user types it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, "-m", "tests.training.workers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    pair = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    first, second = (found["fit"] for found in pair)
    assert first["history"] == second["history"]
    assert cases.same(first["values"], second["values"])
    assert not torch.equal(first["losses"], second["losses"])
    first, second = (found["own"] for found in pair)
    assert not torch.equal(first.pop("losses"), second.pop("losses"))
    assert not torch.equal(first.pop("noise"), second.pop("noise"))
    assert cases.same(first, second)


def test_one_process_is_the_ordinary_prediction():
    model, guide = workers.build(0.2)
    x = cases.data().x
    found = distributed.predict(model, guide, x, num_samples=3, seed=1)
    assert torch.equal(found.mean, vsd.predict(model, guide, x, num_samples=3, seed=1).mean)


def test_components_side_by_side():
    parts = []
    for rows in (2, 3):
        rate = torch.rand(4, rows)
        law = torch.distributions.Poisson(rate)
        parts.append(vsd.Prediction(rate.mean(0), rate.mean(0), 4, samples=rate, components=law))
    joined, y = distributed.join(parts), torch.arange(5.0)
    expected = torch.cat([parts[0].log_prob(y[:2]), parts[1].log_prob(y[2:])])
    torch.testing.assert_close(joined.log_prob(y), expected)


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@two_processes
@pytest.mark.parametrize("noise", [0.5, "learned", "latent"])
def test_distributed_data_parallel_finds_every_parameter_used(group_of_one, noise):
    """It raises in the second step where a parameter got no gradient in the first (pyro#3171)."""
    model, (x, y) = models.regressor(noise=noise), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    wrapped = DistributedDataParallel(loss)
    torch.manual_seed(0)
    wrapped(x, y).backward()
    found = {name: p.grad.clone() for name, p in loss.named_parameters()}
    wrapped.zero_grad()
    wrapped(x, y).backward()
    loss.zero_grad()
    torch.manual_seed(0)
    loss(x, y).backward()
    for name, parameter in loss.named_parameters():
        torch.testing.assert_close(parameter.grad, found[name])


# scvi-tools#1226
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.LBFGS])
def test_any_torch_optimiser(optimizer):
    model, (x, y) = models.regressor(noise="learned"), models.data()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    before = models.snapshot(loss)
    steps = optimizer(loss.parameters(), lr=0.001)

    def closure():
        steps.zero_grad()
        value = loss(x, y)
        value.backward()
        return value

    steps.step(closure)
    assert models.moved(before, loss) == set(before)
