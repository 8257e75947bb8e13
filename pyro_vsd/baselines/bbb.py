r"""Bayes by Backprop (BBB): a factorised Gaussian over weights and biases.

.. math:: q(W) = \prod_{ij} \mathcal N(W_{ij}; \mu_{ij}, \sigma_{ij}^2)

``bbb``
    The prior is a mixture of two scales,
    :math:`p(w) = \pi\, \mathcal N(w; 0, \sigma_1^2) + (1 - \pi)\, \mathcal N(w; 0, \sigma_2^2)` for each weight. The KL
    has no closed form: it is averaged over the draws of the step, two as in the paper. A draw serves the whole batch.
    **Cost** against MAP: as many passes as draws; with two, about 10 × the time on wide Linear layers and 4 × on LeNet;
    twice the parameters, and a copy of the weights per draw. **Prefer it** where the prior is not a Gaussian.
``bbb_lrt``
    The local reparameterisation: noise on pre-activations in the place of weights,
    :math:`(xW)_j \sim \mathcal N(\sum_i x_i \mu_{ij}, \sum_i x_i^2 \sigma_{ij}^2)`, under the prior
    :math:`\mathcal N(0, \sigma_p^2)` with the KL in closed form. Each example has its own noise, so gradients have a
    far smaller variance. Positions of an example (in a convolution, or tokens) share weights; their noise is drawn
    independently, as is usual. **Cost**: two products per layer, about 2 × the time; twice the parameters and
    pre-activations. **Prefer it** to plain Bayes by Backprop whenever a Gaussian prior will do.

**Reference**: Blundell et al., *Weight Uncertainty in Neural Networks*, 2015; Kingma, Salimans & Welling, *Variational
Dropout and the Local Reparameterization Trick*, 2015.
"""

import math
from operator import attrgetter
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from pyro.distributions import TorchDistribution
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints
from torch.func import functional_call

from pyro_vsd._utils import check_positive
from pyro_vsd.baselines.layers import LayerwiseMethod, RandomLayer, chosen_layers, linear_map
from pyro_vsd.baselines.protocol import GuideMethod, KLWeight

__all__ = ["BBB", "BBBLocal", "LocalLayer", "TwoScaleNormal", "gaussian_kl"]


class BBB(GuideMethod):
    """Bayes by Backprop for Linear and convolution layers: an ``AutoNormal`` guide and ``Trace_ELBO``.

    :param pi: π, the share of the prior's wide component. The paper searches π in ¼, ½, ¾,
        :math:`-\\log \\sigma_1` in 0, 1, 2 and :math:`-\\log \\sigma_2` in 6, 7, 8.
    :param sigma1: the prior's wide scale.
    :param sigma2: the prior's narrow scale.
    :param init_scale: σ of every weight at the start; the means start at the network's weights.
    :param num_particles: draws of the weights per step.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.

    >>> BBB(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self,
        net: nn.Module,
        *,
        pi: float = 0.5,
        sigma1: float = 1.0,
        sigma2: float = math.exp(-6),
        init_scale: float = 0.05,
        num_particles: int = 2,
        kl_weight: KLWeight = 1.0,
    ) -> None:
        layers = chosen_layers(self, net)
        weights = {f"{path}.{n}".lstrip("."): p for path, layer in layers.items() for n, p in layer.named_parameters()}
        priors = {name: TwoScaleNormal(pi, sigma1, sigma2, p, validate_args=False) for name, p in weights.items()}
        starts = {f"net.{name}": p.detach().clone() for name, p in weights.items()}

        def sites(*args: Any) -> None:  # the latent ones alone: the guide is set up without data
            for name, prior in priors.items():
                pyro.sample(f"net.{name}", prior)

        guide = AutoNormal(sites, init_loc_fn=init_to_value(values=starts), init_scale=init_scale)
        self.kl_weight = kl_weight
        self.compose(self.observed(_SampledNetwork(net, priors)), guide, Trace_ELBO(num_particles=num_particles))
        with self.own_store():
            guide()  # makes its parameters

    def loss(self, x: Any, y: Tensor) -> Tensor:
        with _LatentScale(self.kl_weight(self.num_steps) if callable(self.kl_weight) else self.kl_weight):
            return super().loss(x, y)


class _SampledNetwork(PyroModule):
    """A network with sample sites in the place of the parameters that ``priors`` names; these become buffers."""

    def __init__(self, net: nn.Module, priors: dict[str, "TwoScaleNormal"]):
        super().__init__()
        self._plain, self._names = net, list(priors)
        for name, prior in priors.items():
            path, _, attribute = name.rpartition(".")
            layer: Any = net.get_submodule(path)
            layer.register_buffer(attribute, layer._parameters.pop(attribute).detach(), persistent=False)
            deep_setattr(self, name, PyroSample(prior))

    def forward(self, *x: Any) -> Any:
        drawn = {name: attrgetter(name)(self) for name in self._names}
        # past PyroModule's lookup, which would put plain parameters into Pyro's store
        plain: Any = self._modules["_plain"]
        return functional_call(plain, drawn, x)


class _LatentScale(Messenger):
    """Scales the densities of latent sites, in the model and in the guide: their difference is the KL."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.scale


class TwoScaleNormal(TorchDistribution):
    r"""Independent mixtures :math:`\pi\, \mathcal N(0, \sigma_1^2) + (1 - \pi)\, \mathcal N(0, \sigma_2^2)`.

    Seven times as fast as ``MixtureSameFamily``, which keeps both components of every entry.

    :param like: a tensor of the event's shape, dtype and device.

    >>> TwoScaleNormal(0.25, 2.0, 1.0, torch.zeros(3)).log_prob(torch.zeros(3)).shape
    torch.Size([])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, pi: float, sigma1: float, sigma2: float, like: Tensor, *, validate_args: bool | None = None):
        if not 0 < pi < 1:
            raise ValueError(f"pi must be between 0 and 1, not {pi!r}.")
        check_positive("sigma1", sigma1)
        check_positive("sigma2", sigma2)
        self.pi, self.sigma1, self.sigma2 = pi, sigma1, sigma2
        self.kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        super().__init__(torch.Size(), like.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        eps = torch.randn(shape, **self.kind)
        return eps * torch.where(torch.rand(shape, **self.kind) < self.pi, self.sigma1, self.sigma2)

    def log_prob(self, value: Tensor) -> Tensor:
        square = value.square()
        wide, narrow = (
            math.log(share / sigma) - square / (2 * sigma**2)
            for share, sigma in ((self.pi, self.sigma1), (1 - self.pi, self.sigma2))
        )
        # log(e^wide + e^narrow). Below -80 the narrow share is nothing, and its exponential a subnormal number, which
        # processors are slow at.
        density = wide + F.softplus((narrow - wide).clamp(min=-80.0))
        constant = 0.5 * math.log(2 * math.pi) * self.event_shape.numel()
        return density.flatten(value.dim() - len(self.event_shape)).sum(-1) - constant


# ---- the local reparameterisation


class BBBLocal(LayerwiseMethod):
    """Bayes by Backprop with the local reparameterisation, for Linear and convolution layers.

    :param prior_scale: σ of the Gaussian prior.
    :param init_scale: σ of every weight at the start; the means start at the network's weights.
    :param kl_weight: factor of the KL, a number or a schedule ``step -> weight``.

    >>> BBBLocal(vsd.nn.mlp([4, 8, 3]), num_data=100).predict(torch.randn(5, 4), num_samples=7).num_samples
    7
    """

    def build(
        self, net: nn.Module, *, prior_scale: float = 1.0, init_scale: float = 0.05, kl_weight: KLWeight = 1.0
    ) -> None:
        self.replace(net, lambda layer: LocalLayer(layer, prior_scale, init_scale), kl_weight)


class LocalLayer(RandomLayer):
    """A layer with a factorised Gaussian posterior, drawn at its outputs; its options are those of the method."""

    def __init__(self, layer: Any, prior_scale: float, init_scale: float):
        super().__init__(layer)
        self.prior_scale = prior_scale
        start = 2 * math.log(init_scale)
        self.log_variance = nn.ParameterDict({name: torch.full_like(p, start) for name, p in layer.named_parameters()})

    def variance(self, x: Tensor) -> Tensor:
        """The variance of the outputs."""
        variances = {name: value.exp() for name, value in self.log_variance.items()}
        return linear_map(self.mean, x.square(), variances["weight"], variances.get("bias"))

    def forward(self, x: Tensor) -> Tensor:
        variance = self.variance(x)  # before the mean: the order in which ELRG's gradients are summed
        return self.noisy(self.mean(x), variance)

    def kl(self) -> Tensor:
        pairs = [(mean, self.log_variance[name]) for name, mean in self.mean.named_parameters()]
        terms = [gaussian_kl(m.square().sum(), v.exp().sum(), v, self.prior_scale) for m, v in pairs]
        return torch.stack(terms).sum()


def gaussian_kl(square: Tensor, variance: Tensor, log_variance: Tensor, prior_scale: float) -> Tensor:
    r""":math:`\frac12 \sum [(\sigma^2 + \mu^2) / \sigma_p^2 - 1 - \log(\sigma^2 / \sigma_p^2)]`, from the sums of
    squared means and of variances."""
    constant = log_variance.numel() * (2 * math.log(prior_scale) - 1)
    return 0.5 * ((square + variance) / prior_scale**2 - log_variance.sum() + constant)
