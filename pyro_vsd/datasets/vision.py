"""Image sets through torchvision, whole in memory, pixels in [0, 1]."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_vsd.datasets.data import Data


def mnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """MNIST: 60,000 and 10,000 images ``(1, 28, 28)`` of ten digits, from ``<root>/MNIST/raw``::

        train, test = vsd.datasets.mnist("data", download=True)

    :param root: the folder that holds torchvision's data sets.
    :param download: whether torchvision may fetch what is missing.
    :param flatten: rows of pixels, for a multilayer perceptron, in place of images.
    :param dtype: of the images; torch's default if not given.
    """
    return _by_train_flag("MNIST", root, download, flatten, dtype)


def fashion_mnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Fashion-MNIST: as :func:`mnist`, ten kinds of clothing, from ``<root>/FashionMNIST/raw``."""
    return _by_train_flag("FashionMNIST", root, download, flatten, dtype)


def kmnist(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Kuzushiji-MNIST: as :func:`mnist`, ten cursive hiragana, from ``<root>/KMNIST/raw``."""
    return _by_train_flag("KMNIST", root, download, flatten, dtype)


def cifar10(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """CIFAR-10: 50,000 and 10,000 images ``(3, 32, 32)`` of ten classes, from ``<root>/cifar-10-batches-py``.

    Parameters are those of :func:`mnist`.
    """
    return _by_train_flag("CIFAR10", root, download, flatten, dtype)


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

    :param test_only: read the file ``test`` alone, for instance as out-of-distribution data for CIFAR-10; ``train``
        is then empty, and the checksum of the file is not looked at.
    """
    if not test_only:
        return _by_train_flag("CIFAR100", root, download, flatten, dtype)
    if download:
        raise ValueError("expected download=False with test_only=True. The archive holds both halves: leave test_only.")
    path = Path(root) / "cifar-100-python" / "test"
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}. Pass the folder that holds cifar-100-python as root.")
    with path.open("rb") as file:
        table = _ArrayUnpickler(file, encoding="latin1").load()
    images = table["data"].reshape(-1, 3, 32, 32)
    test = _data(images, table["fine_labels"], flatten, dtype)
    return test[:0], test


def svhn(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """Street View House Numbers: 73,257 and 26,032 images ``(3, 32, 32)`` of ten digits, from ``<root>/*_32x32.mat``.

    Reading them needs SciPy. Parameters are those of :func:`mnist`.
    """
    return _by_split("SVHN", root, download, flatten, dtype)


def stl10(
    root: str | Path, *, download: bool = False, flatten: bool = False, dtype: torch.dtype | None = None
) -> tuple[Data, Data]:
    """STL-10: 5,000 and 8,000 labelled images ``(3, 96, 96)`` of ten classes, from ``<root>/stl10_binary``.

    Parameters are those of :func:`mnist`.
    """
    return _by_split("STL10", root, download, flatten, dtype)


def _by_train_flag(
    name: str, root: str | Path, download: bool, flatten: bool, dtype: torch.dtype | None
) -> tuple[Data, Data]:
    def load(train: bool) -> Data:
        files = _open(name, root, lambda make: make(str(root), train=train, download=download))
        images = np.asarray(files.data)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)  # stored with channels last
        return _data(images, files.targets, flatten, dtype)

    return load(True), load(False)


def _by_split(
    name: str, root: str | Path, download: bool, flatten: bool, dtype: torch.dtype | None
) -> tuple[Data, Data]:
    def load(split: str) -> Data:
        files = _open(name, root, lambda make: make(str(root), split=split, download=download))
        return _data(files.data, files.labels, flatten, dtype)

    return load("train"), load("test")


def _open(name: str, root: str | Path, construct: Callable[[Any], Any]) -> Any:
    # Here and not above: torchvision takes a second to import and most users never come by.
    import torchvision.datasets

    try:
        return construct(getattr(torchvision.datasets, name))
    except (RuntimeError, FileNotFoundError) as error:
        alone = " For its test half alone pass test_only=True." if name == "CIFAR100" else ""
        raise FileNotFoundError(
            f"expected all files of {name}, unaltered, under {Path(root)}, got less. "
            f"Pass download=True, or the folder that torchvision.datasets.{name} reads as root.{alone}"
        ) from error


def _data(images: np.ndarray, labels: Any, flatten: bool, dtype: torch.dtype | None) -> Data:
    # Conversion in place of a copy in between: CIFAR-10 is 0.6 GB in float32.
    x = torch.from_numpy(np.ascontiguousarray(images)).to(dtype or torch.get_default_dtype()).div_(255)
    y = torch.as_tensor(labels).long()
    return Data(x.flatten(1) if flatten else x, y)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads NumPy arrays and plain containers, and refuses anything else a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {
            ("numpy", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            # the module has been renamed from NumPy 1 to 2, and files of either are read with either
            core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
            return super().find_class(re.sub(r"^numpy\._?core", core, module), name)
        raise pickle.UnpicklingError(f"expected arrays, numbers and strings, got {module}.{name}")
