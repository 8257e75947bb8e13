r"""Monte Carlo dropout: Bernoulli noise on the inputs of each layer, in training and in prediction.

.. math:: W = \operatorname{diag}(\xi)\,\Theta, \qquad (1 - p)\,\xi_i \sim \mathrm{Bernoulli}(1 - p), \qquad
          \operatorname{Var} \xi_i = \frac{p}{1 - p}

Gal, Ghahramani, "Dropout as a Bayesian Approximation", 2016. The loss adds
:math:`\mathbb E_q[-\log p(W)] = \lVert \Theta \rVert^2 / 2 \sigma^2 (1 - p)` of a Gaussian prior, without its constant.
A unit is an input of a Linear or an input channel of a convolution. Positions (tokens, pixels) share a mask.

**Cost** against MAP: a mask per layer, 1.1 to 1.4 × the time; no memory beside the masks. **Prefer it** as the simplest
method: no parameter more than MAP; the rate is the user's to choose.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.protocol import gaussian_penalty
from pyro_vsd.nn.bayesian_network import candidates, select

__all__ = ["MCDropout"]


class MCDropout(MAP):
    """Dropout that stays on, in the layers of ``include`` without those of ``exclude``.

    :param rate: p, of all layers but the first; or ``{path: p}`` for layers by name, the others then have none.
    :param input_rate: p of the first layer's inputs, the data, where ``rate`` is a number.
    :param prior_scale: σ of the Gaussian prior; ``None`` for none.

    >>> MCDropout(vsd.nn.mlp([4, 8, 3]), num_data=100, rate=0.2).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    chooses_layers = True
    max_samples = None

    def build(
        self,
        net: nn.Module,
        *,
        rate: float | Mapping[str, float] = 0.5,
        input_rate: float = 0.0,
        prior_scale: float | None = 1.0,
    ) -> None:
        super().build(net, prior_scale=prior_scale)
        layers = candidates(net)
        chosen = select(layers, self.include, self.exclude)
        if isinstance(rate, Mapping):
            paths = [path for c in chosen for path in c.paths]
            if unknown := sorted(set(rate) - set(paths)):
                raise ValueError(f"rate names {unknown}, and the layers are {paths}.")
            rates = [max([rate.get(path, 0.0) for path in c.paths]) for c in chosen]
        else:
            rates = [input_rate if c.layer is layers[0].layer else rate for c in chosen]
        self.rates: dict[str, float] = {}
        for candidate, p in zip(chosen, rates, strict=True):
            if not 0 <= p < 1:
                raise ValueError(f"rate must be from 0 to below 1, not {p} for layer {candidate.paths[0]!r}.")
            self.rates[f"{candidate.paths[0]}.weight".lstrip(".")] = p
            if p > 0:
                candidate.layer.register_forward_pre_hook(partial(_mask, p))

    def penalty(self) -> Tensor | float:
        return sum(
            gaussian_penalty([weight], self.prior_scale) / (1 - self.rates.get(name, 0.0))
            for name, weight in self.net.named_parameters()
            if weight.dim() > 1
        )


def _mask(p: float, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Multiplies a layer's input by noise: one vector over its units for each example."""
    x, *rest = inputs
    channel = 1 - layer.weight.dim()  # (..., K) for a Linear, (..., K, height, width) for images
    shape = [1] * x.dim()
    shape[channel] = x.shape[channel]
    if x.dim() > -channel:
        shape[0] = len(x)
    if tuple(shape) == tuple(x.shape):
        return (F.dropout(x, p), *rest)
    return (x * F.dropout(x.new_ones(shape), p), *rest)
