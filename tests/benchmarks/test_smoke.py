"""The settings for a GPU: a few steps of each on random images."""

import pytest

from benchmarks.paper import runner, store
from benchmarks.paper.registry import SETTINGS
from benchmarks.paper.settings import cifar, deep, mnist

TASKS = [
    pytest.param(setting.task, marks=[pytest.mark.slow] if "resnet" in setting.task else [])
    for settings in (deep, cifar)
    for setting in settings.SETTINGS
]


@pytest.mark.parametrize("task", TASKS)
def test_vsd_takes_a_few_steps(task, tmp_path):
    variant = next(iter(SETTINGS[task].variants))
    (unit,) = runner.selected([task], [variant], [0])
    runner.run_unit(unit, tmp_path / "results", None, tmp_path, smoke=True)
    (result,) = store.load(tmp_path / "results", task)
    assert set(result["ood"]) == set(SETTINGS[task].ood)
    assert 0 <= result["metrics"]["error"] <= 1


@pytest.mark.parametrize(("task", "variant"), [
    *(("alexnet_cifar10", name) for name in list(deep.VARIANTS)[1:]),
    *(("cifar10_convnet", name) for name in list(cifar.VARIANTS)[1:]),
    *(("mnist_400x2", name) for name in mnist.VARIANTS | mnist.SHORT | mnist.FULL),
    *(("mnist_ablation", name) for name in mnist.ABLATIONS),
    ("resnet18_cifar10", "swag"),
])  # fmt: skip
def test_every_variant_takes_a_few_steps(task, variant, tmp_path):
    (unit,) = runner.selected([task], [variant], [0])
    runner.run_unit(unit, tmp_path / "results", None, tmp_path, smoke=True)
    (result,) = store.load(tmp_path / "results", task)
    assert result["method"] == SETTINGS[task].variants[variant].method
    assert 0 <= result["metrics"]["error"] <= 1
