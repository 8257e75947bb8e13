"""The methods the paper compares with, and VSD itself, each in a file of its own behind one protocol.

>>> import pyro_vsd as vsd
>>> train, test = vsd.datasets.digits()
>>> method = make_method("mc_dropout", vsd.nn.mlp([64, 50, 10]), num_data=len(train), rate=0.3)
>>> for x, y in train.batches(100):
...     loss = method.step(x, y)
>>> method.predict(test.x, num_samples=10)
ClassificationPrediction(mean=(..., 10), num_samples=10, samples kept)
"""

from typing import Any

from torch import nn

from pyro_vsd.baselines.ard_vd import ARDVD
from pyro_vsd.baselines.ard_vd_hierarchical import ARDVDHierarchical
from pyro_vsd.baselines.bbb import BBB
from pyro_vsd.baselines.bbb_lrt import BBBLocal
from pyro_vsd.baselines.deep_ensemble import DeepEnsemble
from pyro_vsd.baselines.elrg import ELRG
from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.mc_dropout import MCDropout
from pyro_vsd.baselines.mnf import MNF
from pyro_vsd.baselines.protocol import GuideMethod, Method, NetworkMethod
from pyro_vsd.baselines.slang import SLANG
from pyro_vsd.baselines.swag import SWAG
from pyro_vsd.baselines.vd import VD
from pyro_vsd.baselines.vmg import VMG
from pyro_vsd.baselines.vogn import VOGN
from pyro_vsd.baselines.vsd import VSD
from pyro_vsd.baselines.vsd_hierarchical import VSDHierarchical
from pyro_vsd.baselines.vsd_low_rank import VSDLowRank

__all__ = ["METHODS", "GuideMethod", "Method", "NetworkMethod", "make_method"]

#: every method by its name, which is that of its file
METHODS: dict[str, type[Method]] = {
    "map": MAP,
    "bbb": BBB,
    "bbb_lrt": BBBLocal,
    "mc_dropout": MCDropout,
    "vd": VD,
    "ard_vd": ARDVD,
    "ard_vd_hierarchical": ARDVDHierarchical,
    "vmg": VMG,
    "mnf": MNF,
    "slang": SLANG,
    "elrg": ELRG,
    "deep_ensemble": DeepEnsemble,
    "swag": SWAG,
    "vogn": VOGN,
    "vsd": VSD,
    "vsd_low_rank": VSDLowRank,
    "vsd_hierarchical": VSDHierarchical,
}


def make_method(name: str, net: nn.Module, *, num_data: int, task: str = "classification", **options: Any) -> Method:
    """A method by its name, ready to train.

    :param name: a key of :data:`METHODS`.
    :param net: the network; it is copied, never changed.
    :param num_data: number of rows of the whole training set.
    :param task: ``"classification"`` or ``"regression"``.
    :param options: ``lr``, ``noise`` (:class:`Method`), and those of the method's class.
    """
    if name not in METHODS:
        raise ValueError(f"name: expected one of {', '.join(METHODS)}, got {name!r}.")
    return METHODS[name](net, num_data=num_data, task=task, **options)
