"""The table of cases that every property of a law is tested on, each with its dense twin."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from pyro_vsd.distributions import (
    ColumnProduct,
    HouseholderNormal,
    ScaleMixtureNormal,
    StructuredDropout,
)
from tests import dense

__all__ = ["CASES", "COLUMN_CASES", "Case", "dense_draw"]


@dataclass
class Case:
    """A law, tensors as its parameters, and options that are no tensors."""

    law: type
    params: dict[str, Tensor]
    options: dict[str, Any]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    note: str = ""

    def __str__(self) -> str:
        T = self.params["vectors"].shape[-2] if "vectors" in self.params else None
        parts = [self.law.__name__, str(self.batch_shape), str(self.event_shape)]
        parts += [f"T={T}"] if T is not None else []
        parts += [f"noise_dim={self.options['noise_dim']}"] if "noise_dim" in self.options else []
        return " ".join(parts + ([self.note] if self.note else []))

    @property
    def event_dim(self) -> int:
        return len(self.event_shape)

    def build(self, params: dict[str, Tensor] | None = None, **more: Any) -> Any:
        return self.law(**(self.params if params is None else params), **self.options, **more)

    def leaves(self) -> dict[str, Tensor]:
        """Fresh copies of the parameters that ask for gradients."""
        return {name: value.clone().requires_grad_() for name, value in self.params.items()}

    def to(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: value.to(dtype) for name, value in self.params.items()}

    def value(self, *sample_shape: int) -> Tensor:
        """Some point of the event space, not a draw."""
        return torch.randn(sample_shape + self.batch_shape + self.event_shape)

    def twin(self, params: dict[str, Tensor]) -> "Twin":
        return Twin(self, params)


@dataclass
class Twin:
    """The same law by dense matrices."""

    case: Case
    params: dict[str, Tensor]

    def __post_init__(self) -> None:
        p, case = self.params, self.case
        self.columns = None
        shape = case.batch_shape + case.event_shape
        if case.law is HouseholderNormal:
            loc = p["loc"] if "loc" in p else case.options["loc"]
            self.law: Any = dense.noise(p["alpha"], p["vectors"], loc).expand(case.batch_shape)
        elif case.law in (ColumnProduct, StructuredDropout):
            noise_dim = case.options.get("noise_dim", -2)
            self.noise_dim = noise_dim if noise_dim < 0 else noise_dim - case.event_dim
            theta = p["theta"]
            if "scale" in p:
                theta = theta * dense.unit_shaped(p["scale"], self.noise_dim, case.event_dim)
            self.theta = theta.expand(shape)
            self.columns = dense.columns(self.theta, p["alpha"], p["vectors"], self.noise_dim, case.event_dim)
        else:
            precision = p["precision"] if "precision" in p else case.options.get("precision", 1.0)
            variance = dense.unit_shaped(p["z"], case.options["noise_dim"], case.event_dim) / precision
            self.law = Independent(Normal(torch.zeros(shape), variance.sqrt().expand(shape)), case.event_dim)

    def log_prob(self, value: Tensor) -> Tensor:
        if self.columns is None:
            return self.law.log_prob(value)
        return dense.column_log_prob(self.columns, value, self.noise_dim, self.case.event_dim)

    def entropy(self) -> Tensor:
        return self.law.entropy() if self.columns is None else dense.column_entropy(self.columns)

    @property
    def mean(self) -> Tensor:
        return self.law.mean if self.columns is None else self.theta

    @property
    def variance(self) -> Tensor:
        if self.columns is None:
            return self.law.variance
        s = dense.covariance(self.params["alpha"], self.params["vectors"]).diagonal(dim1=-1, dim2=-2)
        return self.theta.square() * dense.unit_shaped(s, self.noise_dim, self.case.event_dim)


def dense_draw(law: Any, sample_shape: Any = ()) -> Tensor:
    """A draw as a plain tensor."""
    value = law.rsample(sample_shape)
    return value.dense() if hasattr(value, "dense") else value


def _positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.2


def _nonzero(*shape: int) -> Tensor:
    return (torch.rand(shape) + 0.3) * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)


def _noise_cases() -> list[Case]:
    def case(batch: Any, K: int, T: int, loc: Any = None, note: str = "", alpha_batch: Any = None) -> Case:
        alpha = _positive(*(batch if alpha_batch is None else alpha_batch), K)
        params = {"alpha": alpha, "vectors": torch.randn(batch + (T, K))}
        if isinstance(loc, float):
            return Case(HouseholderNormal, params, {"loc": loc}, batch, (K,), note)
        return Case(HouseholderNormal, {"loc": torch.randn(batch + (K,)), **params}, {}, batch, (K,), note)

    return [
        case((), 3, 0),
        case((), 1, 1, 1.0),
        case((), 4, 3, 1.0, "loc is a number"),
        case((4,), 3, 1),
        case((2, 3), 3, 3),
        case((2, 3), 4, 2, alpha_batch=(3,), note="alpha broadcasts"),
        case((4,), 3, 2, 0.0, alpha_batch=(1,), note="alpha broadcasts"),
    ]


def _column_cases(law: type) -> list[Case]:
    def case(
        batch: Any, event: Any, noise_dim: int, T: int, noise_batch: Any = None, scale: Any = None, note: str = ""
    ) -> Case:
        K = event[noise_dim]
        noise_batch = batch if noise_batch is None else noise_batch
        params = {
            "theta": _nonzero(*batch, *event),
            "alpha": _positive(*noise_batch, K),
            "vectors": torch.randn(noise_batch + (T, K)),
        }
        options: dict[str, Any] = {"noise_dim": noise_dim}
        if len(batch) != len(noise_batch):
            options["event_dim"] = len(event)
        if scale is not None:
            params["scale"] = _positive(*scale, K)
            batch = tuple(torch.broadcast_shapes(batch, scale))
        return Case(law, params, options, batch, event, note)

    cases = [
        case((), (3, 2), -2, 0),
        case((), (3, 1), -2, 1, note="one column"),
        case((), (2, 3), -1, 3),
        case((), (2, 3), 1, 2, note="noise_dim counted from the left"),
        case((4,), (3, 2), -2, 1),
        case((2, 3), (2, 4), -1, 4),
        case((4,), (3, 2), -2, 2, noise_batch=(), note="theta alone has a batch"),
        case((), (3, 2, 2), 0, 2),
        case((), (2, 3, 2, 1), -3, 1),
        case((4,), (3, 2, 1, 2), -4, 3),
        case((), (3, 2, 1, 1, 2), 0, 1),
    ]
    if law is StructuredDropout:
        cases += [
            case((), (3, 2), -2, 2, scale=(), note="scale"),
            case((), (2, 3), -1, 2, scale=(4, 1), note="scale has a batch"),
            case((3,), (2, 2, 2), 1, 2, scale=(2, 3), note="scale has a batch"),
        ]
    return cases


def _prior_cases() -> list[Case]:
    def mixture(batch: Any, shape: Any, noise_dim: int, precision: Any = None, note: str = "") -> Case:
        params = {"z": _positive(*batch, shape[noise_dim])}
        options: dict[str, Any] = {"shape": shape, "noise_dim": noise_dim}
        if isinstance(precision, Tensor):
            params["precision"] = precision
        elif precision is not None:
            options["precision"] = precision
        return Case(ScaleMixtureNormal, params, options, batch, shape, note)

    return [
        mixture((), (3, 2), -2),
        mixture((4,), (2, 3), -1, 2.5, "precision"),
        mixture((2, 3), (2, 3, 2), -2, _positive(2, 3, 2), "precision of each entry"),
    ]


with torch.random.fork_rng():
    torch.manual_seed(20)
    COLUMN_CASES = _column_cases(ColumnProduct) + _column_cases(StructuredDropout)
    CASES = _noise_cases() + COLUMN_CASES + _prior_cases()
