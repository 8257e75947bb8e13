"""The UCI program with its replica axes against the library's front door: one replica is one ``VSDGuide`` under SVI."""

import pyro
import pytest
import torch
from torch.testing import assert_close

import pyro_vsd as vsd
from benchmarks.paper.uci_networks import VSD, VSDHierarchical
from benchmarks.paper.uci_svi import SVINetworks, regressor, train_one
from benchmarks.paper.uci_training import batches, predict, train
from pyro_vsd.nn import HierarchicalPrior

SIZES, ROWS, BATCH = (3, 7, 1), 24, 8
P, C = 1, 2  # the second setting shares the noise of the first, so the first sees SVI's own stream
LAYERS = ("net.0", "net.2")


def data(sets=P):
    return torch.randn(sets, ROWS, SIZES[0]), torch.randn(sets, ROWS)


def options(kl_weight=0.3, per_weight=0.0, shape=(P, C)):
    numbers = {"kl_weight": kl_weight, "per_weight": per_weight, "init_alpha": 0.2}
    made = {key: torch.full(shape, value) for key, value in numbers.items()}
    made["kl_weight"][:, 1:] = 5.0  # another setting beside the one looked at
    return made


def parameters(model, guide):
    """The values of a guide and its model under the program's names."""
    state = guide.state_dict()
    out = {"log_sigma": model.log_sigma.detach().squeeze()}
    for i, layer in enumerate(LAYERS):
        out[f"bias{i}"] = getattr(model.net, layer[-1]).bias.detach()[None]
        for role in ("theta", "log_alpha", "vectors", "z_loc", "z_log_scale"):
            if f"{role}.{layer}.weight" in state:
                out[f"{role}{i}"] = state[f"{role}.{layer}.weight"].detach()
    return out


def copied(kind, model, guide, T, **numbers):
    net = kind(SIZES, options(**numbers), torch.Generator().manual_seed(0), T=T)
    values = parameters(model, guide)
    assert set(values) == {name for name, _ in net.named_parameters()}
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(values[name].expand_as(parameter))
    return net


def noise(seed):
    """The stream of torch's global generator after ``torch.manual_seed(seed)``."""
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kl_scale", ["unit", "weight"])
@pytest.mark.parametrize("T", [0, 2])
def test_a_replica_has_the_loss_and_the_gradients_of_the_guide(T, kl_scale):
    model, guide = regressor(SIZES, ROWS, T)
    net = copied(VSD, model, guide, T, per_weight=float(kl_scale == "weight"))
    (x,), (y,) = data()
    loss = vsd.VSD_ELBO(kl_weight=0.3, kl_scale=kl_scale)(model, guide)
    loss(x[:BATCH], y[:BATCH])  # the first call looks at the model's plates
    torch.manual_seed(5)
    expected = loss(x[:BATCH], y[:BATCH])
    ours = net.loss(x[None, :BATCH], y[None, :BATCH], ROWS, noise(5))
    assert_close(ours[0, 0], expected)
    expected.backward()
    ours[0, 0].backward()
    assert_close(net.theta0.grad[0, 0], guide.theta.net._modules["0"].weight.grad)
    assert_close(net.log_alpha1.grad[0, 0], guide.log_alpha.net._modules["2"].weight.grad)
    assert not net.theta0.grad[0, 1].any()  # replicas share nothing


def test_a_hierarchical_replica_pays_the_kl_of_the_guide():
    net = vsd.nn.bayesianize(vsd.nn.mlp(list(SIZES)), HierarchicalPrior())
    model = vsd.nn.Regressor(net, num_data=ROWS, noise="learned")
    guide = vsd.VSDGuide(model, num_reflections=2, scale_vectors=False)
    replicas = copied(VSDHierarchical, model, guide, 2, kl_weight=0.3, per_weight=1.0)
    (x,), (y,) = data()
    elbo = vsd.VSD_ELBO(kl_weight=0.3, kl_scale="weight")
    elbo.loss(model, guide, x, y)
    expected = 0.3 * sum(elbo.terms["kl"].values())
    assert_close(replicas.penalty(replicas.prepare())[0, 0], expected)


def test_training_follows_the_path_of_svi():
    steps, lr = 40, 1e-2
    x, y = data()
    model, guide = regressor(SIZES, ROWS, 2)
    net = copied(VSD, model, guide, 2)
    order = list(batches(P, ROWS, BATCH, steps, torch.Generator().manual_seed(1)))
    elbo = vsd.VSD_ELBO(kl_weight=0.3, max_plate_nesting=1)  # known, so that no draw is spent on finding it
    torch.manual_seed(7)
    train_one(model, guide, elbo, x[0], y[0], (index[0] for index in order), steps, lr)
    how = {"order": torch.Generator().manual_seed(1), "noise": noise(7)}
    train(net, x, y, steps=steps, lr=lr, batch=BATCH, **how)
    for name, value in parameters(model, guide).items():
        assert_close(getattr(net, name)[0, 0], value, rtol=1e-6, atol=1e-8)


def test_the_program_and_the_guide_predict_the_same_law():
    model, guide = regressor(SIZES, ROWS, 2)
    net = copied(VSD, model, guide, 2)
    x, _ = data()
    ours = predict(net, x, 20_000, noise(0))[0, 0]
    theirs = vsd.predict(model, guide, x[0], num_samples=20_000, seed=1)
    error = theirs.epistemic.sqrt() / 20_000**0.5
    assert ((ours.mean(0) - theirs.mean).abs() < 6 * error).all()
    assert_close(ours.var(0), theirs.epistemic, rtol=0.1, atol=0.0)


def test_networks_one_by_one_have_the_programs_interface():
    x, y = data(sets=2)
    pyro.clear_param_store()
    nets = SVINetworks(SIZES, options(shape=(2, 1)), noise(0))
    history = nets.train(x, y, steps=3, lr=1e-2, batch=BATCH, order=noise(1), noise=noise(2))
    assert len(history) == 1
    assert predict(nets, x, 11, noise(3)).shape == (2, 1, 11, ROWS)
