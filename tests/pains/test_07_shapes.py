"""Elsewhere the first network ends in shape errors about plates and event dimensions (pyro#2797, #3183, #1409), or in a
likelihood of shape (20, 20) where (20,) was meant, which trains without a word (TyXe#18). Here the library declares
event dimensions by itself, and shapes that do not fit are errors with the remedy.

More of it: ``tests/nn/test_regressor.py``, ``test_classifiers.py``, ``tests/infer/test_guide.py``.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from tests.infer import models


@pytest.mark.parametrize("outputs", ["column", "flat"])
@pytest.mark.parametrize("make", [vsd.nn.Regressor, vsd.nn.BinaryClassifier])
def test_a_column_of_targets_is_an_error_with_the_remedy(make, outputs):
    net = vsd.nn.mlp([3, 4, 1])
    model = make(vsd.nn.bayesianize(net if outputs == "column" else nn.Sequential(net, nn.Flatten(-2))), num_data=20)
    x, y = torch.randn(6, 3), torch.ones(6, 1)
    with pytest.raises(ValueError, match=r"y: expected .*\(6,\).*got \(6, 1\).*y\.squeeze\(-1\)"):
        vsd.VSD_ELBO().loss(model, vsd.VSDGuide(model), x, y)


def test_a_column_of_classes_is_an_error_with_the_remedy():
    model, (x, _) = models.classifier(), models.data()
    with pytest.raises(ValueError, match=r"y: expected one class per row.*got \(12, 1\)\. Use y\.squeeze\(-1\)"):
        vsd.VSD_ELBO().loss(model, vsd.VSDGuide(model), x, models.labels().unsqueeze(-1))


def test_the_likelihood_has_one_number_per_row():
    """The (20, 20) of TyXe#18: a column of outputs against a row of targets."""
    model = models.regressor(num_data=20)
    x, y = models.data(20)
    trace = pyro.poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    assert trace.nodes["y"]["log_prob"].shape == (20,)


def test_weights_are_declared_whole():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(-3), nn.Linear(8, 3))
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=20)
    shapes = {name: (law.batch_shape, law.event_dim) for name, law in model.latent_sites().items()}
    assert shapes == {"net.0.weight": ((), 4), "net.2.weight": ((), 2)}


def test_a_forgotten_to_event_is_told_with_site_shape_and_remedy():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0))
        v = pyro.sample("v", dist.Normal(torch.zeros(2, 1), 1.0).to_event(2))
        pyro.sample("y", dist.Normal((x @ w @ v).squeeze(-1), 1.0).to_event(1), obs=y)

    message = r"site 'w' has shape \(3, 2\) but only 0 event dimension.*declare it with \.to_event\(2\)"
    with pytest.warns(UserWarning, match=message):
        vsd.VSDGuide(model).setup(*models.data())


def test_one_objective_for_two_depths_of_plates():
    """scvi-tools#895: an ELBO remembers the depth it met first."""
    x, y = models.data()
    elbo = vsd.VSD_ELBO(num_particles=3, vectorize_particles=True)
    model = models.regressor()
    elbo.loss(model, vsd.VSDGuide(model), x, y)
    fresh = vsd.VSD_ELBO(num_particles=3, vectorize_particles=True)
    assert fresh.max_plate_nesting == float("inf")
    assert elbo.max_plate_nesting == 2
