r"""Natural-gradient variational inference with a diagonal Gaussian: an optimiser with weight noise (VOGN).

.. math::
    q(w) = \mathcal N\big(\mu, \tfrac{\tau}{N} \operatorname{diag}(s + \tilde\delta + \gamma)^{-1}\big), \qquad
    \tilde\delta = \tau \delta / N

for N data, prior precision δ, damping γ and temperature τ (the factor of the KL). Each step draws w from q and takes
the gradients :math:`g_i` of every example's loss there:

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1) (\bar g + \tilde\delta \mu) \\
    s &\leftarrow \beta_2 s + (1 - \beta_2) \tfrac1B \textstyle\sum_i g_i^2 \\
    \mu &\leftarrow \mu - \text{lr} \cdot m / (s + \tilde\delta + \gamma)

The squared gradients stand for the diagonal of the Gauss–Newton matrix. Those of a Linear layer come from its inputs
and the gradients at its outputs; no gradient per example is formed.

**Reference**: Khan et al., *Fast and Scalable Bayesian Deep Learning by Weight-Perturbation in Adam*, 2018; Osawa et
al., *Practical Deep Learning with Bayesian Principles*, 2019.

**Cost** against MAP: a draw of all weights, one more product per Linear layer, in convolutions a gradient per example:
about 2 × the time (the VSD paper measures 3.3 to 4.4 on large convolutional networks); memory as Adam's. **Prefer it**
where a factorised Gaussian should cost little: no second set of parameters to train.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from pyro_vsd._utils import check_positive
from pyro_vsd.baselines.layers import NaturalGradientMethod, Passes, linear_map

__all__ = ["VOGN", "VOGNOptimizer"]

# Numbers in the per-example gradients of a convolution that are formed at once: 64 MB in float32.
_BLOCK = 2**24


class VOGN(NaturalGradientMethod):
    """Variational online Gauss–Newton for the weights and biases of Linear and convolution layers.

    All other parameters are point estimates, trained by Adam. Networks that mix examples in training (batch norm) have
    no gradient per example; what is squared then are the rows of the batch's.

    :param prior_precision: δ of the Gaussian prior.
    :param betas: :math:`\\beta_1` and :math:`\\beta_2`.
    :param damping: γ.
    :param temperature: τ.
    :param init_scale: σ of every weight at the start (damping may make it smaller); the means start at the network's.
    :param num_particles: draws of the weights per step.
    :param curvature: ``"empirical"``: the gradients' own squares; ``"fisher"``: those at labels drawn from the model,
        the Gauss–Newton matrix on average; ``"batch"``: the square of the batch's mean gradient, cheapest and crudest.

    >>> VOGN(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    # A share of a Newton step.
    default_lr = 5e-2
    optimizer: "VOGNOptimizer"
    curvatures = ("empirical", "fisher", "batch")
    full_data = False

    def build(
        self,
        net: nn.Module,
        *,
        prior_precision: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        damping: float = 1e-3,
        temperature: float = 1.0,
        init_scale: float = 0.05,
        num_particles: int = 1,
        curvature: str = "empirical",
    ) -> None:
        self.use_layers(net, num_particles, curvature)
        self.settings = (betas, prior_precision, damping, temperature, init_scale)

    def make_optimizer(self) -> "VOGNOptimizer":
        return VOGNOptimizer(self.random.values(), self.lr, self.num_data, *self.settings)

    def start(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def collect(self, found: dict[Tensor, Tensor], own: tuple[Tensor, ...], passes: Passes, rows: int) -> None:
        share = 1 / (self.num_particles * rows)
        if self.curvature == "batch":
            for square, gradient in zip(found.values(), own, strict=False):
                square.addcmul_(gradient, gradient, value=share / rows)
            return
        for layer, uses in passes.items():
            for p, square in zip(layer.parameters(), squared_gradients(layer, uses), strict=True):
                found[p].add_(square, alpha=share)

    def sample(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: p + self.optimizer.scale(p) * torch.randn_like(p) for name, p in self.random.items()}


class VOGNOptimizer(torch.optim.Optimizer):
    """The update of means and curvatures, with the method's options; gradients are of the mean loss, at a draw."""

    def __init__(
        self,
        params: Any,
        lr: float,
        num_data: int,
        betas: tuple[float, float],
        prior_precision: float,
        damping: float,
        temperature: float,
        init_scale: float,
    ):
        positive = {"lr": lr, "prior_precision": prior_precision, "temperature": temperature, "init_scale": init_scale}
        for name, value in positive.items():
            check_positive(name, value)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas!r}.")
        shrinkage = temperature * prior_precision / num_data  # δ̃
        defaults = {"lr": lr, "betas": tuple(betas), "shrinkage": shrinkage, "damping": damping}
        super().__init__(params, {**defaults, "num_data": num_data, "temperature": temperature})
        start = max(0.0, temperature / (num_data * init_scale**2) - shrinkage - damping)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": 0, "momentum": torch.zeros_like(p), "curvature": torch.full_like(p, start)}

    def scale(self, p: Tensor) -> Tensor:
        """The posterior's standard deviation, shaped as ``p``."""
        group = self.param_groups[0]
        return (self._curvature(p, group) * (group["num_data"] / group["temperature"])).rsqrt()

    def _curvature(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        curvature: Tensor = self.state[p]["curvature"]
        return curvature + (group["shrinkage"] + group["damping"])

    @torch.no_grad()
    def step(self, curvature: dict[Tensor, Tensor]) -> float:  # type: ignore[override]
        """One step, from the mean over examples of the squared gradients; returns τ times the KL, as it was before."""
        kl = 0.0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                kl += self._kl(p, group).item()
                state["step"] += 1
                gradient = p.grad.add(p, alpha=group["shrinkage"])
                momentum = state["momentum"].lerp_(gradient, 1 - beta1)
                state["curvature"].lerp_(curvature[p], 1 - beta2)
                size = group["lr"] / (1 - beta1 ** state["step"])  # momentum starts at zero, as Adam's
                p.addcdiv_(momentum, self._curvature(p, group), value=-size)
        return kl

    def _kl(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        # in units of the prior's variance: 1/δ = τ / (N δ̃)
        ratio = group["shrinkage"] / self._curvature(p, group)
        precision = group["shrinkage"] * group["num_data"] / group["temperature"]
        return 0.5 * group["temperature"] * (ratio - 1 - ratio.log() + precision * p.square()).sum()


def squared_gradients(layer: Any, passes: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Sums over examples of the squared gradients of a layer's parameters, in their order.

    :param passes: for each call of the layer its input and the gradient of the summed loss at its output.
    """
    (x, gradient), *more = passes
    if isinstance(layer, nn.Linear) and x.dim() == 2 and not more:
        square = gradient.square()
        found = {"weight": square.mT @ x.square(), "bias": square.sum(0)}
        return [found[name] for name, _ in layer.named_parameters()]
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def one(*example: Tensor) -> dict[str, Tensor]:
        def outputs(parameters: dict[str, Tensor]) -> list[Tensor]:
            weight, bias = parameters["weight"], parameters.get("bias")
            return [linear_map(layer, v.unsqueeze(0), weight, bias) for v in example[: len(passes)]]

        pull = vjp(outputs, parameters)[1]
        pulled: dict[str, Tensor] = pull([g.unsqueeze(0) for g in example[len(passes) :]])[0]
        return pulled

    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    size = max(1, _BLOCK // layer.weight.numel())
    columns = [x for x, _ in passes] + [g for _, g in passes]
    for start in range(0, len(x), size):
        gradients = vmap(one)(*[column[start : start + size] for column in columns])
        for name, value in gradients.items():
            total[name] += value.square().sum(0)
    return list(total.values())
