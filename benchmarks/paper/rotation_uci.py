"""Do correlations help on the UCI sets? Also mirrored draws, training from the closed form, how much was found."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.noise_study import compared, reach
from benchmarks.paper.reflections import best_reflections
from benchmarks.paper.uci_networks import VSD
from pyro_vsd.ops.noise import NoiseTerms, structured_noise

__all__ = ["Studied", "noise_of"]

# Draws of the noise that a curvature is averaged over.
_DRAWS = 4
# Steps of the search that a start from the closed form takes.
_POLISH = 10
# Splits whose noise is compared with the best there is; each costs seconds.
_SPLITS = 5


class Studied(VSD):
    """Structured dropout with one more of three things.

    :param draws: draws of the noise for each row of a batch.
    :param mirrored: two draws, the second ``2 - ξ``.
    :param closed: halfway, noise variances and vectors are set to the best for the network at that time.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        options: Mapping[str, Tensor],
        generator: torch.Generator,
        T: int = 2,
        draws: int = 1,
        mirrored: bool = False,
        closed: bool = False,
    ):
        super().__init__(sizes, options, generator, T)
        if mirrored and draws != 2:
            raise ValueError(f"draws: expected 2 mirrored ones, got {draws}.")
        self.T, self.draws, self.mirrored, self.closed = T, draws, mirrored, closed
        self.mirror = False
        self.seen: dict[int, Tensor] = {}  # the noise of the last pass, by layer

    def noise(self, i: int, shape: torch.Size, terms: NoiseTerms, generator: torch.Generator) -> Tensor:
        P, _, rows, K = shape
        eps = torch.randn(P, 1, rows // 2 if self.mirror else rows, K, generator=generator)
        if self.mirror:
            eps = torch.cat([eps, -eps], 2)  # samples lie behind one another
        self.seen[i] = structured_noise(eps, terms.std, terms.N, terms.S)
        return self.seen[i]

    def loss(self, x: Tensor, y: Tensor, num_data: int, generator: torch.Generator, samples: int = 1) -> Tensor:
        self.mirror = self.mirrored
        try:
            return super().loss(x, y, num_data, generator, samples * self.draws)
        finally:
            self.mirror = False

    def curvature(self, x: Tensor, generator: torch.Generator) -> list[Tensor]:
        """``A (P, C, K, K)`` of each layer for the training rows ``x (P, n, D)``, as ``vsd.diagnosis.curvature``."""
        total = [torch.zeros(()), torch.zeros(())]
        precision = (-2 * self.log_sigma.detach()).exp()[..., None, None]
        for _ in range(_DRAWS):
            with torch.enable_grad():
                out, _ = self(x, generator)
                slopes = torch.autograd.grad(out.sum(), [self.seen[0], self.seen[1]])
            total = [A + precision * (g.mT @ g) / _DRAWS for A, g in zip(total, slopes, strict=True)]
        self.seen = {}
        return [A.double() for A in total]

    @torch.no_grad()
    def halfway(self, x: Tensor, generator: torch.Generator, optimizer: torch.optim.Optimizer) -> None:
        if not self.closed:
            return
        for i, A in enumerate(self.curvature(x, generator)):
            strength = self.strength(i).double()[..., None, None]
            log_alpha, vectors = best_reflections(A / strength, 1.0, self.T, polish=_POLISH)
            parameters = (getattr(self, f"log_alpha{i}"), getattr(self, f"vectors{i}"))
            for parameter, value in zip(parameters, (log_alpha, vectors), strict=True):
                parameter.copy_(value)
                optimizer.state.pop(parameter, None)  # moments of the values before


def noise_of(net: Studied, x: Tensor, groups: list[str], generator: torch.Generator) -> dict[str, Any]:
    """For each list of settings and layer, what of the possible gain was found, split by split.

    :param groups: names of the lists, in the order of the net's settings; each has one λ for all splits.
    """
    A = net.curvature(x, generator)
    found: dict[str, Any] = {}
    for c, name in enumerate(groups):
        for i in (0, 1):
            log_alpha, vectors = getattr(net, f"log_alpha{i}").detach(), net.vectors(i).detach()
            strength = net.strength(i)
            runs = [
                compared(A[i][p, c], log_alpha[p, c], vectors[p, c], float(strength[p, c]))
                for p in range(min(_SPLITS, len(x)))
            ]
            layer = {key: [run[key] for run in runs] for key in runs[0]}
            if net.T == 0:
                layer |= reach(A[i][:_SPLITS, c], float(strength[0, c]))
            found.setdefault(name, {})[f"layer{i}"] = layer
    return found
