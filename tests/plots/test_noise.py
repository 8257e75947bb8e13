"""Heat map of the covariance and noise variances, read back from their artists."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

import pyro_vsd as vsd
from pyro_vsd import plots


def covariance(num_units=6):
    factor = torch.randn(num_units, num_units)
    return factor @ factor.mT + torch.eye(num_units)


@pytest.mark.parametrize("as_distribution", [False, True])
def test_covariance_image(as_distribution):
    matrix = covariance()
    ax = plots.noise_covariance(MultivariateNormal(torch.ones(6), matrix) if as_distribution else matrix)
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), matrix, rtol=1e-9)
    assert image.colorbar.ax.get_ylabel() == "covariance"


def test_correlation_image():
    matrix = covariance()
    image = plots.noise_covariance(matrix, correlation=True).images[0]
    scale = np.sqrt(np.diag(matrix))
    np.testing.assert_allclose(image.get_array(), matrix.numpy() / np.outer(scale, scale))
    assert image.colorbar.ax.get_ylabel() == "correlation"


def test_colours_are_symmetric_and_end_at_the_largest_entry_off_the_diagonal():
    matrix = torch.tensor([[9.0, -0.5], [-0.5, 4.0]])
    assert plots.noise_covariance(matrix).images[0].get_clim() == (-0.5, 0.5)


def test_independent_noise_uses_the_diagonal():
    assert plots.noise_covariance(torch.diag(torch.tensor([1.0, 3.0]))).images[0].get_clim() == (-3, 3)


def test_lightness_rises_with_the_value():
    """So that signs differ in grey print."""
    image = plots.noise_covariance(covariance()).images[0]
    grey = image.cmap(np.linspace(0, 1, 11))[:, :3] @ [0.299, 0.587, 0.114]
    assert (np.diff(grey) > 0).all()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 0), (1, 2, 2)])
def test_wrong_covariances(shape):
    with pytest.raises(ValueError, match=r"\bnoise\b"):
        plots.noise_covariance(torch.ones(shape))


@pytest.mark.parametrize("num_units", [1, 20, 300])
def test_variances_of_one_layer_by_unit(num_units):
    alpha = torch.rand(num_units) + 0.01
    ax = plots.noise_variances(alpha)
    points = ax.get_lines()[0]
    np.testing.assert_allclose(points.get_xdata(), np.arange(num_units))
    np.testing.assert_allclose(points.get_ydata(), alpha)
    assert (ax.get_yscale(), ax.get_xlabel(), ax.get_legend()) == ("log", "unit", None)
    assert bool(ax.collections) == (num_units <= 100)


def test_variances_of_several_layers_are_sorted():
    layers = {"0.weight": torch.rand(7) + 0.1, "2.weight": torch.rand(3) + 0.1}
    ax = plots.noise_variances(layers)
    for patch, (name, alpha) in zip(ax.patches, layers.items(), strict=True):
        heights, edges, _ = patch.get_data()
        np.testing.assert_allclose(heights, alpha.sort().values)
        np.testing.assert_allclose(edges, np.linspace(0, 1, len(alpha) + 1))
        assert patch.get_label() == f"{name} ({len(alpha)} units)"


def test_draws_on_the_given_axes():
    figure, (left, right) = plt.subplots(1, 2)
    assert plots.noise_variances(torch.rand(4) + 0.1, ax=left) is left
    assert plots.noise_covariance(covariance(), ax=right) is right
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()


@pytest.mark.parametrize("alpha", [[[1.0, 1.0]], [], [0.1, -0.1], [torch.nan]])
def test_wrong_variances(alpha):
    with pytest.raises(ValueError, match=r"\balpha of first\b"):
        plots.noise_variances({"first": torch.tensor(alpha)})


def test_droprates_is_an_alias():
    with pytest.warns(DeprecationWarning, match="noise_variances"):
        ax = plots.droprates(torch.tensor([0.1, 0.2]))
    assert ax.get_ylabel() == "noise variance α"


def test_a_guide_draws_itself():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=10)
    guide = vsd.VSDGuide(model)
    labels = [patch.get_label() for patch in plots.noise_variances(guide).patches]
    assert labels == ["net.0.weight (4 units)", "net.2.weight (8 units)"]
    image = plots.noise_covariance(guide, "net.2.weight").images[0]
    np.testing.assert_allclose(image.get_array(), guide.noise("net.2.weight").covariance_matrix.detach(), rtol=1e-9)
    with pytest.raises(ValueError, match=r"\bsite\b"):
        plots.noise_covariance(guide)
    single = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 3])), num_data=10)
    assert plots.noise_covariance(vsd.VSDGuide(single)).images
