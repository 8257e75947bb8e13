"""Risk against coverage, read back from the artists."""

import pytest
import torch

from pyro_vsd import metrics, plots
from pyro_vsd.prediction import RegressionPrediction


def classes(num_rows=200):
    logits = 2 * torch.randn(num_rows, 4)
    return logits.softmax(-1), (logits + torch.randn(num_rows, 4)).argmax(-1)


def test_curve_is_that_of_the_metrics():
    probs, y = classes()
    ax = plots.risk_coverage(probs, y)
    curve = metrics.risk_coverage(probs, y)
    (drawn,) = [one for one in ax.get_lines() if one.get_label().startswith("AURC")]
    assert drawn.get_xdata()[1:] == pytest.approx(curve.coverage.numpy())
    assert drawn.get_ydata()[1:] == pytest.approx(curve.risk.numpy())
    assert ax.get_ylabel() == "error rate of the rows kept"


def test_several_by_name_share_the_axes():
    probs, y = classes()
    ax = plots.risk_coverage({"a": probs, "b": probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)}, y)
    assert [text.get_text().split(",")[0] for text in ax.get_legend().get_texts()] == ["a", "b"]


@pytest.mark.parametrize(("loss", "label"), [(None, "squared error"), (lambda p, y: (p.mean - y).abs(), "loss")])
def test_numbers_say_which_loss(loss, label):
    prediction = RegressionPrediction.from_samples(torch.randn(5, 30), torch.rand(5, 30) + 0.1)
    ax = plots.risk_coverage(prediction, torch.randn(30), loss=loss)
    assert ax.get_ylabel() == f"{label} of the rows kept"


def test_draws_on_given_axes():
    ax = plots.risk_coverage(*classes())
    assert plots.risk_coverage(*classes(), ax=ax) is ax
