"""The observation model of numbers: Gaussian noise of known, learned, latent or predicted size."""

import math
import numbers
from itertools import chain
from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_vsd.nn.observation import ObservationModel

__all__ = ["Regressor"]

KINDS = ("learned", "latent", "heteroscedastic")
# Where log σ starts (learned) and has its median (latent): noise of about a third of standardised targets.
LOG_SIGMA = -1.0
# Log-variances stay within ± this: a variance below e⁻¹⁰ of standardised targets is a failure, not a fit.
LOG_VARIANCE_BOUND = 10.0


class Regressor(ObservationModel):
    r"""Numbers with Gaussian noise.

    .. math:: y_n \sim \mathcal N(f_W(x_n), \sigma^2)

    ==============================  ==========================================================================
    ``noise``                       σ
    ==============================  ==========================================================================
    a number                        that number
    ``"learned"``                   a parameter ``log_sigma``, which starts at -1
    ``"latent"``                    a site ``sigma`` with the prior ``LogNormal(-1, 1)``
    ``"heteroscedastic"``           the network's: 2D outputs, D means, then D log-variances ρ; the variance is
                                    :math:`\exp(10 \tanh(\rho / 10))`, so that it can neither vanish nor explode
    ==============================  ==========================================================================

    The starts and the prior suit targets of unit scale: standardise.

    **Shapes.** Outputs ``(B, D)`` go with targets ``(B, D)``; a single output, ``(B, 1)`` or ``(B,)``, goes with
    targets ``(B,)``, and predictions then are ``(B,)``.

    :param net: a Bayesian network.
    :param num_data: the number of rows of the whole training set.
    :param noise: see the table.
    :param num_outputs: for learned and latent noise: D, to give each output its own σ. By default all outputs share
        one.

    >>> import pyro_vsd as vsd
    >>> model = Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 20, 1])), num_data=300, noise="latent")
    >>> list(model.latent_sites())
    ['net.0.weight', 'net.2.weight', 'sigma']
    >>> model(torch.randn(7, 3)).shape
    torch.Size([7])
    """

    log_sigma: Tensor
    sigma: Any

    def __init__(self, net: nn.Module, num_data: int, noise: float | str = 0.1, num_outputs: int | None = None):
        if isinstance(noise, str):
            if noise not in KINDS:
                raise ValueError(f"noise: expected a number or one of {', '.join(map(repr, KINDS))}, got {noise!r}.")
        elif not isinstance(noise, numbers.Real) or not 0 < float(noise) < math.inf:
            raise ValueError(f"noise: expected a positive finite standard deviation, got {noise!r}.")
        whole = isinstance(num_outputs, numbers.Integral) and not isinstance(num_outputs, bool)
        if num_outputs is not None and (noise not in ("learned", "latent") or not whole or num_outputs < 1):
            raise ValueError(
                f"num_outputs: expected a positive number, with learned or latent noise, got {num_outputs!r} with "
                f"noise={noise!r}."
            )
        super().__init__(net, num_data)
        self.noise = noise
        self.num_outputs = num_outputs
        like = next(chain(net.parameters(), net.buffers()))
        shape = () if num_outputs is None else (num_outputs,)
        start = torch.full(shape, LOG_SIGMA, dtype=like.dtype, device=like.device)
        if noise == "learned":
            self.log_sigma = nn.Parameter(start)
        elif noise == "latent":
            self.register_buffer("sigma_loc", start, persistent=False)
            self.sigma = PyroSample(_SigmaPrior())

    def likelihood(self, output: Tensor, y: Tensor | None) -> tuple[Any, int, Tensor | None]:
        mean, sigma, num_rows, single = self._moments(output)
        if y is not None:
            _check_targets(y, mean, single)
            y = y.to(mean.dtype)
        law: Any = dist.Normal(mean, sigma, validate_args=False)
        return (law if single else law.to_event(1)), num_rows, y

    def _moments(self, output: Tensor) -> tuple[Tensor, Any, int, bool]:
        """Mean and σ of shape ``(..., B)`` where there is a single output, else ``(..., B, D)``."""
        if output.dim() == 1:
            output = output.unsqueeze(-1)
        if self.noise == "heteroscedastic":
            if output.shape[-1] % 2:
                raise ValueError(
                    f"net: expected an even number of outputs, means and log-variances, got {tuple(output.shape)} "
                    "with noise='heteroscedastic'."
                )
            mean, raw = output.chunk(2, -1)
            sigma: Any = (0.5 * LOG_VARIANCE_BOUND * (raw / LOG_VARIANCE_BOUND).tanh()).exp()
        else:
            mean, sigma = output, self._shared_sigma(output)
        num_rows, num_outputs = mean.shape[-2:]
        if num_outputs != 1:
            return mean, sigma, num_rows, False
        if isinstance(sigma, Tensor) and sigma.dim():
            sigma = sigma.squeeze(-1)
        return mean.squeeze(-1), sigma, num_rows, True

    def _shared_sigma(self, output: Tensor) -> Any:
        """σ, broadcastable with outputs ``(..., B, D)``."""
        if self.num_outputs not in (None, output.shape[-1]):
            raise ValueError(f"net: expected {self.num_outputs} outputs (num_outputs), got {tuple(output.shape)}.")
        if self.noise == "learned":
            return self.log_sigma.exp()
        if self.noise == "latent":
            sigma = self.sigma
            # A draw for vectorised particles has their dimensions in front.
            return sigma.unsqueeze(-1) if self.num_outputs is None and sigma.dim() else sigma
        return self.noise


class _SigmaPrior:
    """The prior of a latent σ; a class, since Pyro renames functions it is given, which then cannot be pickled."""

    def __call__(self, model: PyroModule) -> Any:
        loc = model._buffers["sigma_loc"]
        assert loc is not None
        law = dist.LogNormal(loc, torch.ones_like(loc), validate_args=False)
        return law.to_event(1) if loc.dim() else law


def _check_targets(y: Tensor, mean: Tensor, single: bool) -> None:
    expected = tuple(mean.shape[-1:] if single else mean.shape[-2:])
    if tuple(y.shape) == expected:
        return
    hint = ""
    if single and tuple(y.shape) == (*expected, 1):
        hint = " A network of one output goes with targets of one dimension: use y.squeeze(-1)."
    elif not single and y.dim() == 1:
        hint = f" The network has {expected[-1]} outputs per row: give it one, or y a column for each."
    raise ValueError(f"y: expected shape {expected}, the network's outputs, got {tuple(y.shape)}.{hint}")
