r"""A matrix Gaussian over each layer's weights, inputs along its rows, outputs along its columns (VMG).

.. math:: q(W) = \mathcal{MN}(M, U, V), \qquad \operatorname{cov}(W_{ij}, W_{kl}) = U_{ik} V_{jl}

for the ``(in + 1) × out`` matrix of weights and bias, under the prior :math:`\mathcal{MN}(0, I, I)`. V is diagonal. U
is what a diagonal one becomes after m pseudo-observations :math:`\tilde A W + E`, E of covariance :math:`I \otimes V`:

.. math:: U = \big(\operatorname{diag}(u)^{-1} + \tilde A^{\mathsf T} \tilde A\big)^{-1}

so weights of different inputs are correlated. Pre-activations of one example are independent given its input,
:math:`h_j \sim \mathcal N((xM)_j, x U x^{\mathsf T} V_{jj})`, and so they are drawn. The KL is in closed form.

**Reference**: Louizos & Welling, *Structured and Efficient Variational Deep Learning with Matrix Gaussian Posteriors*,
2016. There the KL is that of the matrix Gaussian before the pseudo-observations; here draws and KL are of one
distribution.

**Cost** against MAP: a thin product with :math:`\tilde A` and an :math:`m \times m` Cholesky factor per layer, about
1.8 × the time; ``(m + 1)(in + 1) + out`` more parameters per layer, the fewest of all Gaussians here. **Prefer it** for
wide fully connected networks where memory counts.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_vsd._utils import check_integer
from pyro_vsd.baselines.layers import LayerwiseMethod, RandomLayer
from pyro_vsd.baselines.protocol import KLWeight

__all__ = ["VMG", "MatrixGaussianLayer"]


class VMG(LayerwiseMethod):
    """Matrix Gaussian posteriors of Linear layers, biases included; a convolution is an error.

    :param num_pseudo: m, the number of pseudo-observations of each layer; without any, U is diagonal.
    :param init_scale: σ of every weight at the start, before pseudo-observations; the means start at the network's.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.

    >>> VMG(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self, net: nn.Module, *, num_pseudo: int = 10, init_scale: float = 0.05, kl_weight: KLWeight = 1.0
    ) -> None:
        check_integer("num_pseudo", num_pseudo, 0)
        reason = "Its posterior is that of a matrix, inputs by outputs; a kernel has more axes."
        self.replace(net, lambda layer: MatrixGaussianLayer(layer, num_pseudo, init_scale), kl_weight, reason)


class MatrixGaussianLayer(RandomLayer):
    """A Linear layer with a matrix Gaussian posterior, drawn at its outputs; its parameters are M, the bias last."""

    def __init__(self, layer: Any, num_pseudo: int, init_scale: float):
        super().__init__(layer)
        weight = layer.weight
        rows = layer.in_features + (layer.bias is not None)
        self.log_rows = nn.Parameter(weight.new_full((rows,), math.log(init_scale)))  # log u
        self.log_columns = nn.Parameter(weight.new_full((layer.out_features,), math.log(init_scale)))  # log diag V
        # Each lowers the variance along its direction by a fifth, 1 / (1 + ã u ãᵀ) with ã u ãᵀ = ¼: enough to have
        # gradients (there are none at zero), too little to matter.
        spread = 0.5 / math.sqrt(rows * init_scale)
        self.pseudo = nn.Parameter(spread * torch.randn_like(weight.new_empty(num_pseudo, rows)))  # (m, in + 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs."""
        rows = x if self.mean.bias is None else F.pad(x, (0, 1), value=1.0)
        variance = rows.square() @ self.log_rows.exp()
        if len(self.pseudo):
            seen = F.linear(rows, self.pseudo * self.log_rows.exp())  # (..., m)
            half = torch.linalg.solve_triangular(self._cholesky().mT, seen.flatten(0, -2), upper=True, left=False)
            variance = variance - half.square().sum(-1).reshape(variance.shape)
        return self.mean(x), variance.unsqueeze(-1) * self.log_columns.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.noisy(*self.moments(x))

    def _cholesky(self) -> Tensor:
        """Of :math:`I + \\tilde A \\operatorname{diag}(u) \\tilde A^T`, ``(m, m)``."""
        scaled = self.pseudo * (0.5 * self.log_rows).exp()
        inner = scaled @ scaled.mT
        return torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))

    def kl(self) -> Tensor:
        r""":math:`\frac12 [\operatorname{tr} U \operatorname{tr} V + \lVert M \rVert^2 - RC - C \log\det U
        - R \log\det V]` for R rows and C columns."""
        trace, log_det = self.log_rows.exp().sum(), self.log_rows.sum()
        if len(self.pseudo):
            cholesky, weighted = self._cholesky(), self.pseudo * self.log_rows.exp()
            trace = trace - torch.cholesky_solve(weighted @ weighted.mT, cholesky).trace()
            log_det = log_det - 2 * cholesky.diagonal().log().sum()
        rows, columns = len(self.log_rows), len(self.log_columns)
        square = sum(p.square().sum() for p in self.mean.parameters())
        moment = trace * self.log_columns.exp().sum() + square - rows * columns
        return 0.5 * (moment - columns * log_det - rows * self.log_columns.sum())
