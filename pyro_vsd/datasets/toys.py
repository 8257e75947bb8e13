"""Generated one-dimensional regressions whose true function is known."""

import torch
from torch import Tensor

from pyro_vsd.datasets.data import Data

__all__ = ["cubic", "two_clusters"]


def cubic(
    num_train: int = 20, *, noise: float = 3.0, num_test: int = 200, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    r"""The toy regression of the paper, of Hernández-Lobato and Adams (2015).

    .. math:: y = x^3 + \epsilon, \quad x \sim U[-4, 4], \quad \epsilon \sim N(0, 3^2)

    The test set is the true function, without noise, on a grid over [-6, 6].

    :param num_train: number of training points.
    :param noise: standard deviation of the training targets around the function.
    :param num_test: number of grid points.
    :param seed: of the training points.
    :param dtype: torch's default if not given.

    >>> train, test = cubic()
    >>> train, test.x.min().item(), test.x.max().item()
    (Data(x=(20, 1) float64, y=(20,) float64), -6.0, 6.0)
    """
    generator = torch.Generator().manual_seed(seed)
    x = _uniform(num_train, -4.0, 4.0, generator)
    y = x**3 + noise * torch.randn(num_train, generator=generator, dtype=torch.float64)
    grid = torch.linspace(-6.0, 6.0, num_test, dtype=torch.float64)
    return _column(x, y, dtype), _column(grid, grid**3, dtype)


def two_clusters(
    num_train: int = 100, *, noise: float = 0.1, num_test: int = 200, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    r"""Inputs in two clusters with a gap between them, where a model should be less certain.

    .. math:: y = \cos(4 x + 0.8) + \epsilon, \quad x \sim \tfrac12 U[-1, -0.7] + \tfrac12 U[0.5, 1]

    After Foong et al. (2019), "'In-Between' Uncertainty in Bayesian Neural Networks". The test set is the true
    function, without noise, on a grid over [-1.5, 1.5].

    The other parameters are those of :func:`cubic`.

    :param num_train: number of training points, half of them (rounded down) in the left cluster.

    >>> train, test = two_clusters()
    >>> ((train.x > -0.7) & (train.x < 0.5)).sum().item()
    0
    """
    generator = torch.Generator().manual_seed(seed)
    num_left = num_train // 2
    x = torch.cat([_uniform(num_left, -1.0, -0.7, generator), _uniform(num_train - num_left, 0.5, 1.0, generator)])
    y = _wave(x) + noise * torch.randn(num_train, generator=generator, dtype=torch.float64)
    grid = torch.linspace(-1.5, 1.5, num_test, dtype=torch.float64)
    return _column(x, y, dtype), _column(grid, _wave(grid), dtype)


def _wave(x: Tensor) -> Tensor:
    return torch.cos(4 * x + 0.8)


def _uniform(number: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    # In float64 whatever the dtype asked for, so that all dtypes get the same points.
    return low + (high - low) * torch.rand(number, generator=generator, dtype=torch.float64)


def _column(x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Data:
    return Data(x.unsqueeze(-1), y).to(dtype=dtype or torch.get_default_dtype())
