"""Long runs: memory does not grow with the number of steps or of predictions."""

import gc
import logging
import os

import pyro.optim
import pytest
import torch
from pyro.infer import SVI

import pyro_vsd as vsd
from pyro_vsd.training import fit
from tests.training import cases

LOG = logging.getLogger(__name__)  # pytest --log-cli-level=INFO shows the figures
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Megabytes: the allocator's own breathing. One scalar tensor kept for each step would take more.
ALLOWED = 3.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc/self/statm"),
]


def megabytes() -> float:
    """Memory of this process that is in use."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE / 2**20


def growth(call, times: int) -> tuple[float, int]:
    """Megabytes and live tensors that came with the last nine tenths of the calls."""
    for _ in range(times // 10):
        call()
    before, tensors = megabytes(), count_tensors()
    for _ in range(times - times // 10):
        call()
    return megabytes() - before, count_tensors() - tensors


def count_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture(autouse=True)
def _earlier_objects_are_not_counted():
    gc.collect()
    gc.freeze()  # out of ``gc.get_objects``: what other tests left behind may go at any moment
    yield
    gc.unfreeze()


@pytest.fixture
def tiny():
    model = cases.regressor()
    return model, vsd.VSDGuide(model), cases.data()


def test_twenty_thousand_steps(tiny):
    model, guide, data = tiny
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(guide.parameter_groups())

    def step():
        optimizer.zero_grad()
        loss(data.x, data.y).backward()
        optimizer.step()

    grown, tensors = growth(step, 20_000)
    LOG.info("grown by %.2f MB, %d tensors", grown, tensors)
    assert tensors == 0
    assert grown < ALLOWED


def test_five_thousand_steps_of_svi(tiny):
    model, guide, data = tiny
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), vsd.VSD_ELBO())
    grown, tensors = growth(lambda: svi.step(data.x, data.y), 5_000)
    LOG.info("grown by %.2f MB, %d tensors", grown, tensors)
    assert tensors == 0
    assert grown < ALLOWED


def test_ten_thousand_predictions(tiny):
    model, guide, data = tiny
    grown, tensors = growth(lambda: vsd.predict(model, guide, data.x[:4], num_samples=3), 10_000)
    LOG.info("grown by %.2f MB, %d tensors", grown, tensors)
    assert tensors == 0
    assert grown < ALLOWED


def test_a_thousand_epochs_of_fit(tiny):
    model, guide, data = tiny
    sizes = []

    def callback(history):
        if len(history) in (200, 1000):
            sizes.append(megabytes())

    fit(model, guide, data, epochs=1000, batch_size=24, callbacks=[callback], progress=False)
    LOG.info("grown by %.2f MB", sizes[1] - sizes[0])
    assert sizes[1] - sizes[0] < ALLOWED + 1  # the history itself: a record of an epoch takes about a kilobyte
