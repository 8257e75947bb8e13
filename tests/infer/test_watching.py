"""Mistakes that leave a loss finite and wrong: what VSD_ELBO, the guide and its module form say of them."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd
from tests.infer import models


def messages(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


# ---- the scale of the likelihood


class Plated(PyroModule):
    def __init__(self, size=None):
        super().__init__()
        self.size = size
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

    def forward(self, x, y=None):
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", self.size or len(x), subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def steps(model, batches, elbo=None):
    svi = SVI(model, vsd.VSDGuide(model), Adam({"lr": 0.01}), elbo or vsd.VSD_ELBO())
    return messages(lambda: [svi.step(*batch) for batch in batches])


def batches(count, rows=10):
    return [(torch.randn(rows, 3), torch.randn(rows)) for _ in range(count)]


def test_batches_at_scale_one():
    (message,) = steps(Plated(), batches(6))
    assert "batch of 10 rows" in message
    assert "subsample_size" in message


@pytest.mark.parametrize("particles", [1, 5])
def test_particles_do_not_use_up_the_looks(particles):
    assert len(steps(Plated(), batches(4), vsd.VSD_ELBO(particles))) == 1


def test_no_false_alarm_for_all_rows_shuffled_grown_or_scaled():
    (x, y), order = batches(1)[0], torch.randperm(10)
    assert not steps(Plated(), [(x, y), (x[order], y[order]), (x + 0.1, y), (x, y)])
    assert not steps(Plated(), [*batches(1, 5), *batches(1, 6), *batches(1, 7)])  # data that grows
    assert not steps(Plated(40), batches(6))


# ---- sequence first


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.out = nn.Linear(4, 2)

    def forward(self, x):  # (B, L, 4)
        h = self.layer(x if self.batch_first else x.transpose(0, 1))
        return self.out(h.mean(1 if self.batch_first else 0))


def sequences(batch_first, example_dim, length=5, rows=6):
    model = vsd.nn.Classifier(vsd.nn.bayesianize(Encoder(batch_first)), num_data=100)
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, example_dim=example_dim))
    x, y = torch.randn(rows, length, 4), torch.zeros(rows, dtype=torch.long)
    return messages(lambda: [loss(x, y) for _ in range(3)])


def test_a_sequence_before_the_batch():
    (message,) = sequences(False, 0)
    assert "example_dim=1" in message
    assert "net.layer.linear1.weight" in message
    assert "6 examples" in message


@pytest.mark.parametrize(("batch_first", "example_dim"), [(True, 0), (False, 1)])
def test_no_false_alarm_for_sequences(batch_first, example_dim):
    assert not sequences(batch_first, example_dim)
    assert not sequences(batch_first, example_dim, length=6)


# ---- guides that are not set up, networks that are no models


def test_an_optimiser_of_no_parameters():
    model = models.HandWritten()
    guide = vsd.VSDGuide(model)
    for parameters in (guide.parameters, vsd.VSD_ELBO()(model, guide).parameters):
        with pytest.raises(ValueError, match=r"guide\.setup"):
            torch.optim.Adam(parameters())
    guide.setup(*models.data())
    assert len(torch.optim.Adam(guide.parameters()).param_groups[0]["params"]) == 6


@pytest.mark.parametrize("make", [lambda: vsd.nn.mlp([3, 2]), lambda: vsd.nn.bayesianize(vsd.nn.mlp([3, 2]))])
def test_a_bare_network(make):
    with pytest.raises(TypeError, match=r"\bmodel\b.*Classifier.*Regressor"):
        vsd.VSDGuide(make())


# ---- as text


def test_a_guide_is_a_table():
    guide = vsd.VSDGuide(models.HandWritten())
    assert "guide.setup" in repr(guide)
    latent = vsd.VSDGuide(models.regressor(noise="latent", prior=vsd.nn.HierarchicalPrior()), init_alpha_spread=0.0)
    lines = [line.split() for line in repr(latent).splitlines()]
    assert lines[1] == ["site", "kind", "K", "T", "noise", "variance"]
    rows = {line[0]: line[1:] for line in lines[2:]}
    assert rows["net.0.weight"] == ["weight", str(models.D), "2", "0.2", "(0.2", "to", "0.2)"]
    assert rows["sigma"] == ["mean-field"]
    assert rows["net.0.weight_z"] == ["scale", "z"]
