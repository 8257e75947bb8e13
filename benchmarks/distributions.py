"""What the noise costs: rotating a batch, and the empirical-Bayes KL up to a million units. Ratios inside one run.

    python benchmarks/distributions.py            # about a minute, one thread
    python benchmarks/distributions.py --rounds 20

Float32. The candidates of a table take turns, and medians are compared, so that a change of the machine's speed meets
all alike. Times are of the processor (``process_time``), which a busy machine does not lengthen. Small K take
turns with large ones, so they find cold caches: that lowers the slope over all K, not that of the last decade. Peak
memory is that of a process of its own: the growth of its peak resident set (``VmHWM`` on Linux, elsewhere
``getrusage``) from before the parameters are made to after one forward and backward pass.

Goals: rotating 256 rows of K = 4096 costs at T = 3 at most 1.5 × the drawing of the normals, and at most 1.2 × what it
costs at T = 1; the KL's time from K = 1,000 to 1,000,000 grows with a log-log slope of at most 1.1; its peak memory at
K = 1,000,000 stays under 500 MB. Ratios without a goal are printed beside them.
"""

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import pyro_vsd as vsd
from pyro_vsd.ops.householder import CompactWY, compact_wy, rotate
from pyro_vsd.ops.noise import structured_noise

ROWS, UNITS = 256, 4096
SIZES = [1_000, 10_000, 100_000, 1_000_000]
T = 3


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 3):
        for name, call in candidates.items():
            start = time.process_time()
            call()
            if turn >= 3:  # the first turns warm up
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def goal(text: str, value: float, limit: float) -> None:
    print(f"{text}: {value:.2f} (goal at most {limit:g}: {'met' if value <= limit else 'MISSED'})")


def draw() -> Tensor:
    return torch.randn(ROWS, UNITS)


def draw_and_rotate(std: Tensor, wy: CompactWY) -> Tensor:
    return structured_noise(draw(), std, *wy)


def rotation(rounds: int) -> None:
    """Rotating a batch against drawing its normals."""
    x, std = draw(), torch.rand(UNITS)
    forms = {t: compact_wy(torch.randn(t, UNITS)) for t in (1, 2, 3, 8, 20)}
    seconds = interleaved(
        {
            "draw": draw,
            **{f"rotate T={t}": partial(rotate, wy, x) for t, wy in forms.items()},
            **{f"draw and rotate T={t}": partial(draw_and_rotate, std, wy) for t, wy in forms.items()},
        },
        rounds,
    )
    print(f"Rotating {ROWS} rows of K = {UNITS}, as ratios to drawing their normals ({1e3 * seconds['draw']:.2f} ms)")
    for name, value in seconds.items():
        print(f"  {name:22} {value / seconds['draw']:5.2f}")
    goal("rotate T=3 / draw", seconds["rotate T=3"] / seconds["draw"], 1.5)
    goal("rotate T=3 / rotate T=1", seconds["rotate T=3"] / seconds["rotate T=1"], 1.2)
    print(f"rotate T=3 / rotate T=2: {seconds['rotate T=3'] / seconds['rotate T=2']:.2f} (no goal)")
    whole = seconds["draw and rotate T=3"] / seconds["draw and rotate T=1"]
    print(f"draw and rotate T=3 / the same at T=1: {whole:.2f} (no goal)\n")


def kl_step(K: int) -> Callable[[], None]:
    log_alpha, vectors = torch.randn(K, requires_grad=True), torch.randn(T, K, requires_grad=True)

    def step() -> None:
        log_alpha.grad = vectors.grad = None
        vsd.distributions.empirical_bayes_kl(log_alpha.exp(), vectors, 100).backward()

    return step


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of the least-squares line through the logarithms."""
    x, y = [math.log(v) for v in sizes], [math.log(v) for v in seconds]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def kl(rounds: int) -> None:
    """Forward and backward of the KL for growing K."""
    steps = {K: kl_step(K) for K in SIZES}
    measured = interleaved({str(K): step for K, step in steps.items()}, rounds)
    seconds = [measured[str(K)] for K in SIZES]
    print(f"empirical_bayes_kl, forward and backward, T = {T}")
    for K, value in zip(SIZES, seconds, strict=True):
        print(f"  K = {K:9,} {1e3 * value:9.2f} ms {1e9 * value / K:9.1f} ns per unit")
    goal("log-log slope", slope(SIZES, seconds), 1.1)
    last = slope(SIZES[-2:], seconds[-2:])
    print(f"log-log slope of the last decade: {last:.2f} (no goal)")
    command = [sys.executable, __file__, "--memory"]
    extra = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    goal(f"peak extra memory at K = {SIZES[-1]:,} in MB", extra, 500)


def memory() -> None:
    """Prints the growth of this process's peak memory in MB; run in a process of its own."""
    # A small step first, so that what torch loads once is not counted.
    kl_step(10)()
    before = peak_memory()
    kl_step(SIZES[-1])()
    print(peak_memory() - before)


def peak_memory() -> float:
    """Of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the peak of the parent process too
        return float(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.memory:
        memory()
        return
    rotation(options.rounds)
    kl(options.rounds)


if __name__ == "__main__":
    main()
