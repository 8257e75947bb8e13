r"""A point estimate: the mode of the posterior under a Gaussian prior.

.. math:: q(W) = \delta(W - \Theta), \qquad
          \Theta = \arg\max_W \sum_n \log p(y_n \mid x_n, W) - \frac{\lVert W \rVert^2}{2 \sigma^2}

**Cost**: one pass per step, the weights and Adam's two moments of them: the measure of all others. **Prefer it** where
only the mean prediction counts, and as the line that any other method has to beat.
"""

from typing import Any

from torch import Tensor, nn

from pyro_vsd.baselines.protocol import NetworkMethod, gaussian_penalty

__all__ = ["MAP"]


class MAP(NetworkMethod):
    """Maximum a posteriori; predictions have one sample.

    Options:

    :param prior_scale: σ of the Gaussian prior on the weights (weight decay :math:`1/\\sigma^2`, in the loss itself);
        ``None`` for maximum likelihood.

    >>> import torch, pyro_vsd as vsd
    >>> method = MAP(vsd.nn.mlp([4, 8, 3]), num_data=100)
    >>> loss = method.step(torch.randn(10, 4), torch.arange(10) % 3)
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    1
    """

    max_samples = 1

    def build(self, net: nn.Module, *, prior_scale: float | None = 1.0) -> None:
        self.use(net)
        self.prior_scale = prior_scale

    def loss(self, x: Any, y: Tensor) -> Tensor:
        return super().loss(x, y) + gaussian_penalty(self.net.parameters(), self.prior_scale)
