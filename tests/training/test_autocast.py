"""bfloat16 by autocast: losses, training and predictions stay near those of float32."""

import pyro.optim
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.ops.noise import noise_terms, structured_noise, structured_noise_
from pyro_vsd.training import fit

NETWORKS = {
    "mlp": (lambda: vsd.nn.mlp([20, 30, 10]), (20,)),
    "convnet": (lambda: vsd.nn.convnet(image_size=16), (3, 16, 16)),
    "lenet5": (vsd.nn.lenet5, (1, 28, 28)),
}
PRIORS = {"gaussian": vsd.nn.GaussianPrior(), "hierarchical": vsd.nn.HierarchicalPrior("gamma")}


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float32)


def autocast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def setup(name="mlp", prior="gaussian"):
    make, shape = NETWORKS[name]
    x, y = torch.randn(16, *shape), torch.arange(16) % 10
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make(), PRIORS[prior]), num_data=16)
    return model, vsd.VSDGuide(model), x, y


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_and_its_gradient(name, prior):
    model, guide, x, y = setup(name, prior)
    loss = vsd.VSD_ELBO()(model, guide)
    losses, gradients = [], []
    for enabled in (False, True):
        torch.manual_seed(1)
        loss.zero_grad()
        with autocast(enabled):
            value = loss(x, y)
        value.backward()
        losses.append(value.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in loss.parameters()]))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.0)
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", NETWORKS)
def test_predictions(name, prior, coherent):
    model, guide, x, _ = setup(name, prior)
    expected = vsd.predict(model, guide, x, num_samples=20, seed=1, coherent=coherent)
    with autocast():
        found = vsd.predict(model, guide, x, num_samples=20, seed=1, coherent=coherent)
    assert found.probs.dtype == torch.float32
    torch.testing.assert_close(found.probs, expected.probs, rtol=0.0, atol=0.02)


def test_predictions_of_a_regression():
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 20, 2])), num_data=16, noise="heteroscedastic")
    guide, x = vsd.VSDGuide(model), torch.randn(16, 3)
    expected = vsd.predict(model, guide, x, num_samples=50, seed=1)
    with autocast():
        found = vsd.predict(model, guide, x, num_samples=50, seed=1)
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean, expected.mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.stddev, expected.stddev, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("optimizer", ["torch", "pyro"])
def test_fit(optimizer):
    """All of it inside one autocast, which keeps its copies of the parameters until it ends."""
    make = {
        "torch": lambda: lambda groups: torch.optim.Adam(groups, lr=5e-3),
        "pyro": lambda: pyro.optim.Adam({"lr": 5e-3}),
    }[optimizer]
    train, test = vsd.datasets.digits(dtype=torch.float32)
    metrics = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 50, 10])), num_data=len(train))
        guide = vsd.VSDGuide(model)
        with autocast(enabled):
            history = fit(
                model, guide, train, epochs=5, seed=0, validation=test, validation_samples=10,
                optimizer=make(),
            )  # fmt: skip
        metrics.append(history[-1]["validation"])
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in (*model.parameters(), *guide.parameters()))
    assert metrics[1]["accuracy"] > 0.9
    assert metrics[1]["nll"] == pytest.approx(metrics[0]["nll"], rel=0.1)


def test_noise_keeps_the_precision_of_its_parameters():
    """A rotation in half precision is none; in memory of its own and in that of the normals."""
    eps = torch.randn(7, 20)
    terms = noise_terms(torch.randn(20), torch.randn(3, 20))
    expected = structured_noise(eps, terms.std, terms.N, terms.S)
    with autocast():
        found = structured_noise(eps, terms.std, terms.N, terms.S)
        in_place = structured_noise_(eps.clone(), terms.std, terms.N, terms.S)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(in_place, expected, rtol=1e-5, atol=1e-6)
