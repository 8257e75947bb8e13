r"""Natural-gradient variational inference with a precision of low rank plus diagonal, across layers (SLANG).

.. math:: q(w) = \mathcal N(\mu, P^{-1}), \quad P = U^{\mathsf T} U + \operatorname{diag}(d), \quad U \in R^{L \times D}

for the vector w of *all* D weights and biases of the network, under the prior :math:`\mathcal N(0, 1/\delta)`. Each
step draws w from q and takes the gradients :math:`g_i` of every example's loss there:

.. math::
    U^{\mathsf T} U &\leftarrow \text{the } L \text{ leading eigenvectors of }
        (1 - \beta) U^{\mathsf T} U + \beta \tfrac NB \textstyle\sum_i g_i g_i^{\mathsf T} \\
    d &\leftarrow (1 - \beta) d + \beta \delta + \text{the diagonal of what the line above leaves out} \\
    \mu &\leftarrow \mu - \text{lr} \cdot P^{-1} \big(\tfrac NB \textstyle\sum_i g_i + \delta \mu\big)

The gradient of an example in a Linear layer is the outer product of the layer's input and the gradient at its output.
These two factors give the Gram matrix of all :math:`g_i` and products with U; no gradient per example is formed and the
eigenvectors are exact. A convolution lacks this, hence Linear layers only.

**Reference**: Mishkin et al., *SLANG: Fast Structured Covariance Approximations for Bayesian Deep Learning with Natural
Gradient*, 2018 (there with a randomised eigendecomposition).

**Cost** against MAP: 2L + 2 more products per layer and an eigendecomposition of size L + B, with L = 5 about 10 × the
time; L + 3 copies of the weights. **Prefer it** for small networks where correlations between layers matter.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_vsd._utils import check_integer, check_positive
from pyro_vsd.baselines.layers import NaturalGradientMethod, Passes

__all__ = ["SLANG", "SLANGOptimizer"]


class SLANG(NaturalGradientMethod):
    """SLANG for the weights and biases of Linear layers; all other parameters are point estimates, trained by Adam.

    :param rank: L.
    :param prior_precision: δ of the Gaussian prior.
    :param beta: β, how fast the precision moves. A learning rate above it lets single examples throw the mean far.
    :param momentum: of the gradients; zero is the update as written.
    :param init_scale: σ of every weight at the start; the means start at the network's weights.
    :param num_particles: draws of the weights per step.
    :param curvature: ``"empirical"``: the outer products of the gradients themselves; ``"fisher"``: of those at labels
        drawn from the model, the Gauss–Newton matrix on average.

    >>> SLANG(vsd.nn.mlp([4, 8, 3]), num_data=100, rank=3).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    # A share of a Newton step.
    default_lr = 2e-2
    optimizer: "SLANGOptimizer"

    def build(
        self,
        net: nn.Module,
        *,
        rank: int = 5,
        prior_precision: float = 1.0,
        beta: float = 0.02,
        momentum: float = 0.9,
        init_scale: float = 0.05,
        num_particles: int = 1,
        curvature: str = "empirical",
    ) -> None:
        check_integer("rank", rank, 1)
        reason = "It needs every example's gradient as an outer product, which a convolution's is not."
        self.use_layers(net, num_particles, curvature, reason)
        self.settings = (rank, prior_precision, beta, momentum, init_scale)

    def make_optimizer(self) -> "SLANGOptimizer":
        return SLANGOptimizer(self.random.values(), self.lr, *self.settings)

    def start(self, p: Tensor) -> list["Outer"]:
        return []

    def collect(self, found: dict[Tensor, list["Outer"]], own: tuple[Tensor, ...], passes: Passes, rows: int) -> None:
        # the loss is N/B times an example's; needed are the root of that, and of the draw's share
        factor = (rows / (self.num_data * self.num_particles)) ** 0.5
        for layer, uses in passes.items():
            (inputs, gradient), *more = uses
            if more or inputs.dim() != 2:
                shapes = [tuple(x.shape) for x, _ in uses]
                raise ValueError(f"net calls {layer} with inputs {shapes}. SLANG needs one call with inputs (B, K).")
            rights = {"weight": inputs, "bias": torch.ones_like(inputs[:, :1])}
            for name, p in layer.named_parameters():
                found[p].append(Outer(factor * gradient, rights[name]))

    def sample(self) -> dict[str, Tensor]:
        return dict(zip(self.random, self.optimizer.sample(), strict=True))


class Outer(NamedTuple):
    """B matrices as outer products of rows, ``left (B, out)`` and ``right (B, in)``."""

    left: Tensor
    right: Tensor

    def gram(self) -> Tensor:
        """Inner products, ``(B, B)``."""
        return (self.left @ self.left.mT) * (self.right @ self.right.mT)

    def against(self, matrices: Tensor) -> Tensor:
        """Inner products with L other matrices ``(L, out, in)`` or vectors ``(L, out)``, ``(L, B)``."""
        matrices = matrices.reshape(len(matrices), self.left.shape[1], self.right.shape[1])
        return ((matrices @ self.right.mT) * self.left.mT).sum(-2)

    def combine(self, weights: Tensor) -> Tensor:
        """L sums of the matrices with weights ``(L, B)``, ``(L, out, in)``."""
        return (weights.unsqueeze(-1) * self.left).mT @ self.right

    def square(self) -> Tensor:
        """The sum of the matrices' entrywise squares, ``(out, in)``."""
        return self.left.square().mT @ self.right.square()


def stack(parts: list[Outer]) -> Outer:
    """All matrices of several."""
    return Outer(torch.cat([part.left for part in parts]), torch.cat([part.right for part in parts]))


class SLANGOptimizer(torch.optim.Optimizer):
    """The update of mean and precision, with the method's options; gradients are of the full data's loss, at a draw."""

    def __init__(
        self, params: Any, lr: float, rank: int, prior_precision: float, beta: float, momentum: float, init_scale: float
    ):
        for name, value in (("lr", lr), ("prior_precision", prior_precision), ("init_scale", init_scale)):
            check_positive(name, value)
        if not 0 < beta <= 1:
            raise ValueError(f"beta must be above 0 and at most 1, not {beta!r}.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, not {momentum!r}.")
        super().__init__(params, {"lr": lr, "prior_precision": prior_precision, "beta": beta, "momentum": momentum})
        mean = self.mean()
        self.state[self._means()[0]] = {  # one for all: the precision knows no borders between parameters
            "step": 0,
            "momentum": torch.zeros_like(mean),
            "factor": mean.new_zeros(rank, len(mean)),
            "diagonal": torch.full_like(mean, init_scale**-2),
        }

    def _means(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _split(self, flat: Tensor) -> list[Tensor]:
        """A vector ``(..., D)`` in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self._means()], -1)
        return [part.reshape(flat.shape[:-1] + p.shape) for part, p in zip(parts, self._means(), strict=True)]

    def mean(self) -> Tensor:
        """μ, ``(D,)``."""
        return torch.cat([p.detach().flatten() for p in self._means()])

    def precision(self) -> tuple[Tensor, Tensor]:
        """U and d, ``(L, D)`` and ``(D,)``."""
        state = self.state[self._means()[0]]
        return state["factor"], state["diagonal"]

    def _cholesky(self) -> Tensor:
        """Of :math:`I + U d^{-1} U^T`, ``(L, L)``."""
        U, d = self.precision()
        return torch.linalg.cholesky((U / d) @ U.mT + torch.eye(len(U), dtype=U.dtype, device=U.device))

    def solve(self, vector: Tensor) -> Tensor:
        """:math:`P^{-1}` times a vector ``(D,)``."""
        U, d = self.precision()
        weights = torch.cholesky_solve((U @ (vector / d)).unsqueeze(-1), self._cholesky()).squeeze(-1)  # (L,)
        return (vector - weights @ U) / d

    def sample(self) -> list[Tensor]:
        """A draw of the parameters: :math:`\\mu + P^{-1} e` with e of covariance P."""
        U, d = self.precision()
        e = d.sqrt() * torch.randn_like(d) + torch.randn_like(U[:, 0]) @ U
        return self._split(self.mean() + self.solve(e))

    def kl(self) -> Tensor:
        """The KL to the prior."""
        U, d = self.precision()
        delta, cholesky = self.param_groups[0]["prior_precision"], self._cholesky()
        trace = (1 / d).sum() - torch.cholesky_solve((U / d) @ (U / d).mT, cholesky).trace()
        log_det = d.log().sum() + 2 * cholesky.diagonal().log().sum()
        return 0.5 * (delta * (trace + self.mean().square().sum()) - len(d) * (1 + math.log(delta)) + log_det)

    @torch.no_grad()
    def step(self, found: dict[Tensor, list[Outer]]) -> float:  # type: ignore[override]
        """One step; returns the KL to the prior, as it was before.

        :param found: for each parameter the per-example gradients, in parts; their outer products sum to the curvature
            of the full data.
        """
        kl = self.kl().item()
        group, state = self.param_groups[0], self.state[self._means()[0]]
        delta = group["prior_precision"]
        self._update_precision([stack(parts) for parts in found.values()], group["beta"], delta)
        gradient = torch.cat([p.grad.flatten() for p in self._means() if p.grad is not None]) + delta * self.mean()
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        state["step"] += 1
        size = group["lr"] / (1 - group["momentum"] ** state["step"])  # momentum starts at zero, as Adam's
        for p, change in zip(self._means(), self._split(self.solve(state["momentum"])), strict=True):
            p.sub_(change, alpha=size)
        return kl

    def _update_precision(self, gradients: list[Outer], beta: float, delta: float) -> None:
        # S: the rows of √(1 - β) U above the gradients. With S Sᵀ = Q Λ Qᵀ, the leading part of Sᵀ S is that of Q_Lᵀ S.
        state = self.state[self._means()[0]]
        old, rank = (1 - beta) ** 0.5 * state["factor"], len(state["factor"])
        new = [Outer(beta**0.5 * part.left, part.right) for part in gradients]
        across = torch.stack([n.against(o) for n, o in zip(new, self._split(old), strict=True)]).sum(0)  # (L, B)
        inner = torch.stack([n.gram() for n in new]).sum(0)
        gram = torch.cat([torch.cat([old @ old.mT, across], 1), torch.cat([across.mT, inner], 1)])
        if not bool(gram.isfinite().all()):
            raise ValueError("the gradients overflow in SLANG's precision. Lower lr.")
        # in float64: eigenvalues span the square of what gradients do
        leading = torch.linalg.eigh(gram.double()).eigenvectors[:, -rank:].mT.to(gram)  # (L, L + B)
        combined = torch.cat([n.combine(leading[:, rank:]).flatten(1) for n in new], -1)
        state["factor"] = leading[:, :rank] @ old + combined
        squares = torch.cat([n.square().flatten() for n in new])
        left_out = old.square().sum(0) + squares - state["factor"].square().sum(0)
        # a sum of squares; rounding may take it below zero
        state["diagonal"] = (1 - beta) * state["diagonal"] + beta * delta + left_out.clamp(min=0)
