"""Where ``torch.compile`` helps: ratios to eager execution, one thread, medians of interleaved runs.

    python benchmarks/compile.py               # several minutes, most of them torch's compiler
    python benchmarks/compile.py --steps 20

Compiled are the noise kernel, the network (``model.net.compile()``), and the whole objective (``loss.compile()``), each
inside a training step of the module form with a fused Adam, batch 100, float32, Pyro's validation off; beside them the
same network without noise, compiled and not. Also told: how often the compiler had to leave its graph, and what the
first two calls took.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

import pyro_vsd as vsd
from pyro_vsd.ops.noise import noise_terms, structured_noise

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-400-400-10": (lambda: vsd.nn.mlp([784, 400, 400, 10]), (784,)),
    "LeNet-5": (vsd.nn.lenet5, (1, 28, 28)),
}
NUM_DATA = 60_000


def plain_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, compiled: bool) -> Callable[[], float]:
    net = make()
    if compiled:
        net.compile()
    return stepper(net.parameters(), lambda: NUM_DATA * nn.functional.cross_entropy(net(x), y))


def vsd_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, part: str) -> Callable[[], float]:
    """:param part: what is compiled: ``""``, ``"net"`` or ``"loss"``."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=NUM_DATA)
    loss = vsd.VSD_ELBO(max_plate_nesting=1)(model, vsd.VSDGuide(model))
    if part == "net":
        model.net.compile()
    if part == "loss":
        loss.compile()
    return stepper(loss.parameters(), lambda: loss(x, y))


def stepper(parameters: Any, objective: Callable[[], Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def kernel(function: Callable[..., Tensor], K: int) -> Callable[[], None]:
    log_alpha, vectors = torch.randn(K, requires_grad=True), torch.randn(2, K, requires_grad=True)
    eps = torch.randn(100, K)

    def call() -> None:
        terms = noise_terms(log_alpha, vectors)
        function(eps, terms.std, terms.N, terms.S).square().sum().backward()

    return call


def formula(eps: Tensor, std: Tensor, N: Tensor, S: Tensor) -> Tensor:
    """The noise as its definition reads, for the compiler to make the best of."""
    eta = eps * std
    return 1 + eta - ((eta @ N.mT) @ S.mT) @ N


def graph_breaks(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, int]:
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=NUM_DATA)
    guide = vsd.VSDGuide(model)
    torch._dynamo.reset()
    with poutine.replay(trace=poutine.trace(guide).get_trace(x, y)):
        net = torch._dynamo.explain(model.net)(x).graph_break_count
    torch._dynamo.reset()
    loss = torch._dynamo.explain(vsd.VSD_ELBO(max_plate_nesting=1)(model, guide))(x, y).graph_break_count
    torch._dynamo.reset()
    return {"net": net, "loss": loss}


def measure(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds of the first two calls, then the median of calls in turns."""
    first = {}
    for name, function in functions.items():
        start = time.perf_counter()
        function()
        function()
        first[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(10 + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if i >= 10:
                seconds[name].append(time.perf_counter() - start)
    return {name: (first[name], statistics.median(values)) for name, values in seconds.items()}


def show(title: str, found: dict[str, tuple[float, float]], base: str) -> None:
    print(f"\n{title}", flush=True)
    for name, (first, median) in found.items():
        print(f"  {name:32s} {1e3 * median:8.2f} ms  {median / found[base][1]:5.2f} x   first calls {first:5.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="timed calls of each")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyro.enable_validation(False)
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")
    for K in (400, 4096):
        functions = {
            "ours": structured_noise,
            "ours, compiled": torch.compile(structured_noise),
            "formula": formula,
            "formula, compiled": torch.compile(formula),
        }
        calls = {name: kernel(function, K) for name, function in functions.items()}
        show(f"Noise for 100 rows and its gradient, K = {K}, T = 2", measure(calls, 3 * steps), "ours")
    for name, (make, shape) in NETWORKS.items():
        x, y = torch.randn(100, *shape), torch.randint(10, (100,))
        found = measure(
            {
                "without noise": plain_step(make, x, y, compiled=False),
                "without noise, compiled": plain_step(make, x, y, compiled=True),
                "VSD": vsd_step(make, x, y, ""),
                "VSD, network compiled": vsd_step(make, x, y, "net"),
                "VSD, objective compiled": vsd_step(make, x, y, "loss"),
            },
            steps,
        )
        show(f"A training step, {name}", found, "VSD")
        breaks = graph_breaks(make, x, y)
        print(f"  graph breaks: network {breaks['net']}, objective {breaks['loss']}")


if __name__ == "__main__":
    main()
