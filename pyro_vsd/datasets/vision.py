"""Image data sets through torchvision, whole in memory, pixels in [0, 1]."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_vsd.datasets.data import Data

__all__ = ["cifar10", "cifar100", "fashion_mnist", "kmnist", "mnist", "stl10", "svhn"]


def mnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """MNIST: 60,000 and 10,000 images ``(1, 28, 28)`` of ten digits, from ``<root>/MNIST/raw``::

        train, test = vsd.datasets.mnist("data", download=True)

    :param root: the folder that holds torchvision's data sets.
    :param download: whether torchvision may download what is missing.
    :param flatten: rows of pixels, for a multilayer perceptron, in place of images.
    :param dtype: of the images; torch's default if not given.
    """
    return _load("MNIST", root, download, flatten, dtype)


def fashion_mnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Fashion-MNIST: as :func:`mnist`, ten kinds of clothing, from ``<root>/FashionMNIST/raw``."""
    return _load("FashionMNIST", root, download, flatten, dtype)


def kmnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Kuzushiji-MNIST: as :func:`mnist`, ten cursive hiragana, from ``<root>/KMNIST/raw``."""
    return _load("KMNIST", root, download, flatten, dtype)


def cifar10(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """CIFAR-10: as :func:`mnist`, 50,000 and 10,000 images ``(3, 32, 32)``, from ``<root>/cifar-10-batches-py``."""
    return _load("CIFAR10", root, download, flatten, dtype)


def cifar100(
    root: str | Path,
    *,
    test_only: bool = False,
    download: bool = False,
    flatten: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Data, Data]:
    """CIFAR-100: 50,000 and 10,000 images ``(3, 32, 32)`` of a hundred classes, from ``<root>/cifar-100-python``.

    The other parameters are those of :func:`mnist`.

    :param test_only: reads the file ``test`` alone, for instance as out-of-distribution data for CIFAR-10. The
        training set is then empty, and the checksum of the file is not checked.
    """
    if not test_only:
        return _load("CIFAR100", root, download, flatten, dtype)
    if download:
        raise ValueError("download=True fetches both halves: leave test_only=True out.")
    with (Path(root) / "cifar-100-python" / "test").open("rb") as file:
        table = _ArrayUnpickler(file, encoding="latin1").load()
    test = _data(table["data"].reshape(-1, 3, 32, 32), table["fine_labels"], flatten, dtype)
    return test[:0], test


def svhn(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Street View House Numbers: as :func:`mnist`, 73,257 and 26,032 images ``(3, 32, 32)``, from
    ``<root>/*_32x32.mat``. Needs SciPy."""
    return _load("SVHN", root, download, flatten, dtype)


def stl10(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """STL-10: as :func:`mnist`, 5,000 and 8,000 labelled images ``(3, 96, 96)``, from ``<root>/stl10_binary``."""
    return _load("STL10", root, download, flatten, dtype)


def _load(name: str, root: str | Path, download: bool, flatten: bool, dtype: torch.dtype | None) -> tuple[Data, Data]:
    # Here and not above: torchvision takes a second to import.
    import torchvision.datasets

    by_split = name in ("SVHN", "STL10")
    halves = []
    for half in ({"split": "train"}, {"split": "test"}) if by_split else ({"train": True}, {"train": False}):
        try:
            files = getattr(torchvision.datasets, name)(str(root), download=download, **half)
        except (RuntimeError, FileNotFoundError) as error:
            text = f"root={str(root)!r} does not hold all files of {name}, unaltered. Pass download=True, or the folder"
            hint = " To read the test half alone, pass test_only=True." if name == "CIFAR100" else ""
            raise FileNotFoundError(f"{text} that torchvision.datasets.{name} reads.{hint}") from error
        images = np.asarray(files.data)
        if not by_split:
            images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)  # stored with channels last
        halves.append(_data(images, files.labels if by_split else files.targets, flatten, dtype))
    return halves[0], halves[1]


def _data(images: np.ndarray, labels: Any, flatten: bool, dtype: torch.dtype | None) -> Data:
    # Divided in place, without a second copy: CIFAR-10 is 0.6 GB in float32.
    x = torch.from_numpy(np.ascontiguousarray(images)).to(dtype or torch.get_default_dtype()).div_(255)
    return Data(x.flatten(1) if flatten else x, torch.as_tensor(labels).long())


class _ArrayUnpickler(pickle.Unpickler):
    """Reads NumPy arrays and plain containers only: a pickle could run anything else."""

    ALLOWED = {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"the file holds {module}.{name}, which is neither an array nor a container.")
        # NumPy 2 has renamed the module; files of either version are read with either version
        core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
        return super().find_class(re.sub(r"^numpy\._?core", core, module), name)
