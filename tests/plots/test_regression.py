"""The regression band, read back from its artists."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_vsd import plots
from pyro_vsd.prediction import RegressionPrediction


def case(column=False):
    x = torch.randn(30)
    shape = (4, 30, 1) if column else (4, 30)
    prediction = RegressionPrediction.from_samples(torch.randn(shape), torch.rand(shape) + 0.1)
    return x.unsqueeze(-1) if column else x, prediction


def outline(collection):
    """Lower and upper edge of a filled band, by x."""
    vertices = collection.get_paths()[0].vertices
    return {x: (vertices[vertices[:, 0] == x, 1].min(), vertices[vertices[:, 0] == x, 1].max()) for x in vertices[:, 0]}


@pytest.mark.parametrize("part", ["total", "aleatoric", "epistemic"])
@pytest.mark.parametrize("column", [False, True])
def test_bands_are_multiples_of_the_standard_deviation(part, column):
    x, prediction = case(column)
    ax = plots.band(x, prediction, part=part)
    variance = prediction.variance if part == "total" else getattr(prediction, part)
    mean, scale = prediction.mean.flatten(), variance.flatten().sqrt()
    assert len(ax.collections) == 3
    for sigmas, collection in zip([3, 2, 1], ax.collections, strict=True):
        edges = outline(collection)
        found = np.array([edges[one] for one in x.flatten().tolist()])
        np.testing.assert_allclose(found[:, 0], mean - sigmas * scale)
        np.testing.assert_allclose(found[:, 1], mean + sigmas * scale)
    assert ax.collections[0].get_label() == f"±1, 2, 3 σ {part}"


def test_mean_is_drawn_in_order_of_x():
    x, prediction = case()
    ax = plots.band(x, prediction)
    order = x.argsort()
    (mean,) = [line for line in ax.get_lines() if line.get_label() == "mean"]
    np.testing.assert_allclose(mean.get_xdata(), x[order])
    np.testing.assert_allclose(mean.get_ydata(), prediction.mean[order])


def test_epistemic_part_of_the_total():
    x, prediction = case()
    ax = plots.band(x, prediction, num_sigmas=2)
    lines = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
    order = x.argsort()
    upper = (prediction.mean + 2 * prediction.epistemic.sqrt())[order]
    lower = (prediction.mean - 2 * prediction.epistemic.sqrt())[order]
    np.testing.assert_allclose(lines["±2 σ epistemic"], upper)
    np.testing.assert_allclose(lines["_lower"], lower)
    assert len(plots.band(x, prediction, part="aleatoric").get_lines()) == 1


def test_data_points():
    x, prediction = case()
    data = torch.randn(5, 1), torch.randn(5)
    ax = plots.band(x.numpy(), prediction, data=data)
    (points,) = [line for line in ax.get_lines() if line.get_label() == "data"]
    np.testing.assert_allclose(points.get_xdata(), data[0].squeeze(-1))
    np.testing.assert_allclose(points.get_ydata(), data[1])


def test_needs_no_samples_and_draws_on_the_given_axes():
    figure, ax = plt.subplots()
    prediction = RegressionPrediction(torch.zeros(3), torch.ones(3), torch.ones(3), 5)
    assert plots.band(torch.arange(3), prediction, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"x": torch.zeros(30, 2)}, "x"),
        ({"x": torch.zeros(7)}, "x"),
        ({"part": "both"}, "part"),
        ({"num_sigmas": 0}, "num_sigmas"),
        (
            {"prediction": RegressionPrediction.from_samples(torch.zeros(2, 30, 2), torch.tensor(1.0))},
            "prediction",
        ),
    ],
)
def test_wrong_arguments(arguments, name):
    x, prediction = case()
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        plots.band(**{"x": x, "prediction": prediction, **arguments})
