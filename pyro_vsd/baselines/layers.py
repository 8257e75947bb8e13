"""What methods that work layer by layer share: random layers in the place of a network's own, and natural gradients
from the inputs and outputs of layers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyro_vsd._utils import base_distribution, check_choice, check_integer
from pyro_vsd.baselines.protocol import KLWeight, Method
from pyro_vsd.distributions.layers import Layer, layer_of
from pyro_vsd.nn.bayesian_network import candidates, select

__all__ = ["LayerwiseMethod", "NaturalGradientMethod", "RandomLayer", "chosen_layers", "linear_map", "recorded"]

# Below this a pre-activation counts as certain: the square root's gradient stays finite where all inputs are zero.
_TINY = 1e-16

#: for each layer, each time it is called, a tensor at its input and one at its output
Passes = dict[nn.Module, list[tuple[Tensor, Tensor]]]


def chosen_layers(method: Method, net: nn.Module, linear_only: str | None = None) -> dict[str, nn.Module]:
    """Linear and convolution layers by their paths, each once, as ``include`` and ``exclude`` say; not frozen ones.

    :param linear_only: why the method has no convolutions, a full sentence; a chosen one then raises.
    """
    # Attention reads the weight of its out_proj past the layer's forward: that one stays as it is.
    past = nn.modules.linear.NonDynamicallyQuantizableLinear
    layers = [c for c in candidates(net) if not isinstance(c.layer, past)]
    layers = [c for c in layers if all(p.requires_grad for p in c.layer.parameters())]
    chosen = {c.paths[0]: c.layer for c in select(layers, method.include, method.exclude)}
    for path, layer in chosen.items():
        if linear_only and kind_of(layer).convolution:
            raise ValueError(
                f"net has a {type(layer).__name__} at {path!r}, and {type(method).__name__} is for Linear layers only. "
                f"{linear_only} Leave convolutions point estimates, exclude=nn.Conv2d, or take 'elrg'."
            )
    return chosen


def kind_of(layer: nn.Module) -> Layer:
    """The row of the table of layers."""
    row = layer_of(layer)
    assert row is not None
    return row


def linear_map(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``layer`` does to ``x``, with this weight and bias in the place of its own.

    >>> linear_map(nn.Conv2d(1, 1, 2), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).item()
    4.0
    """
    kind = kind_of(layer)
    function: Callable[..., Tensor] = kind.function
    geometry: tuple[Any, ...] = ()
    if kind.transposed:
        geometry = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
    elif kind.convolution:
        function = layer._conv_forward  # which pads by reflection too
    return function(x, weight, bias, *geometry)


class RandomLayer(nn.Module):
    """A Linear or convolution layer whose outputs are drawn; its parameters become the means."""

    #: the KL to the prior
    kl: Callable[[], Tensor]

    def __init__(self, layer: Any):
        super().__init__()
        self.mean = layer

    @staticmethod
    def noisy(mean: Tensor, variance: Tensor) -> Tensor:
        """A draw of the outputs, each by itself."""
        return mean + variance.clamp(min=_TINY).sqrt() * torch.randn_like(mean)


class LayerwiseMethod(Method):
    """A method that puts random layers in the place of a network's own and pays for their KLs."""

    def replace(
        self, net: nn.Module, make: Callable[[Any], RandomLayer], kl_weight: KLWeight, linear_only: str | None = None
    ) -> None:
        """Uses the network with ``make(layer)`` in the place of each chosen layer."""
        made = {id(layer): make(layer) for layer in chosen_layers(self, net, linear_only).values()}
        for parent in list(net.modules()):
            for name, child in parent._modules.items():
                if id(child) in made:
                    parent._modules[name] = made[id(child)]
        self.use(made.get(id(net), net))
        self.layers = list(made.values())
        self.kl_weight = kl_weight

    def kl(self) -> Tensor:
        """The KL of all random layers to the prior."""
        return torch.stack([layer.kl() for layer in self.layers]).sum()

    def loss(self, x: Any, y: Tensor) -> Tensor:
        weight = self.kl_weight(self.num_steps) if callable(self.kl_weight) else self.kl_weight
        return super().loss(x, y) + weight * self.kl()


class NaturalGradientMethod(Method):
    """A method whose optimiser holds a Gaussian around the network's parameters (``random``).

    The parameters in ``others``, such as norms and a learned noise, are point estimates and trained by Adam.
    """

    optimizer: Any
    curvatures: tuple[str, ...] = ("empirical", "fisher")
    #: whether gradients are those of the full data's loss; else of the mean over examples
    full_data = True
    #: a draw of the random parameters by their names, detached
    sample: Callable[[], dict[str, Tensor]]
    #: what ``collect`` adds to, for one random parameter
    start: Callable[[Tensor], Any]
    #: ``collect(found, own, passes, rows)`` adds one draw's share to ``found {parameter: start}``, with which the
    #: optimiser updates its precision: from the gradients (first those of the random parameters), each layer's inputs
    #: with the gradients at its outputs, and B
    collect: Callable[[dict[Tensor, Any], tuple[Tensor, ...], Passes, int], None]

    def use_layers(self, net: nn.Module, num_particles: int, curvature: str, linear_only: str | None = None) -> None:
        """Uses the network, with the parameters of the chosen layers random."""
        check_integer("num_particles", num_particles, 1)
        check_choice("curvature", curvature, self.curvatures)
        self.use(net)
        self.layers = list(chosen_layers(self, net, linear_only).values())
        self.num_particles, self.curvature = num_particles, curvature
        inside = {id(p) for layer in self.layers for p in layer.parameters()}
        self.random = {name: p for name, p in net.named_parameters() if id(p) in inside}
        self.others = [p for p in self.parameters() if id(p) not in inside and p.requires_grad]
        self.point_optimizer = torch.optim.Adam(self.others, lr=1e-3) if self.others else None

    def step(self, x: Any, y: Tensor) -> float:
        self.train()
        total = 0.0
        for p in [*self.random.values(), *self.others]:
            p.grad = torch.zeros_like(p)
        found: dict[Tensor, Any] = {p: self.start(p) for p in self.random.values()}
        for _ in range(self.num_particles):
            total += self.particle(x, y, found) / self.num_particles
        total += self.optimizer.step(found)
        if self.point_optimizer is not None:
            self.point_optimizer.step()
        self.num_steps += 1
        return total

    def particle(self, x: Any, y: Tensor, found: dict[Tensor, Any]) -> float:
        """Adds one draw's share to the gradients and to ``found``; returns its loss, of the full data."""
        weights = {name: value.requires_grad_() for name, value in self.sample().items()}
        with recorded(self.layers) as passes:
            output = self.call_with(weights, x)
        rows, fisher = len(y), self.curvature == "fisher"
        scale, share = (self.num_data / rows, 1.0) if self.full_data else (1.0, 1 / rows)
        log_likelihood = self.observation.log_prob(output, y).sum()
        value = self.checked(-self.num_data / rows * log_likelihood)
        outputs = [out for uses in passes.values() for _, out in uses]
        parameters = [*self.random.values(), *self.others]
        own = torch.autograd.grad(
            -scale * log_likelihood,
            [*weights.values(), *self.others, *outputs],
            retain_graph=fisher,
            allow_unused=True,  # zero for what the pass did not use
            materialize_grads=True,
        )
        for p, gradient in zip(parameters, own, strict=False):
            p.grad.add_(gradient, alpha=share / self.num_particles)  # type: ignore[union-attr]
        at_outputs = own[len(parameters) :]
        if fisher:
            drawn = self.observation.log_prob(output, self.drawn_labels(output)).sum()
            at_outputs = torch.autograd.grad(-scale * drawn, outputs)
        gradients = iter(at_outputs)
        inputs = {layer: [(a.detach(), next(gradients)) for a, _ in uses] for layer, uses in passes.items()}
        self.collect(found, own, inputs, rows)
        return value

    def call_with(self, weights: dict[str, Tensor], x: Any) -> Tensor:
        """The network's output with these in the place of its random parameters."""
        output: Tensor = functional_call(self.net, weights, x if isinstance(x, tuple) else (x,))
        return output

    def drawn_labels(self, output: Tensor) -> Tensor:
        """Targets drawn from the model, which make the gradients' outer products the Gauss–Newton matrix on average."""
        distribution = self.observation.distribution(output.detach())
        base = base_distribution(distribution)
        if isinstance(base, torch.distributions.Normal):
            # one standard deviation off, either way: the same on average as Gaussian ones, with less variance
            return base.mean + base.stddev * torch.randn_like(base.mean).sign()
        label: Tensor = distribution.sample()
        return label

    def draw(self, index: int) -> Callable[[Any], Any]:
        weights = self.sample()
        return lambda x: self.observation.distribution(self.call_with(weights, x))

    def get_extra_state(self) -> dict[str, Any]:
        state = super().get_extra_state()
        if self.point_optimizer is not None:
            state["point_optimizer"] = self.point_optimizer.state_dict()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        if self.point_optimizer is not None:
            self.point_optimizer.load_state_dict(state["point_optimizer"])


@contextmanager
def recorded(layers: Iterable[nn.Module]) -> Iterator[Passes]:
    """Notes the input and the output of each layer, each time it is called.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with recorded(net[:1]) as passes:
    ...     _ = net(torch.ones(2, 4))
    >>> [tuple(tensor.shape) for tensor in passes[net[0]][0]]
    [(2, 4), (2, 3)]
    """
    passes: Passes = {}

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        passes.setdefault(layer, []).append((inputs[0], output))

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
