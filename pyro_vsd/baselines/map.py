r"""A point estimate: the mode of the posterior under a Gaussian prior.

.. math:: q(W) = \delta(W - \Theta), \qquad
          \Theta = \arg\max_W \sum_n \log p(y_n \mid x_n, W) - \frac{\lVert W \rVert^2}{2 \sigma^2}

**Cost**: one pass per step, the weights and Adam's two moments of them: the unit in which the others are measured.
**Prefer it** where only the mean prediction counts, and as the line that any other method has to beat.
"""

from typing import Any

from torch import Tensor, nn

from pyro_vsd.baselines.protocol import Method, gaussian_penalty

__all__ = ["MAP"]


class MAP(Method):
    """Maximum a posteriori; predictions have one sample.

    :param prior_scale: σ of the Gaussian prior on the weights (weight decay :math:`1/\\sigma^2`, in the loss itself);
        ``None`` for maximum likelihood.

    >>> MAP(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    1
    """

    chooses_layers = False
    max_samples: int | None = 1

    def build(self, net: nn.Module, *, prior_scale: float | None = 1.0) -> None:
        self.use(net)
        self.prior_scale = prior_scale

    def loss(self, x: Any, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.penalty()

    def penalty(self) -> Tensor | float:
        """The negative log-density of the prior, without its constant."""
        return gaussian_penalty(self.net.parameters(), self.prior_scale)
