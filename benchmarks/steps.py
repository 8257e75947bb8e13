"""What a training step and a prediction cost: ratios to plain PyTorch, one thread, medians of interleaved runs.

    python benchmarks/steps.py            # about two minutes
    python benchmarks/steps.py --steps 50

MLP 784-400-400-10, batch 100, float32, free vectors. Every step ends with the loss as a number, as ``SVI.step`` does.
Goals: ``SVI.step`` at T = 2 at most 2.2 × MAP, with the aim of MC dropout's cost; T = 2 at most 1.05 × T = 1;
``predict`` with 100 samples at most 1.5 × 100 forward passes, its working memory flat from 100 to 1000 samples.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd

SIZES = [784, 400, 400, 10]
NUM_DATA = 60_000


def plain_step(x: torch.Tensor, y: torch.Tensor, dropout: bool, fused: bool) -> Callable[[], float]:
    """MAP, or MC dropout with rates .2, .5, .5, in plain PyTorch."""
    net = vsd.nn.mlp(SIZES)
    if dropout:
        layers = list(net.children())
        net = nn.Sequential(nn.Dropout(0.2), *layers[:2], nn.Dropout(0.5), *layers[2:4], nn.Dropout(0.5), layers[4])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step() -> float:
        optimizer.zero_grad()
        loss = NUM_DATA * nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def bayesian_net() -> vsd.nn.Classifier:
    return vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(SIZES)), num_data=NUM_DATA)


def svi_step(x: torch.Tensor, y: torch.Tensor, T: int, fused: bool) -> Callable[[], float]:
    model = bayesian_net()
    guide = vsd.VSDGuide(model, num_reflections=T)
    svi = SVI(model, guide, Adam({"lr": 1e-3, "fused": fused}), vsd.VSD_ELBO())
    return lambda: svi.step(x, y)


def module_step(x: torch.Tensor, y: torch.Tensor, T: int) -> Callable[[], float]:
    """The same objective in a plain PyTorch loop, one optimiser for all parameters."""
    model = bayesian_net()
    loss_fn = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def medians(functions: dict[str, Callable[[], object]], repeats: int, warm_up: int) -> dict[str, float]:
    """Median seconds of each, run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(warm_up + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(title: str, seconds: dict[str, float], base: str) -> None:
    print(f"\n{title}")
    for name, value in seconds.items():
        print(f"  {name:36s} {1e3 * value:9.2f} ms   {value / seconds[base]:5.2f} x")


class PeakMemory:
    """Peak resident memory while open, above that at the start, in MB; sampled every 5 ms."""

    def __enter__(self) -> "PeakMemory":
        self.start, self.peak, self.running = self._resident(), 0.0, True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, self._resident() - self.start)
            time.sleep(0.005)

    @staticmethod
    def _resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each method")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyro.enable_validation(False)
    x, y = torch.randn(100, 784), torch.randint(10, (100,))

    seconds = medians(
        {
            "MAP": plain_step(x, y, dropout=False, fused=False),
            "MAP, fused Adam": plain_step(x, y, dropout=False, fused=True),
            "MC dropout": plain_step(x, y, dropout=True, fused=False),
            "MC dropout, fused Adam": plain_step(x, y, dropout=True, fused=True),
            "VSD T=0, SVI.step, fused Adam": svi_step(x, y, 0, fused=True),
            "VSD T=1, SVI.step, fused Adam": svi_step(x, y, 1, fused=True),
            "VSD T=2, SVI.step, fused Adam": svi_step(x, y, 2, fused=True),
            "VSD T=2, SVI.step": svi_step(x, y, 2, fused=False),
            "VSD T=2, module form, fused Adam": module_step(x, y, 2),
            "VSD T=8, SVI.step, fused Adam": svi_step(x, y, 8, fused=True),
            "VSD T=20, SVI.step, fused Adam": svi_step(x, y, 20, fused=True),
        },
        steps,
        warm_up=20,
    )
    show("A training step, MLP 784-400-400-10, batch 100", seconds, "MAP")
    t2, t1 = seconds["VSD T=2, SVI.step, fused Adam"], seconds["VSD T=1, SVI.step, fused Adam"]
    map_, dropout = seconds["MAP"], seconds["MC dropout"]
    print(f"  T=2 / MAP {t2 / map_:.2f} (goal 2.2), T=2 / MC dropout {t2 / dropout:.2f} (aim 1)")
    print(f"  T=2 / T=1 {t2 / t1:.3f} (goal 1.05)")

    model = bayesian_net()
    guide = vsd.VSDGuide(model)
    net = vsd.nn.mlp(SIZES)
    rows = torch.randn(500, 784)

    def forward_passes() -> None:
        with torch.no_grad():
            for _ in range(100):
                net(rows)

    seconds = medians(
        {
            "100 forward passes": forward_passes,
            "predict, 100 samples": lambda: vsd.predict(model, guide, rows, num_samples=100, progress=False),
        },
        repeats=max(3, steps // 30),
        warm_up=1,
    )
    show("A prediction for 500 rows", seconds, "100 forward passes")
    for num_samples in (100, 1000):
        with PeakMemory() as memory:
            vsd.predict(model, guide, rows, num_samples=num_samples, keep_samples=False, progress=False)
        print(f"  peak working memory, {num_samples} samples: {memory.peak:.0f} MB")


if __name__ == "__main__":
    main()
