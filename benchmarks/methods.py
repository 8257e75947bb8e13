"""What a training step of every method costs in time and memory, against MAP, beside the paper's Table 2.

    python benchmarks/methods.py            # some minutes
    python benchmarks/methods.py --steps 20

MLP 784-400-400-10 and LeNet-5 on 28 × 28, batch 100, float32, one thread, all methods in turns, medians. Every Adam is
torch's fused one, MAP's too, which makes the ratios larger than against a plain Adam. Memory: what stays between steps
(parameters, buffers, the optimiser's state), and the most a step has allocated on top of it.
"""

import argparse
import os
import statistics
import time
from typing import Any

# Before torch is imported: its profiler else reports each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import pyro
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import pyro_vsd as vsd
from pyro_vsd.baselines import METHODS, Method, make_method

NUM_DATA = 60_000
NETWORKS = {
    "MLP 784-400-400-10": (lambda: vsd.nn.mlp([784, 400, 400, 10]), (100, 784)),
    "LeNet-5": (lambda: vsd.nn.lenet5(), (100, 1, 28, 28)),
}
# The paper's Table 2, times an epoch of MAP: LeNet-5, AlexNet, ResNet-18 (their data and machine, not ours).
TABLE_2 = {
    "bbb_lrt": (1.53, 1.75, 3.28),
    "mnf": (2.86, 3.40, 4.88),
    "vd": (1.18, 1.15, 1.32),
    "vsd, T = 1": (1.25, 1.32, 1.86),
    "vsd": (1.35, 1.49, 2.90),
}
VARIANTS: dict[str, dict[str, Any]] = {"vsd, T = 1": {"num_reflections": 1}}


def make_all(make_net: Any) -> dict[str, Method]:
    """Every method that takes the network."""
    methods = {}
    for name in [*METHODS, *VARIANTS]:
        torch.manual_seed(0)
        try:
            methods[name] = make_method(name.split(",")[0], make_net(), num_data=NUM_DATA, **VARIANTS.get(name, {}))
        except ValueError as error:
            print(f"  {name}: left out, {str(error).split('. ')[0]}.")
    return methods


def median_seconds(methods: dict[str, Method], x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, float]:
    """Median seconds of a step of each, run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(5 + steps):
        for name, method in methods.items():
            start = time.perf_counter()
            method.step(x, y)
            if i >= 5:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def megabytes_kept(method: Method) -> float:
    """Parameters, buffers and the optimiser's state, each memory counted once."""
    tensors = [*method.parameters(), *method.buffers()]
    tensors += [leaf for leaf in tree_leaves(method.optimizer.state_dict()) if isinstance(leaf, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) / 1e6


def megabytes_of_a_step(method: Method, x: torch.Tensor, y: torch.Tensor) -> float:
    """The most that a step has allocated at once, beyond what was there at its start."""
    method.zero_grad()  # gradients count to the step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        method.step(x, y)
    allocated = peak = 0
    results = trace.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        allocated += change
        peak = max(peak, allocated)
    return peak / 1e6


def table(title: str, methods: dict[str, Method], x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    seconds = median_seconds(methods, x, y, steps)
    memory = {name: (megabytes_kept(m), megabytes_of_a_step(m, x, y)) for name, m in methods.items()}
    base = sum(memory["map"])
    print(f"\n{title}, batch {len(x)}, medians of {steps} steps")
    columns = f"{'step, ms':>10s}{'× MAP':>8s}{'kept, MB':>10s}{'step, MB':>10s}{'× MAP':>8s}"
    print(f"{'':22s}{columns}    paper's Table 2: LeNet5, AlexNet, ResNet18")
    for name in sorted(methods, key=seconds.__getitem__):
        kept, step = memory[name]
        paper = "   ".join(f"{value:.2f}" for value in TABLE_2[name]) if name in TABLE_2 else ""
        print(
            f"{name:22s}{1e3 * seconds[name]:10.2f}{seconds[name] / seconds['map']:8.2f}"
            f"{kept:10.1f}{step:10.1f}{(kept + step) / base:8.2f}    {paper}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each method")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    torch.manual_seed(0)
    for title, (make_net, shape) in NETWORKS.items():
        x, y = torch.randn(shape), torch.randint(10, (shape[0],))
        table(title, make_all(make_net), x, y, steps)


if __name__ == "__main__":
    main()
