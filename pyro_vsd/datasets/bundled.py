"""Small real data that comes with scikit-learn."""

from typing import Any

import torch

from pyro_vsd.datasets.data import Data, standardized

__all__ = ["diabetes", "digits"]

# Every fifth row is a test row: the same rows with every version of every library.
_TEST_EVERY = 5


def digits(*, flatten: bool = True, dtype: torch.dtype | None = None) -> tuple[Data, Data]:
    """Handwritten digits, 8 × 8 pixels in [0, 1], ten classes: 1442 training and 355 test images.

    In each class every fifth image is a test image.

    :param flatten: rows of 64 pixels; otherwise images of shape ``(1, 8, 8)``.
    :param dtype: of the images; torch's default if not given.

    >>> train, test = digits()
    >>> train
    Data(x=(1442, 64) float64, y=(1442,) int64)
    >>> test.y.bincount()
    tensor([35, 36, 35, 36, 36, 36, 36, 35, 34, 36])
    """
    pixels, labels = _sklearn_datasets().load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).to(dtype or torch.get_default_dtype()) / 16  # counts from 0 to 16
    x, y = x if flatten else x.reshape(-1, 1, 8, 8), torch.from_numpy(labels).long()
    is_test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        is_test[(y == label).nonzero().squeeze(-1)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return Data(x[~is_test], y[~is_test]), Data(x[is_test], y[is_test])


def diabetes(*, dtype: torch.dtype | None = None) -> tuple[Data, Data]:
    """Progress of diabetes after a year from ten measurements: 354 training and 88 test patients.

    Inputs and targets have mean 0 and standard deviation 1 on the training rows; :attr:`Data.y_mean` and
    :attr:`Data.y_std` lead back to the targets' own units. Every fifth row is a test row.

    :param dtype: torch's default if not given.

    >>> train, test = diabetes()
    >>> train
    Data(x=(354, 10) float64, y=(354,) float64)
    >>> (test.y * test.y_std + test.y_mean)[:3].round()
    tensor([135., 310., 118.])
    """
    inputs, targets = _sklearn_datasets().load_diabetes(return_X_y=True, scaled=False)
    rows = torch.arange(len(targets))
    is_test = rows % _TEST_EVERY == _TEST_EVERY - 1
    return standardized(torch.from_numpy(inputs), torch.from_numpy(targets), rows[~is_test], rows[is_test], dtype)


def _sklearn_datasets() -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise ImportError("this data set comes with scikit-learn: pip install 'pyro_vsd[sklearn]'") from error
    return sklearn.datasets
