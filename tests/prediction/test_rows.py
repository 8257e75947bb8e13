"""Predictions joined, cut and as a table."""

import pytest
import torch

from pyro_vsd import ClassificationPrediction, Prediction
from tests.prediction.kinds import classes, gaussians, poisson


def tokens(N=7, S=4):
    return ClassificationPrediction.from_samples(torch.rand(S, N, 3, 5).softmax(-1))


KINDS = {
    "classes": (classes, lambda n: torch.arange(n) % 3),
    "tokens": (tokens, lambda n: torch.arange(3 * n).reshape(n, 3) % 5),
    "numbers": (lambda: gaussians(4, 7, 2), lambda n: torch.randn(n, 2)),
    "counts": (lambda: poisson(4, 7)[0], lambda n: torch.arange(n).double()),
}
ROWS = [slice(2, 5), slice(None, None, 3), torch.tensor([4, 1, 4]), torch.tensor([0, 1, 0, 1, 1, 0, 0]).bool(), [0], 3]


@pytest.mark.parametrize("rows", ROWS, ids=["slice", "step", "numbers", "mask", "list", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, rows):
    make, targets = KINDS[kind]
    prediction = make()
    y, index = targets(7), torch.arange(7)[rows].reshape(-1)
    found = prediction[rows]
    assert type(found) is type(prediction)
    assert len(found) == len(index)
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(found, name), getattr(prediction, name)[index])
    torch.testing.assert_close(found.samples, prediction.samples[:, index])
    torch.testing.assert_close(found.log_prob(y[index]), prediction.log_prob(y)[index])


@pytest.mark.parametrize("kind", KINDS)
def test_joined(kind):
    make, targets = KINDS[kind]
    prediction, y = make(), targets(7)
    joined = Prediction.concat([prediction[:3], prediction[3:6], prediction[6:]])
    assert type(joined) is type(prediction)
    torch.testing.assert_close(joined.mean, prediction.mean)
    torch.testing.assert_close(joined.samples, prediction.samples)
    torch.testing.assert_close(joined.log_prob(y), prediction.log_prob(y))
    torch.testing.assert_close(joined.to(torch.float32).mean, prediction.mean.float())


def test_without_samples():
    prediction = Prediction(torch.arange(5.0), torch.ones(5), 3)
    assert Prediction.concat([prediction[:2], prediction[2:]]).samples is None


@pytest.mark.parametrize(
    "others", [[], [classes(), gaussians(5, 7)], [classes(), classes(9)]], ids=["none", "kind", "S"]
)
def test_what_cannot_be_joined(others):
    with pytest.raises(ValueError, match=r"\bpredictions\b"):
        Prediction.concat(others)


def test_rows_that_are_not_there():
    with pytest.raises(IndexError):
        classes()[7]


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("classes", ["label", "confidence", "entropy", "mutual_information", "probs.0", "probs.1", "probs.2"]),
        ("numbers", [f"{n}.{i}" for n in ("mean", "stddev", "aleatoric", "epistemic") for i in (0, 1)]),
        ("counts", ["mean", "stddev"]),
    ],
)
def test_as_a_table(kind, columns):
    pytest.importorskip("pandas")
    prediction = KINDS[kind][0]()
    table = prediction.to_pandas()
    assert list(table) == columns
    assert len(table) == 7
    torch.testing.assert_close(torch.tensor(table[columns[-1]].to_numpy()), {
        "classes": lambda: prediction.probs[:, -1], "numbers": lambda: prediction.epistemic[:, 1],
        "counts": lambda: prediction.stddev,
    }[kind]())  # fmt: skip
    assert "probs.2.4" in tokens().to_pandas()
