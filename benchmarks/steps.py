"""What a training step and a prediction cost: ratios to plain PyTorch, one thread, medians of interleaved runs.

    python benchmarks/steps.py                                  # about three minutes
    python benchmarks/steps.py --steps 50 --only 64-100-100-10  # one network, no predictions

Three MLPs, float32, free vectors. Every step ends with the loss as a number, as ``SVI.step`` does. Operators are those
of torch below autograd that the loss and its gradients call (``TorchDispatchMode``), without the optimiser's.
The first step of a compiled loss is not timed: ``benchmarks/compile.py`` does that. Goals at T = 2, of MAP: compiled at
most 1.2 on 784-400-400-10 and below MC dropout, 1.1 on 64-100-100-10, 1.2 on 8-50-1; eager on 64-100-100-10 at most 3.5
for ``SVI.step`` and 2.5 for the module form. The working memory of ``predict`` stays flat from 100 to 1000 samples;
``benchmarks/predictions.py`` has its time.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_vsd as vsd

SIZES = [784, 400, 400, 10]
# Networks of one output are trained on numbers with learned noise, the others on classes.
NETWORKS = {"-".join(map(str, sizes)): sizes for sizes in (SIZES, [64, 100, 100, 10], [8, 50, 1])}
BATCH = 100
TURN = 4
NUM_DATA = 60_000


def batch(sizes: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, sizes[0])
    return x, torch.randn(BATCH) if sizes[-1] == 1 else torch.randint(sizes[-1], (BATCH,))


def plain_step(sizes: list[int], dropout: bool, fused: bool) -> Callable[[], float]:
    """MAP, or MC dropout with rates .2, .5, .5, in plain PyTorch."""
    net, (x, y) = vsd.nn.mlp(sizes), batch(sizes)
    if dropout:
        layers = list(net.children())
        net = nn.Sequential(nn.Dropout(0.2), *layers[:2], nn.Dropout(0.5), *layers[2:4], nn.Dropout(0.5), layers[4])
    log_sigma = nn.Parameter(torch.tensor(-1.0))
    parameters = [*net.parameters(), log_sigma] if sizes[-1] == 1 else list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=fused)

    def step() -> float:
        optimizer.zero_grad()
        if sizes[-1] == 1:
            variance = (2 * log_sigma).exp().expand(BATCH)
            loss = NUM_DATA * nn.functional.gaussian_nll_loss(net(x).squeeze(-1), y, variance)
        else:
            loss = NUM_DATA * nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def bayesian_net(sizes: list[int]) -> vsd.nn.Classifier | vsd.nn.Regressor:
    net = vsd.nn.bayesianize(vsd.nn.mlp(sizes))
    if sizes[-1] == 1:
        return vsd.nn.Regressor(net, num_data=NUM_DATA, noise="learned")
    return vsd.nn.Classifier(net, num_data=NUM_DATA)


def svi_step(sizes: list[int], T: int, fused: bool) -> Callable[[], float]:
    model, data = bayesian_net(sizes), batch(sizes)
    guide = vsd.VSDGuide(model, num_reflections=T)
    svi = SVI(model, guide, Adam({"lr": 1e-3, "fused": fused}), vsd.VSD_ELBO())
    return lambda: svi.step(*data)


class Operators(TorchDispatchMode):
    """Counts torch's operators, views and copies included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_operators(sizes: list[int], T: int) -> tuple[int, int]:
    """Operators of the loss and of its gradients."""
    model, data = bayesian_net(sizes), batch(sizes)
    loss_fn = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    loss_fn(*data).backward()  # what is done once is done
    with Operators() as forward:
        loss = loss_fn(*data)
    with Operators() as backward:
        loss.backward()
    return forward.count, backward.count


def module_step(sizes: list[int], T: int) -> Callable[[], float]:
    """The same objective in a plain PyTorch loop, one optimiser for all parameters."""
    model, (x, y) = bayesian_net(sizes), batch(sizes)
    loss_fn = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def compiled_step(sizes: list[int], T: int, mode: str = "compile") -> Callable[[], float]:
    model, data = bayesian_net(sizes), batch(sizes)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    step = vsd.compile_step(loss, torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True), mode=mode)
    step(*data)
    assert step.reason is None, step.reason
    return lambda: step(*data).item()


def medians(functions: dict[str, Callable[[], object]], repeats: int, warm_up: int) -> dict[str, float]:
    """Median seconds of processor time of each: other work on the machine disturbs little. They take turns of five
    calls, the first of which is not timed, since the others have filled the cache by then."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range((warm_up + repeats) // TURN):
        for name, function in functions.items():
            for call in range(TURN + 1):
                start = time.process_time()
                function()
                if call and i >= warm_up // TURN:
                    seconds[name].append(time.process_time() - start)
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


def training(sizes: list[int], steps: int) -> None:
    contestants = {
        "MAP": plain_step(sizes, dropout=False, fused=False),
        "MAP, fused Adam": plain_step(sizes, dropout=False, fused=True),
        "VSD T=2, SVI.step, fused Adam": svi_step(sizes, 2, fused=True),
        "VSD T=2, SVI.step": svi_step(sizes, 2, fused=False),
        "VSD T=2, module form, fused Adam": module_step(sizes, 2),
        "VSD T=2, captured, fused Adam": compiled_step(sizes, 2, "capture"),
        "VSD T=2, compiled, fused Adam": compiled_step(sizes, 2),
    }
    if sizes[-1] != 1:
        contestants |= {
            "MC dropout": plain_step(sizes, dropout=True, fused=False),
            "MC dropout, fused Adam": plain_step(sizes, dropout=True, fused=True),
        }
    if sizes == SIZES:
        contestants |= {f"VSD T={T}, SVI.step, fused Adam": svi_step(sizes, T, fused=True) for T in (0, 1, 8, 20)}
        contestants |= {f"VSD T={T}, compiled, fused Adam": compiled_step(sizes, T) for T in (0, 8)}
    seconds = medians(contestants, steps, warm_up=20)
    show(f"A training step, MLP {'-'.join(map(str, sizes))}, batch {BATCH}", seconds, "MAP")
    forward, backward = count_operators(sizes, 2)
    print(f"  VSD T=2: {forward} operators forward, {backward} backward")
    if sizes == SIZES:
        t2, t1 = seconds["VSD T=2, SVI.step, fused Adam"], seconds["VSD T=1, SVI.step, fused Adam"]
        compiled = seconds["VSD T=2, compiled, fused Adam"]
        print(f"  T=2, SVI.step / T=1 {t2 / t1:.3f}, compiled / MC dropout {compiled / seconds['MC dropout']:.2f}")


def predictions(repeats: int) -> None:
    model = bayesian_net(SIZES)
    guide = vsd.VSDGuide(model)
    net = vsd.nn.mlp(SIZES)
    rows = torch.randn(500, SIZES[0])

    def forward_passes() -> None:
        with torch.no_grad():
            for _ in range(100):
                net(rows)

    seconds = medians(
        {
            "100 forward passes": forward_passes,
            "predict, 100 samples": lambda: vsd.predict(model, guide, rows, num_samples=100, progress=False),
        },
        repeats,
        warm_up=1,
    )
    show("A prediction for 500 rows", seconds, "100 forward passes")
    for num_samples in (100, 1000):
        with PeakMemory() as memory:
            vsd.predict(model, guide, rows, num_samples=num_samples, keep_samples=False, progress=False)
        print(f"  peak working memory, {num_samples} samples: {memory.peak:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each method")
    parser.add_argument("--only", choices=list(NETWORKS), help="training steps of this network alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyro.enable_validation(False)
    for name, sizes in NETWORKS.items():
        if args.only in (None, name):
            # small steps are noisy: more of them
            training(sizes, args.steps * (1 if sizes == SIZES else 5))
    if args.only is None:
        predictions(max(3, args.steps // 30))


if __name__ == "__main__":
    main()
