"""Networks of one hidden layer, many at once: every parameter has the axes ``(P, C)`` in front.

``P`` counts training sets (splits, folds), ``C`` settings (λ, p, members of an ensemble). Replicas share nothing but
random numbers: all settings of a training set start at the same weights and see the same batches and the same
standard normals, so that their differences are those of the settings. The noise of VSD, its terms and its KL are the
library's own operators, which broadcast over the two axes.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import InverseGamma, LogNormal, kl_divergence

from pyro_vsd.distributions.kl import hierarchical_terms
from pyro_vsd.infer.vectors import VectorNetwork
from pyro_vsd.ops.noise import NoiseTerms, noise_terms, structured_noise

__all__ = ["BBB", "MAP", "MCDropout", "VSD", "Replicas", "VSDHierarchical"]

LOG_SIGMA = -1.0  # where the observation's log σ starts, as in vsd.nn.Regressor


class Replicas(nn.Module):
    """Point estimates: weights, biases and one observation noise for each replica.

    :param sizes: inputs, hidden units, one output.
    :param options: numbers of each replica, ``{name: (P, C)}``.
    :param members: replicas in a row that belong to one setting and differ in their start.
    """

    #: rows that a prediction passes at once, for each training set: few, so that they stay in the cache
    rows_per_pass = 300

    def __init__(
        self, sizes: tuple[int, int, int], options: Mapping[str, Tensor], generator: torch.Generator, members: int = 1
    ):
        super().__init__()
        self.options = dict(options)
        self.shape = tuple(next(iter(options.values())).shape)
        self.sizes, self.members, self.generator = sizes, members, generator
        for i, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            limit = math.sqrt(6 / (inputs + outputs))
            start = limit * (2 * self._shared(torch.rand, outputs, inputs) - 1)
            self.register_parameter(f"theta{i}", nn.Parameter(start))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(*self.shape, 1, outputs)))
        self.log_sigma = nn.Parameter(torch.full(self.shape, LOG_SIGMA))

    def _shared(self, draw: Callable[..., Tensor], *shape: int) -> Tensor:
        """A draw for each training set and member, the same for all settings."""
        P, C = self.shape
        one = draw(P, 1, self.members, *shape, generator=self.generator)
        return one.expand(P, C // self.members, -1, *shape).reshape(P, C, *shape).clone()

    def prepare(self) -> Any:
        """What the layers of one pass have in common: computed once a step."""

    def layer(self, i: int, x: Tensor, common: Any, samples: int, generator: torch.Generator) -> Tensor:
        """Outputs ``(P, C, rows, outputs)`` of a layer for inputs ``(P, C or 1, rows, inputs)``."""
        return affine(x.expand(*self.shape, -1, -1), getattr(self, f"theta{i}"), getattr(self, f"bias{i}"))

    def forward(self, x: Tensor, generator: torch.Generator, samples: int = 1) -> tuple[Tensor, Any]:
        """Means ``(P, C, samples, n)`` for rows ``x (P, n, D)``, and what :meth:`penalty` needs."""
        P, n, D = x.shape
        common = self.prepare()
        x = x[:, None, None].expand(P, 1, samples, n, D).reshape(P, 1, samples * n, D)
        h = self.layer(0, x, common, samples, generator).relu()
        out = self.layer(1, h, common, samples, generator)
        return out.view(*self.shape, samples, n), common

    def penalty(self, common: Any) -> Tensor:
        """What the objective pays beside the likelihood, ``(P, C)``: ½ precision ‖θ‖² of a Gaussian prior."""
        weights = [self.theta0, self.theta1, self.bias0, self.bias1]
        return 0.5 * self.options["precision"] * sum(w.square().sum((-2, -1)) for w in weights)

    def loss(self, x: Tensor, y: Tensor, num_data: int, generator: torch.Generator, samples: int = 1) -> Tensor:
        """The negative objective for the whole training set from a batch ``x (P, B, D)``, ``y (P, B)``; ``(P, C)``."""
        out, common = self(x, generator, samples)
        residual = (y[:, None, None] - out).square().mean((-2, -1))
        precision = (-2 * self.log_sigma).exp()
        nll = 0.5 * precision * residual + self.log_sigma + 0.5 * math.log(2 * math.pi)
        return num_data * nll + self.penalty(common)

    def halfway(self, x: Tensor, generator: torch.Generator, optimizer: torch.optim.Optimizer) -> None:
        """Called once, when half of the training is over, with all training rows."""


class MAP(Replicas):
    """A point estimate under a Gaussian prior; with members, a deep ensemble."""


class MCDropout(Replicas):
    """Bernoulli noise at rate p on inputs and hidden units."""

    def layer(self, i: int, x: Tensor, common: Any, samples: int, generator: torch.Generator) -> Tensor:
        P, _, rows, K = x.shape
        p = self.options["rate"][..., None, None]
        uniform = torch.rand(P, 1, rows, K, generator=generator)
        x = x * (uniform >= p) / (1 - p)
        return super().layer(i, x, common, samples, generator)

    def penalty(self, common: Any) -> Tensor:
        weights = self.theta0.square().sum((-2, -1)) + self.theta1.square().sum((-2, -1))
        return 0.5 * self.options["precision"] * weights / (1 - self.options["rate"])


class BBB(Replicas):
    """A factorised Gaussian posterior under ``N(0, 1)``, drawn at the layers' outputs (local reparametrisation)."""

    init_scale = 0.05

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for i in (0, 1):
            for name in ("theta", "bias"):
                start = torch.full_like(getattr(self, f"{name}{i}"), 2 * math.log(self.init_scale))
                self.register_parameter(f"log_variance_{name}{i}", nn.Parameter(start))

    def layer(self, i: int, x: Tensor, common: Any, samples: int, generator: torch.Generator) -> Tensor:
        mean = super().layer(i, x, common, samples, generator)
        theta, bias = (getattr(self, f"log_variance_{name}{i}").exp() for name in ("theta", "bias"))
        variance = affine(x.square().expand(*self.shape, -1, -1), theta, bias)
        P, _, rows, outputs = mean.shape
        return mean + variance.sqrt() * torch.randn(P, 1, rows, outputs, generator=generator)

    def penalty(self, common: Any) -> Tensor:
        total = torch.zeros(self.shape)
        for i in (0, 1):
            for name in ("theta", "bias"):
                mean, log_variance = getattr(self, f"{name}{i}"), getattr(self, f"log_variance_{name}{i}")
                kl = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
                total = total + kl.sum((-2, -1))
        return self.options["kl_weight"] * total


class VSD(Replicas):
    """Structured dropout on inputs and hidden units; ``T = 0`` is variational dropout.

    :param T: reflections.
    :param vectors: ``"free"``, ``"fc"`` or ``"low_rank"``.
    :param rank: hidden units of the low-rank networks.
    :param spread: standard deviation of log α at the start.
    :param scale: standard deviation of the free vectors' entries at the start.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        options: Mapping[str, Tensor],
        generator: torch.Generator,
        T: int = 2,
        vectors: str = "free",
        rank: int = 5,
        spread: float = 0.5,
        scale: float = 1.0,
    ):
        super().__init__(sizes, options, generator)
        self.kind = "free" if T == 0 else vectors
        log_start = self.options["init_alpha"].log()[..., None]
        for i, K in enumerate(sizes[:2]):
            start = log_start + spread * self._shared(torch.randn, K)
            self.register_parameter(f"log_alpha{i}", nn.Parameter(start))
        seed = int(torch.randint(2**31, (), generator=generator))
        self.templates: list[nn.Module] = []
        for i, K in enumerate(sizes[:2]):
            if self.kind == "free":
                self.register_parameter(f"vectors{i}", nn.Parameter(scale * self._shared(torch.randn, T, K)))
            else:
                self._add_networks(i, seed + i, T, K, rank if vectors == "low_rank" else None)

    def _add_networks(self, i: int, seed: int, T: int, K: int, rank: int | None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nets = [VectorNetwork(T, K, rank, 1.0, torch.zeros(())) for _ in range(self.shape[0])]
        nets = [net for net in nets for _ in range(self.shape[1])]
        stacked, _ = torch.func.stack_module_state(nets)
        for name, value in stacked.items():
            self.register_parameter(f"net{i}_{name.replace('.', '_')}", nn.Parameter(value.detach().clone()))
        self.templates.append(copy.deepcopy(nets[0]).to("meta"))

    def vectors(self, i: int) -> Tensor:
        """Reflection vectors ``(P, C, T, K)`` of a layer."""
        if self.kind == "free":
            found: Tensor = getattr(self, f"vectors{i}")
            return found
        template = self.templates[i]
        stacked = {name: getattr(self, f"net{i}_{name.replace('.', '_')}") for name, _ in template.named_parameters()}
        made: Tensor = torch.func.vmap(lambda values: torch.func.functional_call(template, values, ()))(stacked)
        return made.view(*self.shape, *made.shape[1:])

    def prepare(self) -> list[NoiseTerms]:
        return [noise_terms(getattr(self, f"log_alpha{i}"), self.vectors(i)) for i in (0, 1)]

    def layer(self, i: int, x: Tensor, common: Any, samples: int, generator: torch.Generator) -> Tensor:
        x = x * self.noise(i, x.shape, common[i], generator)
        return super().layer(i, x, common, samples, generator)

    def noise(self, i: int, shape: torch.Size, terms: NoiseTerms, generator: torch.Generator) -> Tensor:
        """The noise ``(P, C, rows, K)`` of a layer's inputs of that shape."""
        P, _, rows, K = shape
        eps = torch.randn(P, 1, rows, K, generator=generator)
        return structured_noise(eps, terms.std, terms.N, terms.S)

    def penalty(self, common: Any) -> Tensor:
        return sum(self.strength(i) * 0.5 * common[i].log_ratio for i in (0, 1))

    def strength(self, i: int) -> Tensor:
        """λ of a layer: times its Q where the KL is the paper's, as ``VSD_ELBO(kl_scale="weight")``."""
        columns = self.sizes[i + 1]
        return self.options["kl_weight"] * torch.where(self.options["per_weight"] > 0, columns, 1)


class VSDHierarchical(VSD):
    """Structured dropout with a log-normal scale z for each unit, under an inverse Gamma(1, 1)."""

    init_scale = 0.1

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for i, K in enumerate(self.sizes[:2]):
            self.register_parameter(f"z_loc{i}", nn.Parameter(torch.zeros(*self.shape, K)))
            start = torch.full((*self.shape, K), math.log(self.init_scale))
            self.register_parameter(f"z_log_scale{i}", nn.Parameter(start))

    def layer(self, i: int, x: Tensor, common: Any, samples: int, generator: torch.Generator) -> Tensor:
        P, _, rows, K = x.shape
        # one z for each draw of the network, as in the guide
        eps = torch.randn(P, 1, samples, K, generator=generator)
        loc, scale = getattr(self, f"z_loc{i}"), getattr(self, f"z_log_scale{i}").exp()
        z = (loc.unsqueeze(-2) + scale.unsqueeze(-2) * eps).exp()
        x = x.unflatten(2, (samples, rows // samples)) * z.unsqueeze(-2)
        return super().layer(i, x.flatten(2, 3), common, samples, generator)

    def penalty(self, common: Any) -> Tensor:
        total = super().penalty(common)
        one = torch.ones(())
        for i in (0, 1):
            loc, scale = getattr(self, f"z_loc{i}"), getattr(self, f"z_log_scale{i}").exp()
            law = LogNormal(loc, scale, validate_args=False)
            kl_z = kl_divergence(law, InverseGamma(one, one, validate_args=False)).sum(-1)
            total = total + self.strength(i) * hierarchical_terms(loc, scale, "paper")
            total = total + self.options["kl_weight"] * kl_z
        return total


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x Wᵀ + b`` for each replica, in one batched product."""
    P, C = weight.shape[:2]
    flat = torch.baddbmm(bias.flatten(0, 1), x.flatten(0, 1), weight.flatten(0, 1).mT)
    return flat.view(P, C, *flat.shape[1:])
