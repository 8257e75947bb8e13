"""How much a training step of a Bayesian network costs, as a ratio to plain PyTorch on the same network and batch.

One thread; the steps of all contestants alternate, and medians of the processor time are compared, so that other work
on the machine disturbs little and a change of its speed meets all alike. Run it with

    python benchmarks/networks.py [--steps 40] [--only lenet5]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_vsd as vsd

# A network, the shape of its batch, and the ratio that the better of eager and compiled VSD with T = 2 aims at.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "lenet5": (vsd.nn.lenet5, (100, 1, 28, 28), 1.25),
    "resnet18": (vsd.nn.resnet18, (16, 3, 32, 32), 1.10),
}
NUM_DATA = 50_000


def map_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, fused: bool = False) -> Callable[[], None]:
    """A plain training step: cross entropy, torch's Adam."""
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def svi_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, T: int, fused: bool) -> Callable[[], None]:
    """A step of Pyro's SVI with the VSD guide."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=NUM_DATA)
    guide = vsd.VSDGuide(model, num_reflections=T)
    svi = SVI(model, guide, Adam({"lr": 1e-3, "fused": fused}), vsd.VSD_ELBO())

    def step() -> None:
        svi.step(x, y)

    return step


def module_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, T: int) -> Callable[[], None]:
    """The same objective as a module, with one torch optimiser for all parameters."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=NUM_DATA)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def compiled_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, T: int, mode: str) -> Callable[[], None]:
    """The same as one program."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=NUM_DATA)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, num_reflections=T))
    compiled = vsd.compile_step(loss, torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True), mode=mode)

    def step() -> None:
        compiled(x, y)

    step()
    assert compiled.reason is None, compiled.reason
    return step


def medians(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each step, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):  # the first three rounds warm up
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn >= 3:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=sorted(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, pyro {pyro.__version__}, {platform.machine()}, one thread, {args.steps} steps")
    for name, (make, shape, goal) in CASES.items():
        if args.only not in (None, name):
            continue
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        steps = {
            "MAP": map_step(make, x, y),
            "MAP, fused Adam": map_step(make, x, y, fused=True),
            "VSD T=2, SVI.step, fused Adam": svi_step(make, x, y, T=2, fused=True),
            "VSD T=2, SVI.step": svi_step(make, x, y, T=2, fused=False),
            "VSD T=2, module form, fused Adam": module_step(make, x, y, T=2),
            "VSD T=2, captured, fused Adam": compiled_step(make, x, y, T=2, mode="capture"),
            "VSD T=2, compiled, fused Adam": compiled_step(make, x, y, T=2, mode="compile"),
        }
        print(f"\n{name}, batch {shape[0]} (goal for the best: {goal:.2f} of MAP)")
        found = medians(steps, args.steps)
        for contestant, seconds in found.items():
            print(f"  {contestant:34s} {1e3 * seconds:8.2f} ms  {seconds / found['MAP']:5.2f}")


if __name__ == "__main__":
    main()
