"""How long the first compiled step takes: in a new cache, and in a second process that finds the first one's cache.

    python benchmarks/compile.py [--only 64-100-100-10]   # some minutes

Each measurement is a process of its own; the time is that of the first call of ``vsd.compile_step``, which captures,
compiles and compares, without the imports of torch and Pyro. Goals for 64-100-100-10: 12 s cold, 3 s cached.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import pyro_vsd as vsd

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "8-50-10": (lambda: vsd.nn.mlp([8, 50, 10]), (8,)),
    "64-100-100-10": (lambda: vsd.nn.mlp([64, 100, 100, 10]), (64,)),
    "784-400-400-10": (lambda: vsd.nn.mlp([784, 400, 400, 10]), (784,)),
    "lenet5": (vsd.nn.lenet5, (1, 28, 28)),
}


def first_step(name: str) -> float:
    """Seconds of the first compiled step in this process."""
    torch.set_num_threads(1)
    make, shape = NETWORKS[name]
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make()), num_data=60_000)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    step = vsd.compile_step(loss, torch.optim.Adam(loss.parameters(), fused=True))
    x, y = torch.randn(100, *shape), torch.randint(10, (100,))
    start = time.perf_counter()
    step(x, y)
    assert step.reason is None, step.reason
    return time.perf_counter() - start


def measured(name: str, cache: str) -> float:
    """The same in a process of its own, with this folder as the compiler's cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(NETWORKS))
    parser.add_argument("--child", choices=list(NETWORKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(first_step(args.child))
        return
    for name in [args.only] if args.only else NETWORKS:
        with tempfile.TemporaryDirectory() as cache:
            cold, cached = (measured(name, cache) for _ in range(2))
        print(f"{name:16s} cold {cold:5.1f} s   cached {cached:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
