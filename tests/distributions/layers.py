"""Layers that a lazy weight meets, as cases: each calls torch with an input, a weight and a bias."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_vsd.distributions import StructuredDropout

__all__ = ["LAYERS", "Layer", "make_law"]


@dataclass
class Layer:
    name: str
    call: Callable[[Tensor, Any, Tensor | None], Tensor]
    input_shape: tuple[int, ...]  # of one example
    weight_shape: tuple[int, ...]
    noise_dim: int
    bias_size: int | None

    def __str__(self) -> str:
        return f"{self.name}, noise_dim {self.noise_dim}"

    def law(self, **options: Any) -> StructuredDropout:
        return make_law(self.weight_shape, self.noise_dim, **options)

    def bias(self, *batch: int) -> Tensor | None:
        return None if self.bias_size is None else torch.randn(*batch, self.bias_size)

    def dense_weight(self, law: StructuredDropout, noise: Tensor) -> Tensor:
        """The weight that one noise vector ``(K,)`` makes."""
        shape = [1] * len(self.weight_shape)
        shape[self.noise_dim] = -1
        return law.theta * noise.reshape(shape)


def make_law(shape: Any, noise_dim: int, batch: Any = (), T: int = 2, scale: bool = False, **more: Any) -> Any:
    K = shape[noise_dim]
    options = {"scale": torch.rand(*batch, K) + 0.5} if scale else {}
    theta, alpha = torch.randn(*batch, *shape), torch.rand(*batch, K) + 0.1
    return StructuredDropout(theta, alpha, torch.randn(*batch, T, K), noise_dim, **options, **more)


def _convolutions() -> list[Layer]:
    layers = []
    # dimensions, groups, options
    settings: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, {}),
        (1, 2, {"stride": 2, "padding": 1}),
        (1, 1, {"padding": "same", "dilation": 2}),
        (2, 1, {"padding": 1}),
        (2, 2, {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
        (2, 4, {}),
        (3, 1, {}),
        (3, 2, {"stride": 2, "padding": 1, "dilation": 1}),
    ]
    for dims, groups, options in settings:
        convolution = getattr(F, f"conv{dims}d")
        shape = (8, 4 // groups) + (2,) * dims
        for noise_dim in (0, 1):
            layers.append(
                Layer(
                    f"conv{dims}d, groups {groups}, {options}",
                    lambda x, w, b, f=convolution, g=groups, o=options: f(x, w, b, groups=g, **o),
                    (4,) + (5,) * dims,
                    shape,
                    noise_dim,
                    8,
                )
            )
    transposed: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, {}),
        (1, 2, {"stride": 2, "output_padding": 1}),
        (2, 1, {"padding": 1}),
        (2, 2, {"stride": 2, "padding": 1, "output_padding": (1, 0), "dilation": 2}),
        (3, 1, {}),
        (3, 2, {"stride": 2, "output_padding": 1}),
    ]
    for dims, groups, options in transposed:
        convolution = getattr(F, f"conv_transpose{dims}d")
        shape = (4, 8 // groups) + (2,) * dims
        for noise_dim in (0, 1):
            layers.append(
                Layer(
                    f"conv_transpose{dims}d, groups {groups}, {options}",
                    lambda x, w, b, f=convolution, g=groups, o=options: f(x, w, b, groups=g, **o),
                    (4,) + (3,) * dims,
                    shape,
                    noise_dim,
                    8,
                )
            )
    return layers


def _products() -> list[Layer]:
    functions: dict[str, tuple[Callable[..., Tensor], bool, int | None]] = {
        # name: (call, whether the weight is (Q, K), size of the bias)
        "F.linear": (lambda x, w, b: F.linear(x, w, b), True, 3),
        "F.linear without bias": (lambda x, w, b: F.linear(x, w), True, None),
        "F.linear by keywords": (lambda x, w, b: F.linear(input=x, weight=w, bias=b), True, 3),
        "F.linear of .T": (lambda x, w, b: F.linear(x, w.T, b), False, 3),
        "x @ w": (lambda x, w, b: x @ w, False, None),
        "x @ w + b": (lambda x, w, b: x @ w + b, False, 3),
        "x @ w.T": (lambda x, w, b: x @ w.T, True, None),
        "x @ w.mT": (lambda x, w, b: x @ w.mT, True, None),
        "x @ w.t()": (lambda x, w, b: x @ w.t(), True, None),
        "x @ w.transpose(0, 1)": (lambda x, w, b: x @ w.transpose(0, 1), True, None),
        "x @ w.transpose(-1, -2)": (lambda x, w, b: x @ w.transpose(-1, -2), True, None),
        "x @ torch.transpose": (lambda x, w, b: x @ torch.transpose(w, dim0=1, dim1=0), True, None),
        "x @ w.swapaxes": (lambda x, w, b: x @ w.swapaxes(0, 1), True, None),
        "x @ w.T.T": (lambda x, w, b: x @ w.T.T, False, None),
        "x.matmul(w)": (lambda x, w, b: x.matmul(w), False, None),
        "torch.matmul": (lambda x, w, b: torch.matmul(x, w), False, None),
        "torch.matmul by keywords": (lambda x, w, b: torch.matmul(input=x, other=w), False, None),
    }
    two_dimensional: dict[str, tuple[Callable[..., Tensor], bool, int | None]] = {
        "torch.mm": (lambda x, w, b: torch.mm(x, w), False, None),
        "x.mm(w)": (lambda x, w, b: x.mm(w), False, None),
        "torch.addmm": (lambda x, w, b: torch.addmm(b, x, w), False, 3),
        "b.addmm(x, w)": (lambda x, w, b: b.addmm(x, w), False, 3),
    }
    layers = []
    for name, (call, weight_is_qk, bias) in functions.items():
        shape = (3, 4) if weight_is_qk else (4, 3)
        for noise_dim in (-1, -2):
            layers.append(Layer(name, call, (4,), shape, noise_dim, bias))
            layers.append(Layer(f"{name} of sequences", call, (6, 4), shape, noise_dim, bias))
            layers.append(Layer(f"{name} of grids", call, (2, 3, 4), shape, noise_dim, bias))
    for name, (call, _, bias) in two_dimensional.items():
        layers += [Layer(name, call, (4,), (4, 3), noise_dim, bias) for noise_dim in (-1, -2)]
    return layers


LAYERS = _products() + _convolutions()
