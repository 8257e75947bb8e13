"""The methods the paper compares with, and VSD itself, behind one protocol.

>>> train, test = vsd.datasets.digits()
>>> method = make_method("mc_dropout", vsd.nn.mlp([64, 50, 10]), num_data=len(train), rate=0.3)
>>> for x, y in train.batches(100):
...     loss = method.step(x, y)
>>> method.predict(test.x, num_samples=10)
ClassificationPrediction(mean=(..., 10), num_samples=10, samples kept)
"""

from typing import Any

from torch import nn

from pyro_vsd._utils import check_choice
from pyro_vsd.baselines.bbb import BBB, BBBLocal
from pyro_vsd.baselines.deep_ensemble import DeepEnsemble
from pyro_vsd.baselines.elrg import ELRG
from pyro_vsd.baselines.map import MAP
from pyro_vsd.baselines.mc_dropout import MCDropout
from pyro_vsd.baselines.mnf import MNF
from pyro_vsd.baselines.protocol import GuideMethod, Method
from pyro_vsd.baselines.slang import SLANG
from pyro_vsd.baselines.swag import SWAG
from pyro_vsd.baselines.vd import VD
from pyro_vsd.baselines.vmg import VMG
from pyro_vsd.baselines.vogn import VOGN
from pyro_vsd.baselines.vsd import ARDVD, VSD, ARDVDHierarchical, VSDHierarchical, VSDLowRank
from pyro_vsd.baselines.vsd_ensemble import VSDEnsemble

__all__ = ["METHODS", "GuideMethod", "Method", "make_method"]

#: every method by its name
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
    "vsd_ensemble": VSDEnsemble,
}


def make_method(name: str, net: nn.Module, *, num_data: int, task: str = "classification", **options: Any) -> Method:
    """A method by its name, ready to train.

    :param name: a key of :data:`METHODS`.
    :param net: the network; it is copied, never changed.
    :param num_data: number of rows of the whole training set.
    :param task: ``"classification"`` or ``"regression"``.
    :param options: ``lr``, ``noise``, ``include``, ``exclude`` (:class:`Method`), and those of the method's class.
    """
    check_choice("name", name, list(METHODS))
    return METHODS[name](net, num_data=num_data, task=task, **options)
