"""The data of a task: loaded once per process, split, optionally normalised, augmented batch by batch."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import pyro_vsd as vsd
from benchmarks.paper.unit import Setting
from pyro_vsd.datasets import Data

__all__ = ["CLASSES", "Parts", "augmented", "load"]

CLASSES = {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100, "svhn": 10, "stl10": 10, "digits": 10}
_SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "stl10": (3, 96, 96), "digits": (64,)}
_RGB = (3, 32, 32)


class Parts(NamedTuple):
    """Training, validation and test rows, and the test rows of other sets."""

    train: Data
    validation: Data
    test: Data
    ood: dict[str, Data]


def load(setting: Setting, folder: Path | None, smoke: bool = False) -> Parts:
    """The parts of a task's data.

    The validation rows are the last of the training set; the test set is read from its own file.

    :param folder: where torchvision's data sets are.
    :param smoke: a few random images of the right shape, no folder needed.
    """
    train, test = _read(setting.data, folder, setting.flatten, smoke)
    ood = {name: _read(name, folder, setting.flatten, smoke)[1] for name in setting.ood}
    size = len(train) - (len(train) // 4 if smoke else setting.num_validation)
    parts = Parts(train[:size], train[size:], test, ood)
    return _normalized(parts) if setting.normalize else parts


@lru_cache(maxsize=6)
def _read(name: str, folder: Path | None, flatten: bool, smoke: bool) -> tuple[Data, Data]:
    if smoke:
        return _random(name, 24, flatten), _random(name, 6, flatten)
    if name == "digits":
        train, test = vsd.datasets.digits()
        return train.to(torch.float32), test.to(torch.float32)
    if folder is None:
        raise ValueError("data: expected a folder, got none. Pass --data FOLDER or set PYRO_VSD_DATA.")
    options = {"flatten": flatten, "dtype": torch.float32}
    if name == "cifar100" and not (folder / "cifar-100-python" / "train").is_file():
        # its test images alone are enough as OOD inputs
        return vsd.datasets.cifar100(folder, test_only=True, **options)
    pair: tuple[Data, Data] = getattr(vsd.datasets, name)(folder, **options)
    return pair


def _random(name: str, rows: int, flatten: bool) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((rows, *_SHAPES.get(name, _RGB)), generator=generator, dtype=torch.float32)
    return Data(x.flatten(1) if flatten else x, torch.randint(CLASSES[name], (rows,), generator=generator))


def _normalized(parts: Parts) -> Parts:
    """Channels with mean 0 and standard deviation 1 on the training rows."""
    dims = (0, 2, 3)
    mean, std = parts.train.x.mean(dims, keepdim=True), parts.train.x.std(dims, keepdim=True)

    def scale(data: Data) -> Data:
        return Data((data.x - mean) / std, data.y)

    return Parts(*map(scale, parts[:3]), {name: scale(data) for name, data in parts.ood.items()})


def augmented(x: Tensor, flip: bool, padding: int = 4) -> Tensor:
    """Random crops of the padded images, and half of them mirrored; draws from torch's global generator."""
    rows, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, rows, 1)).to(x.device)
    down = (top + torch.arange(height, device=x.device))[:, None, :, None]
    right = left + torch.arange(width, device=x.device)
    if flip:
        mirrored = torch.rand(rows, 1).to(x.device) < 0.5
        right = torch.where(mirrored, right.flip(-1), right)
    index = torch.arange(rows, device=x.device)[:, None, None, None]
    channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[index, channel, down, right[:, None, None, :]]
