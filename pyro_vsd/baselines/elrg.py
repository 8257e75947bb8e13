r"""A Gaussian with a low-rank covariance in each layer, drawn at the pre-activations (ELRG).

.. math:: q(w) = \mathcal N\big(\mu, \operatorname{diag}(\sigma^2) + V^{\mathsf T} V\big), \qquad V \in R^{r \times D}

for the vector w of all D weights and biases of one layer, under the prior :math:`\mathcal N(0, \sigma_p^2)`. A row of V
has the shape of the layer's weight, so that a pre-activation is drawn without drawing weights:

.. math:: h = x \mu + \sqrt{x^2 \sigma^2} \odot \epsilon + \sum_{k=1}^r \zeta_k\, x V_k

with ε for every entry and ζ for every example; positions in a convolution share ζ. The KL is in closed form, with the
determinant of an :math:`r \times r` matrix.

**Reference**: Tomczak, Swaroop & Turner, *Efficient Low Rank Gaussian Variational Inference for Neural Networks*, 2020.

**Cost** against MAP: r + 2 products per layer, with r = 2 about 3 to 5 × the time; r + 2 times the parameters and
pre-activations. **Prefer it** where weights of a layer act together; convolutions admit it, too.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pyro_vsd._utils import check_integer
from pyro_vsd.baselines.bbb import LocalLayer, gaussian_kl
from pyro_vsd.baselines.layers import LayerwiseMethod, linear_map
from pyro_vsd.baselines.protocol import KLWeight

__all__ = ["ELRG", "LowRankLayer"]


class ELRG(LayerwiseMethod):
    """Low-rank Gaussian posteriors of Linear and convolution layers, biases included.

    :param rank: r, the number of rows of V in each layer.
    :param prior_scale: σ of the Gaussian prior.
    :param init_scale: σ of every weight at the start, half of its variance from V; the means start at the network's.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.

    >>> ELRG(vsd.nn.mlp([4, 8, 3]), num_data=100, rank=2).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        rank: int = 2,
        prior_scale: float = 1.0,
        init_scale: float = 0.05,
        kl_weight: KLWeight = 1.0,
    ) -> None:
        check_integer("rank", rank, 1)
        self.replace(net, lambda layer: LowRankLayer(layer, rank, prior_scale, init_scale), kl_weight)


class LowRankLayer(LocalLayer):
    """A layer with a Gaussian posterior of covariance diagonal plus low rank; its options are those of the method."""

    def __init__(self, layer: Any, rank: int, prior_scale: float, init_scale: float):
        super().__init__(layer, prior_scale, init_scale)
        self.rank = rank
        for value in self.log_variance.values():
            nn.init.constant_(value, math.log(init_scale**2 / 2))
        spread = init_scale / math.sqrt(2 * rank)
        factors = {name: spread * torch.randn((rank, *p.shape)).to(p) for name, p in layer.named_parameters()}
        self.factors = nn.ParameterDict(factors)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        biases = self.factors["bias"] if "bias" in self.factors else [None] * self.rank
        for weight, bias in zip(self.factors["weight"], biases, strict=True):
            zeta = torch.randn((len(out),) + (1,) * (out.dim() - 1), dtype=out.dtype, device=out.device)
            out = out + zeta * linear_map(self.mean, x, weight, bias)
        return out

    def kl(self) -> Tensor:
        r""":math:`\frac12 [(\lVert\mu\rVert^2 + \lVert\sigma\rVert^2 + \lVert V \rVert^2)/\sigma_p^2 - D
        - \sum \log(\sigma^2 / \sigma_p^2) - \log\det(I_r + V \operatorname{diag}(\sigma^{-2}) V^{\mathsf T})]`.
        """
        terms, inner = [], []
        for name, mean in self.mean.named_parameters():
            log_variance, factors = self.log_variance[name], self.factors[name].flatten(1)  # (r, D)
            moment = mean.square().sum() + log_variance.exp().sum()
            terms.append(gaussian_kl(moment, factors.square().sum(), log_variance, self.prior_scale))
            scaled = factors * (-0.5 * log_variance).exp().flatten()
            inner.append(scaled @ scaled.mT)  # (r, r)
        determinant = torch.stack(inner).sum(0) + torch.eye(self.rank, dtype=inner[0].dtype, device=inner[0].device)
        return torch.stack(terms).sum() - torch.linalg.cholesky(determinant).diagonal().log().sum()
