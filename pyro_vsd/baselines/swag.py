r"""SWAG: a Gaussian fitted to the path of stochastic gradient descent.

.. math:: q(W) = \mathcal N\Bigl(\bar\theta,\ \tfrac12 \Bigl(\Sigma_{\mathrm{diag}}
          + \frac{\hat D \hat D^\top}{K - 1}\Bigr)\Bigr)

with the mean and the variances of the snapshots :math:`\theta_i`, and as columns of :math:`\hat D` the last K
deviations :math:`\theta_i - \bar\theta_i` from the mean so far.

Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep Learning", 2019.

**Cost** against MAP: the same step, and a snapshot per epoch; K + 2 more copies of the weights; a new network per
sample in prediction. **Prefer it** for large networks that are trained by SGD anyway.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, update_bn

from pyro_vsd._utils import check_integer, check_nonnegative, check_positive
from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.protocol import call
from pyro_vsd.prediction import Prediction

__all__ = ["SWAG"]


class SWAG(MAP):
    """Stochastic weight averaging, Gaussian. Trained by SGD with momentum on the loss per row.

    :param start: epochs before snapshots begin; give half to three quarters of all epochs.
    :param period: epochs from one snapshot to the next.
    :param max_rank: K, deviations kept.
    :param momentum: of SGD.
    :param max_norm: bound on the norm of the gradient of the loss per row: in regression a learned σ that shrinks would
        make steps of SGD ever larger. ``None`` for none.
    :param scale: factor on the standard deviation of draws.
    :param prior_scale: σ of the Gaussian prior on the weights; ``None`` for none.

    >>> method = SWAG(vsd.nn.mlp([4, 8, 3]), num_data=10, start=0)
    >>> losses = [method.step(torch.randn(10, 4), torch.arange(10) % 3) for _ in range(4)]
    >>> method.predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    default_lr = 1e-2
    max_samples = None
    squares: Tensor
    deviations: Tensor

    def build(
        self,
        net: nn.Module,
        *,
        start: float = 10.0,
        period: float = 1.0,
        max_rank: int = 20,
        momentum: float = 0.9,
        max_norm: float | None = 5.0,
        scale: float = 1.0,
        prior_scale: float | None = 1.0,
    ) -> None:
        check_nonnegative("start", start)
        check_positive("period", period)
        check_integer("max_rank", max_rank, 2)
        super().build(net, prior_scale=prior_scale)
        self.start, self.period, self.momentum, self.max_norm = start, period, momentum, max_norm
        self.scale, self.rows_seen = scale, 0
        self.average = AveragedModel(net).requires_grad_(False)
        size = _vector(net.parameters()).detach()
        self.register_buffer("squares", torch.zeros_like(size))  # of deviations, summed
        self.register_buffer("deviations", size.new_zeros(max_rank, len(size)))
        self.batch_norm_data: Iterable[Any] | None = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for part in (self.net, self.observation) for p in part.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.num_data)
        if self.max_norm is not None:
            clip_grad_norm_([*self.net.parameters(), *self.observation.parameters()], self.max_norm)

    def step(self, x: Any, y: Tensor) -> float:
        loss = super().step(x, y)
        self.rows_seen += len(y)
        # rounding must not cost a snapshot
        due = math.floor((self.rows_seen / self.num_data - self.start) / self.period + 1e-6)
        if due > self.num_snapshots:
            self.collect()
        return loss

    @property
    def num_snapshots(self) -> int:
        """Snapshots taken."""
        return int(self.average.n_averaged)

    @property
    def mean(self) -> Tensor:
        """The mean of the snapshots, all parameters in one vector ``(D,)``."""
        return _vector(self.average.parameters())

    @property
    def variance(self) -> Tensor:
        """The variances of the snapshots, ``(D,)``."""
        return self.squares / max(self.num_snapshots, 1)

    @torch.no_grad()
    def collect(self) -> None:
        """Takes a snapshot of the network; ``step`` does so by itself once per period."""
        number = self.num_snapshots
        current = _vector(self.net.parameters())
        before = current - self.mean
        self.average.update_parameters(self.net)
        after = current - self.mean
        if number > 0:
            self.squares.addcmul_(before, after)  # Welford: no difference of large numbers
        self.deviations[number % len(self.deviations)] = after

    def draw_weights(self) -> Tensor:
        """A draw from the posterior, all parameters in one vector ``(D,)``."""
        number = self.num_snapshots
        if number < 2:
            raise ValueError(
                f"a prediction needs two snapshots, and there are {number} after {self.rows_seen / self.num_data:.1f} "
                f"epochs. Train longer, or begin earlier: start={self.start}, period={self.period}."
            )
        columns = self.deviations[: min(number, len(self.deviations))]
        own, shared = torch.randn_like(self.squares), columns.new_empty(len(columns)).normal_()
        spread = self.variance.sqrt() * own + shared @ columns / math.sqrt(len(columns) - 1)
        return self.mean + self.scale * math.sqrt(0.5) * spread

    def draw(self, index: int) -> Callable[[Any], Any]:
        net = copy.deepcopy(self.average.module)
        vector_to_parameters(self.draw_weights(), net.parameters())
        if self.batch_norm_data is not None:
            update_bn(self.batch_norm_data, net)
        return lambda x: self.observation.distribution(call(net, x))

    def predict(
        self, x: Any, num_samples: int = 100, *, batch_norm_data: Iterable[Any] | None = None, **options: Any
    ) -> Prediction:
        """As for all methods, and:

        :param batch_norm_data: batches of training inputs (or tuples that begin with them), to estimate the statistics
            of BatchNorm layers anew for each draw. By default they are those of the last snapshot.
        """
        self.batch_norm_data = None if batch_norm_data is None else list(batch_norm_data)
        try:
            return super().predict(x, num_samples, **options)
        finally:
            self.batch_norm_data = None

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "rows_seen": self.rows_seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.rows_seen = int(state["rows_seen"])


def _vector(parameters: Iterable[Tensor]) -> Tensor:
    """All parameters in one vector; unlike ``parameters_to_vector`` of torch, also those stored with channels last."""
    return torch.cat([p.reshape(-1) for p in parameters])
