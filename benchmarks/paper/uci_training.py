"""Training, predictions and the choice of settings for all replicas of a data set."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.uci_networks import Replicas

__all__ = ["Clock", "batches", "best_sigma", "generators", "predict", "train"]


def batch_size(rows: int, target: int) -> int:
    """Rows of a batch when a pass is cut in equal batches of about ``target`` rows; at most a few rows are left out.

    >>> batch_size(277, 128)
    138
    """
    return rows // max(1, round(rows / target))


def batches(sets: int, rows: int, batch: int, steps: int, order: torch.Generator) -> Iterator[Tensor]:
    """Row numbers ``(sets, B)`` of each step: passes in new orders, cut in equal batches."""
    size = batch_size(rows, batch)
    per_pass = rows // size
    for step in range(steps):
        position = step % per_pass
        if position == 0:
            permutation = torch.rand(sets, rows, generator=order).argsort(-1)
        yield permutation[:, position * size : (position + 1) * size]


def train(
    net: Replicas,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    lr: float,
    batch: int,
    order: torch.Generator,
    noise: torch.Generator,
) -> list[float]:
    """Adam with a cosine to zero; returns the mean loss per row over replicas, at 20 moments.

    :param x: training rows ``(P, n, D)``.
    :param y: their targets ``(P, n)``.
    :param batch: about how many rows a batch has.
    """
    P, n, _ = x.shape
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    rows = torch.arange(P)[:, None]
    history: list[float] = []
    total, count = torch.zeros(()), 0
    for step, index in enumerate(batches(P, n, batch, steps, order)):
        if step == steps // 2:
            net.halfway(x, noise, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss = net.loss(x[rows, index], y[rows, index], n, noise)
        loss.sum().backward()
        optimizer.step()
        total, count = total + loss.detach().mean() / n, count + 1
        if (step + 1) * 20 // steps > step * 20 // steps:
            history.append(float(total) / count)
            total, count = torch.zeros(()), 0
    return history


@torch.no_grad()
def predict(net: Any, x: Tensor, num_samples: int, noise: torch.Generator) -> Tensor:
    """Means of every draw, ``(P, C, num_samples, n)``; each row and draw has its own noise."""
    chunk = max(1, net.rows_per_pass // x.shape[1])
    parts = []
    for start in range(0, num_samples, chunk):
        parts.append(net(x, noise, samples=min(chunk, num_samples - start))[0])
    return torch.cat(parts, 2)


def mixture_log_likelihood(square: Tensor, log_sigma: Tensor) -> Tensor:
    """Mean over rows of the log-density of the mixture: squared residuals ``(C, S, n)``, ``log_sigma (C,)``."""
    precision = (-2 * log_sigma).exp()[:, None, None]
    density = torch.logsumexp(-0.5 * precision * square, 1).mean(-1)
    return density - math.log(square.shape[1]) - log_sigma - 0.5 * math.log(2 * math.pi)


def best_sigma(samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The observation noise with the highest likelihood of held-out rows, for each replica, and that likelihood.

    A grid of steps .3 in log σ, then one of .05 around its best.

    :param samples: ``(P, C, S, n)``. :param y: ``(P, n)``.
    :returns: log σ and the mean log-density, both ``(P, C)``.
    """
    P, C = samples.shape[:2]
    best, score = torch.zeros(P, C), torch.full((P, C), -torch.inf)
    for p in range(P):
        square = (y[p] - samples[p]).square()
        centre = torch.full((C,), -2.7)
        for step, count in ((0.3, 12), (0.05, 5)):
            found = centre.clone()
            for k in range(-count, count + 1):
                log_sigma = centre + k * step
                value = mixture_log_likelihood(square, log_sigma)
                better = value > score[p]
                found = torch.where(better, log_sigma, found)
                score[p] = torch.where(better, value, score[p])
            centre = found
        best[p] = centre
    return best, score


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start


def generators(*seeds: Any) -> torch.Generator:
    """A generator whose stream depends on all of the numbers."""
    seed = 0
    for value in seeds:
        seed = (seed * 1_000_003 + int(value) + 1) % (2**61)
    return torch.Generator().manual_seed(seed)
