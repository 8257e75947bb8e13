"""Time of every classification metric on a million predictions of ten classes, and how it grows with their number.

Run: python benchmarks/metrics.py [--rows 1000000] [--classes 10]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyro_vsd import metrics

SCORES = ("accuracy", "error_rate", "nll", "brier", "ece", "adaptive_ece", "classwise_ece")
ROWS = ("predictive_entropy", "mutual_information")
DETECTION = ("fpr_at_95_tpr", "detection_error", "auroc", "aupr_in", "aupr_out")


def data(num_rows: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two samples of probabilities (2, N, C), labels that agree with them fairly often, and scores to detect."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, num_classes, generator=generator)
    noise = torch.randn(2, num_rows, num_classes, generator=generator)
    labels = (logits + torch.randn(num_rows, num_classes, generator=generator)).argmax(-1)
    outside = torch.rand(num_rows, generator=generator)
    return (logits + noise).softmax(-1), labels, outside


def cases(num_rows: int, num_classes: int) -> dict[str, Callable[[], object]]:
    """Every metric as a call without arguments."""
    samples, labels, outside = data(num_rows, num_classes)
    probs, inside = samples.mean(0), samples.mean(0).amax(-1)
    return {
        **{name: partial(getattr(metrics, name), probs, labels) for name in SCORES},
        **{name: partial(getattr(metrics, name), samples) for name in ROWS},
        **{name: partial(getattr(metrics, name), inside, outside) for name in DETECTION},
        "report, all but detection": partial(metrics.report, samples, labels),
    }


def seconds(call: Callable[[], object]) -> float:
    """Best of three runs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=10)
    options = parser.parse_args()
    sizes = [options.rows // 16, options.rows // 4, options.rows]
    table = {size: {name: seconds(call) for name, call in cases(size, options.classes).items()} for size in sizes}
    print(f"seconds, {options.classes} classes, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'metric':<28}" + "".join(f"{size:>12,}" for size in sizes) + f"{'exponent':>12}")
    for name in table[sizes[-1]]:
        times = [table[size][name] for size in sizes]
        # slope on log-log axes over the last fourfold step: 1 is linear
        slope = math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])
        print(f"{name:<28}" + "".join(f"{value:>12.4f}" for value in times) + f"{slope:>12.2f}")
    alone = sum(value for name, value in table[sizes[-1]].items() if name in SCORES + ROWS + DETECTION)
    print(f"{'all, one by one':<64}{alone:.2f} s")


if __name__ == "__main__":
    main()
