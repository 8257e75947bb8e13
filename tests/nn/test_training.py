"""Every network trains: the loss falls, every weight is a site, every parameter gets a gradient, states round-trip."""

import dataclasses

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd

NETWORKS = {
    "mlp": (lambda: vsd.nn.mlp([20, 30, 10]), (20,), 16),
    "convnet": (lambda: vsd.nn.convnet(image_size=16), (3, 16, 16), 8),
    "lenet5": (vsd.nn.lenet5, (1, 28, 28), 8),
    "alexnet": (vsd.nn.alexnet, (3, 32, 32), 8),
    "resnet18": (vsd.nn.resnet18, (3, 8, 8), 4),
    "preresnet110": (vsd.nn.preresnet110, (3, 8, 8), 4),
}
SLOW = {"resnet18", "preresnet110"}
PRIORS = {"gaussian": vsd.nn.GaussianPrior(), "hierarchical": vsd.nn.HierarchicalPrior("gamma")}


def cases(*names):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else [], id=n) for n in names or NETWORKS]


def setup(name, prior="gaussian", dtype=torch.float32, **options):
    pyro.set_rng_seed(0)
    make, shape, B = NETWORKS[name]
    net = make().to(dtype)
    x, y = torch.randn(B, *shape, dtype=dtype), torch.arange(B) % 10
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, PRIORS[prior]), num_data=100)
    return net, model, vsd.VSDGuide(model, **options), x, y


def weights_of(net):
    return [f"net.{n}.weight" for n, m in net.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", cases())
def test_twenty_steps_lower_the_loss(name, prior):
    _, model, guide, x, y = setup(name, prior)
    svi = SVI(model, guide, Adam({"lr": 2e-3}), vsd.VSD_ELBO())
    losses = torch.tensor([svi.step(x, y) for _ in range(20)])
    assert losses.isfinite().all()
    assert losses[-4:].mean() < losses[:4].mean()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", cases())
def test_every_weight_is_a_site_and_every_parameter_gets_a_gradient(name, prior):
    net, model, guide, x, y = setup(name, prior)
    trace = poutine.trace(guide).get_trace(x, y)
    expected = weights_of(net)
    if prior == "hierarchical":
        expected += [f"{site}_z" for site in expected]
    assert set(trace.stochastic_nodes) == set(expected)
    for site in weights_of(net):
        start = net.get_parameter(site.removeprefix("net."))
        torch.testing.assert_close(guide.posterior(site).theta, start)
    loss = vsd.VSD_ELBO()(model, guide)
    loss(x, y).backward()
    without = [n for n, p in loss.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
    # Behind a dead ReLU a gradient may vanish; whole parameters without any would be a broken path.
    zero = [n for n, p in loss.named_parameters() if not p.grad.any()]
    assert zero == []


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", cases())
def test_predict_and_states_round_trip(name, prior):
    _, model, guide, x, y = setup(name, prior)
    svi = SVI(model, guide, Adam({"lr": 1e-3}), vsd.VSD_ELBO())
    svi.step(x, y)
    statistics = {key: value.clone() for key, value in model.named_buffers()}
    prediction = vsd.predict(model, guide, x, num_samples=3, seed=1)
    assert prediction.probs.shape == (len(x), 10)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(x), dtype=torch.float32))
    assert model.training
    for key, value in model.named_buffers():
        assert torch.equal(value, statistics[key]), key
    states = model.state_dict(), guide.state_dict()
    pyro.clear_param_store()
    _, fresh, other, _, _ = setup(name, prior)
    fresh.load_state_dict(states[0])
    other.load_state_dict(states[1])
    again = vsd.predict(fresh, other, x, num_samples=3, seed=1)
    assert torch.equal(again.probs, prediction.probs)


@pytest.mark.parametrize("name", cases())
def test_making_a_guide_moves_no_statistics(name):
    _, model, _, _, _ = setup(name)
    assert all(value == 0 for key, value in model.named_buffers() if key.endswith("num_batches_tracked"))


@pytest.mark.parametrize("name", cases())
def test_bfloat16_autocast(name):
    _, model, guide, x, y = setup(name)
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(x, y)
        assert value.dtype == torch.float32
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in loss.parameters())
    assert min(losses[4:]) < losses[0]


@pytest.mark.parametrize("conv_noise", ["out", "in"])
@pytest.mark.parametrize("prior", PRIORS)
def test_noise_on_either_side_of_convolutions(conv_noise, prior):
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2), nn.Flatten(-3))
    chosen = PRIORS[prior]
    if isinstance(chosen, vsd.nn.HierarchicalPrior):
        chosen = dataclasses.replace(chosen, channels=conv_noise)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, chosen), num_data=10)
    guide = vsd.VSDGuide(model, conv_noise=conv_noise)
    x, y = torch.randn(5, 4, 4, 4), torch.arange(5)
    loss = vsd.VSD_ELBO()(model, guide)
    loss(x, y).backward()
    assert all(p.grad.any() for p in loss.parameters())
    units = {"out": (6, 3), "in": (2, 6)}[conv_noise]
    assert tuple(guide.alpha(f"net.{i}.weight").numel() for i in (0, 2)) == units


def test_noise_on_the_fully_connected_layers_only():
    net = vsd.nn.bayesianize(vsd.nn.convnet(image_size=8), include="fc*")
    model = vsd.nn.Classifier(net, num_data=10)
    assert list(model.latent_sites()) == ["net.fc1.weight", "net.fc2.weight"]


@pytest.mark.parametrize("noise", [0.1, "learned", "latent", "heteroscedastic"])
@pytest.mark.parametrize("D", [1, 2])
def test_regressors_train_and_predict(noise, D):
    x = torch.randn(40, 3)
    y = x[:, 0] if D == 1 else x[:, :2]
    outputs = 2 * D if noise == "heteroscedastic" else D
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 20, outputs])), num_data=40, noise=noise)
    guide = vsd.VSDGuide(model)
    svi = SVI(model, guide, Adam({"lr": 1e-2}), vsd.VSD_ELBO())
    losses = [svi.step(x, y) for _ in range(40)]
    assert sum(losses[-5:]) < sum(losses[:5])
    prediction = vsd.predict(model, guide, x, num_samples=5)
    assert prediction.mean.shape == y.shape
    assert prediction.log_prob(y).shape == (40,)


def test_a_trained_network_becomes_bayesian_where_it_stands():
    """Θ starts at the trained weights, so that with little noise the predictions are the network's own."""
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = vsd.nn.mlp([4, 30, 3])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=60)
    guide = vsd.VSDGuide(model, init_alpha=1e-10)
    probs = vsd.predict(model, guide, x, num_samples=2).probs
    torch.testing.assert_close(probs, net(x).softmax(-1).detach(), atol=1e-3, rtol=1e-3)


def test_a_frozen_backbone_stays_where_it_is():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, include="2"), num_data=20)
    guide = vsd.VSDGuide(model)
    svi = SVI(model, guide, Adam({"lr": 1e-1}), vsd.VSD_ELBO())
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    vsd.predict(model, guide, x, num_samples=2)
    for _ in range(3):
        svi.step(x, y)
    assert torch.equal(model.net[0].weight, net[0].weight)
    assert not model.net[0].weight.requires_grad


def test_two_models_in_one_process_train_their_own_parameters():
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    models = [vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=20) for _ in range(2)]
    svis = [SVI(model, vsd.VSDGuide(model), Adam({"lr": 1e-1}), vsd.VSD_ELBO()) for model in models]
    for _ in range(2):
        for svi in svis:
            svi.step(x, y)
    biases = [model.net[2].bias.detach() for model in models]
    assert all(bias.any() for bias in biases)
    assert not torch.equal(*biases)


def test_parameters_local_to_modules():
    """Pyro's other way to keep parameters, for the module form."""
    with pyro.settings.context(module_local_params=True):
        _, model, guide, x, y = setup("mlp", "hierarchical")
        loss = vsd.VSD_ELBO()(model, guide)
        loss(x, y).backward()
        assert all(p.grad is not None and p.grad.any() for p in loss.parameters())
        assert not list(pyro.get_param_store())
