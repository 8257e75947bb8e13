"""``fully_shard`` of the loss in two processes, and the same loss prepared by Accelerate, against one process."""

import importlib.util

import pytest
import torch

import pyro_vsd as vsd
from tests.training import cases, sharding
from tests.training.test_distributed import run, two_processes

public = importlib.util.find_spec("torch.distributed.fsdp._fully_shard")
pytestmark = [
    pytest.mark.slow,
    two_processes,
    pytest.mark.skipif(public is None, reason="fully_shard is public from torch 2.6 on"),
]
accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def pair(folder):
    """What both processes found; started once for all tests."""
    return run(sharding.task, folder)


def alone(kind, steps=3):
    loss, data = sharding.build(kind)
    sharding.train(loss, sharding.sgd(loss), data, steps)
    return sharding.values(loss)


def built_and_erased(kind):
    loss, _ = sharding.build(kind)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.zero_()
    return loss


def assert_close(first, second):
    assert set(first) == set(second)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", sharding.KINDS)
def test_without_noise_it_is_one_process(pair, kind):
    expected = alone(kind)
    for found in pair:
        assert_close(found["quiet"][kind], expected)


@pytest.mark.parametrize("name", ["sharded", "sharded early"])
def test_with_noise_it_is_that_of_replicas(pair, name):
    for found in pair:
        assert_close(found["noisy"][name], found["noisy"]["replicated"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_sharded_checkpoint_continues_in_one_process(pair, folder):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    loss, data = built_and_erased("hierarchical"), cases.data()
    optimizer = sharding.sgd(loss)
    state = sharding.state_of(loss, optimizer)
    checkpoint.load(state, checkpoint_id=folder / "sharded")
    set_state_dict(loss, optimizer, model_state_dict=state["loss"], optim_state_dict=state["optimizer"])
    assert loss.elbo.step == 3
    prediction = vsd.predict(loss.model, loss.guide, data.x, num_samples=4, seed=1)
    torch.testing.assert_close(pair[0]["mean"], prediction.mean)
    sharding.train(loss, optimizer, data, 2)
    assert_close(sharding.values(loss), alone("hierarchical", 5))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("guide", "z_loc.net.0.weight"),
        ("alpha", "log_alpha.net.0.weight"),
        ("predict", "z_loc.net.0.weight"),
        ("checkpoint", "log_sigma"),
        ("guide alone", "guide"),
    ],
)
def test_errors(pair, name, word):
    assert all(word in found["errors"][name] for found in pair)


@accelerate
@pytest.mark.parametrize("name", [*sharding.KINDS, "sharded"])
def test_accelerate_is_one_process(pair, name):
    assert_close(pair[0]["accelerated"][name], alone("mlp" if name == "sharded" else name))


@accelerate
@pytest.mark.usefixtures("pair")
def test_the_files_of_accelerate_load_in_one_process(folder):
    loss = built_and_erased("mlp")
    loss.load_state_dict(torch.load(folder / "accelerated" / "pytorch_model.bin", weights_only=True))
    assert_close(sharding.values(loss), alone("mlp"))
