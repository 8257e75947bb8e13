"""What methods that work layer by layer share: random layers in the place of a network's own, and natural gradients
from what goes in and out of layers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_vsd.baselines.protocol import NetworkMethod
from pyro_vsd.nn.selection import CONVOLUTIONS, TRANSPOSED, Selector, candidates, select

__all__ = [
    "LayerwiseMethod",
    "NaturalGradientMethod",
    "RandomLayer",
    "chosen_layers",
    "linear_map",
    "on_channels",
    "recorded",
    "refuse_convolutions",
]

# Below this a pre-activation counts as certain: the square root's gradient stays finite where all inputs are zero.
_TINY = 1e-16
_TRANSPOSED_MAPS: dict[type, Callable[..., Tensor]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def chosen_layers(net: nn.Module, include: Selector | None, exclude: Selector | None) -> dict[str, nn.Module]:
    """Linear and convolution layers by their paths, each once, as ``include`` and ``exclude`` say; not frozen ones."""
    # Attention reads the weight of its out_proj past the layer's forward: that one stays as it is.
    past = nn.modules.linear.NonDynamicallyQuantizableLinear
    layers = [c for c in candidates(net) if not isinstance(c.layer, past) and _trains(c.layer)]
    return {candidate.paths[0]: candidate.layer for candidate in select(layers, include, exclude)}


def _trains(layer: nn.Module) -> bool:
    return all(p.requires_grad for p in layer.parameters())


def refuse_convolutions(layers: dict[str, nn.Module], method: str, reason: str) -> None:
    """Raises where a chosen layer is a convolution.

    :param reason: why the method has none; a full sentence.
    """
    for path, layer in layers.items():
        if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
            raise ValueError(
                f"net: expected Linear layers only for {method}, got a {type(layer).__name__} at {path!r}. {reason} "
                "Leave convolutions point estimates, exclude=nn.Conv2d, or take 'elrg'."
            )


def linear_map(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``layer`` does to ``x``, with this weight and bias in the place of its own.

    >>> linear_map(nn.Conv2d(1, 1, 2), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).item()
    4.0
    """
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(layer, CONVOLUTIONS):
        out: Tensor = layer._conv_forward(x, weight, bias)
        return out
    function = next(function for kind, function in _TRANSPOSED_MAPS.items() if isinstance(layer, kind))
    return function(x, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)


def on_channels(layer: Any, values: Tensor) -> Tensor:
    """``values (..., C)``, one per channel, shaped to meet images ``(..., C, height, width)`` where there are any."""
    return values if isinstance(layer, nn.Linear) else values.reshape(values.shape + (1,) * len(layer.kernel_size))


class RandomLayer(nn.Module):
    """A layer whose outputs are drawn.

    :param layer: a Linear or convolution layer; its parameters become the means.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.mean = layer

    def kl(self) -> Tensor:
        """The KL to the prior."""
        raise NotImplementedError

    @staticmethod
    def noisy(mean: Tensor, variance: Tensor) -> Tensor:
        """A draw of the outputs, each by itself."""
        return mean + variance.clamp(min=_TINY).sqrt() * torch.randn_like(mean)


class LayerwiseMethod(NetworkMethod):
    """A method that puts random layers in the place of a network's own and pays for their KLs."""

    def replace(
        self,
        net: nn.Module,
        layers: dict[str, nn.Module],
        make: Callable[[Any], RandomLayer],
        kl_weight: float | Callable[[int], float],
    ) -> None:
        """Uses the network with ``make(layer)`` in the place of each layer; the others are point estimates."""
        made = {id(layer): make(layer) for layer in layers.values()}
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


class NaturalGradientMethod(NetworkMethod):
    """A method whose optimiser holds a Gaussian around the network's parameters (``random``); ``others``, such as norms
    and a learned noise, are point estimates and trained by Adam."""

    def use_layers(self, net: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Uses the network, with the parameters of these layers random."""
        self.use(net)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        self.random = {name: p for name, p in net.named_parameters() if id(p) in inside}
        self.others = [p for p in self.parameters() if id(p) not in inside and p.requires_grad]
        self.point_optimizer = torch.optim.Adam(self.others, lr=1e-3) if self.others else None

    def sample(self) -> dict[str, Tensor]:
        """A draw of the random parameters, detached."""
        raise NotImplementedError

    def call_with(self, weights: dict[str, Tensor], x: Any) -> Tensor:
        """The network's output with these in the place of its random parameters."""
        output: Tensor = functional_call(self.net, weights, x if isinstance(x, tuple) else (x,))
        return output

    @staticmethod
    def gradients(loss: Tensor, inputs: list[Tensor], keep: bool) -> tuple[Tensor, ...]:
        """Gradients, zero for what the pass did not use; ``keep`` where another backward pass follows."""
        return torch.autograd.grad(loss, inputs, retain_graph=keep, allow_unused=True, materialize_grads=True)

    def drawn_labels(self, output: Tensor) -> Tensor:
        """Targets drawn from the model, which make the gradients' outer products the Gauss–Newton matrix on average.

        Numbers are one standard deviation off, either way: the same on average as Gaussian ones, with less variance.
        """
        law = self.observation.law(output.detach())
        base = getattr(law, "base_dist", law)
        if isinstance(base, torch.distributions.Normal):
            return base.mean + base.stddev * torch.randn_like(base.mean).sign()
        label: Tensor = law.sample()
        return label

    def draw(self, index: int) -> Callable[[Any], Any]:
        weights = self.sample()
        return lambda x: self.observation.law(self.call_with(weights, x))

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
def recorded(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """Notes the input and the output of each layer, each time it is called.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with recorded(net[:1]) as passes:
    ...     _ = net(torch.ones(2, 4))
    >>> [tuple(tensor.shape) for tensor in passes[net[0]][0]]
    [(2, 4), (2, 3)]
    """
    passes: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        passes.setdefault(layer, []).append((inputs[0], output))

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
