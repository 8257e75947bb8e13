"""Data sets: two that come with scikit-learn, generated toys, and loaders for local copies of the usual benchmarks.

Each loader returns ``(train, test)``, two :class:`Data`.

>>> train, test = vsd.datasets.digits()
>>> train.x.shape, len(test)
(torch.Size([1442, 64]), 355)
"""

from pyro_vsd.datasets.bundled import diabetes, digits
from pyro_vsd.datasets.data import Data
from pyro_vsd.datasets.toys import cubic, two_clusters
from pyro_vsd.datasets.uci_splits import uci
from pyro_vsd.datasets.vision import cifar10, cifar100, fashion_mnist, kmnist, mnist, stl10, svhn

__all__ = [
    "Data",
    "cifar10",
    "cifar100",
    "cubic",
    "diabetes",
    "digits",
    "fashion_mnist",
    "kmnist",
    "mnist",
    "stl10",
    "svhn",
    "two_clusters",
    "uci",
]
