"""Plain networks out of Bayesian ones."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from pyro.nn import PyroModule
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.nn import Classifier, GaussianPrior, HierarchicalPrior, bayesianize, mean_network, mlp, prune, rank_units


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.parts[0].bias.requires_grad_(False)

    def forward(self, x):
        h = self.norm(self.embedding(x).mean(-2))
        for part in self.parts:
            h = torch.tanh(part(h))
        return self.head(h)


def trained(net, prior=GaussianPrior(), **options):  # noqa: B008 (frozen)
    """A model and a guide with all parameters somewhere else than they started."""
    model = Classifier(bayesianize(net, prior), num_data=20)
    guide = vsd.VSDGuide(model, **options)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
    return model, guide


@pytest.mark.parametrize("prior", [GaussianPrior(), HierarchicalPrior()], ids=["gaussian", "hierarchical"])
def test_mean_network_is_plain_and_at_the_mean(prior):
    net = Tied()
    model, guide = trained(net, prior)
    plain = mean_network(model, guide)
    assert [type(m) for m in plain.modules()] == [type(m) for m in net.modules()]
    assert list(plain.state_dict()) == list(net.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert plain.head.weight is plain.embedding.weight
    assert not any(key.startswith("_pyro") for m in plain.modules() for key in m.__dict__)
    means = guide.mean()
    torch.testing.assert_close(plain.head.weight.detach(), means["net.head.weight"])
    torch.testing.assert_close(plain.parts[1][0].weight.detach(), means["net.parts.1.0.weight"])
    if isinstance(prior, HierarchicalPrior):
        z = guide.scale_posterior("net.head.weight").base_dist
        expected = guide.posterior("net.head.weight").theta * torch.exp(z.loc + z.scale**2 / 2)
        torch.testing.assert_close(plain.head.weight, expected)
    assert torch.equal(plain.norm.running_mean, model.net.norm.running_mean)
    assert torch.equal(plain.parts[0].bias, model.net.parts[0].bias)
    assert not plain.parts[0].bias.requires_grad


def test_mean_network_is_a_copy():
    model, guide = trained(mlp([4, 5, 3]))
    plain = mean_network(model, guide)
    before = copy.deepcopy(dict(model.state_dict())), guide.mean()
    for parameter in plain.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(dict(model.state_dict()), before[0])
    torch.testing.assert_close(guide.mean(), before[1])
    assert isinstance(model.net, PyroModule)


def test_mean_network_is_what_little_noise_predicts():
    model, guide = trained(mlp([4, 5, 3]), init_alpha=1e-12)
    x = torch.randn(6, 4)
    torch.testing.assert_close(
        vsd.predict(model, guide, x, num_samples=2).probs, mean_network(model, guide)(x).softmax(-1).detach(),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


def test_mean_network_of_a_bare_network():
    net = bayesianize(mlp([4, 5, 3]))
    guide = SimpleNamespace(mean=lambda: {"0.weight": torch.ones(5, 4), "2.weight": torch.zeros(3, 5)})
    plain = mean_network(net, guide)
    assert torch.equal(plain(torch.ones(2, 4)), torch.zeros(2, 3))


def test_plain_networks_pickle_and_train():
    model, guide = trained(mlp([4, 5, 3]))
    plain = pickle.loads(pickle.dumps(mean_network(model, guide)))
    plain(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())


def test_the_wrong_guide():
    model, _ = trained(mlp([4, 5, 3]))
    with pytest.raises(ValueError, match=r"\bnet\.0\.weight\b"):
        mean_network(model, SimpleNamespace(mean=lambda: {"w": torch.ones(())}))


class Written(PyroModule):
    def __init__(self):
        super().__init__()
        self.inner = bayesianize(nn.Linear(4, 3))

    def forward(self, x):
        return self.inner(x)


def test_modules_written_by_hand_cannot_be_plain():
    model = Classifier(Written(), 20)
    guide = vsd.VSDGuide(model)
    with pytest.raises(ValueError, match=r"\bWritten\b"):
        mean_network(model, guide)
    assert type(mean_network(model.net.inner, guide)) is nn.Linear


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up, self.fc = nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(3, 2, 1), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.up(self.conv(x)).flatten(-3))


def test_prune_switches_off_the_noisiest_units():
    model, guide = trained(Conv(), num_reflections=0)
    limit = {}
    for site in model.latent_sites():
        alpha = guide.alpha(site).detach()
        limit[site] = alpha
    max_alpha = torch.cat(list(limit.values())).median().item()
    network, pruned = prune(model, guide, max_alpha)
    means, full = guide.mean(), mean_network(model, guide)
    for site, mask in pruned.items():
        assert torch.equal(mask, limit[site] > max_alpha)
        name = site.removeprefix("net.")
        weight = network.get_parameter(name).movedim(guide.noise_dim(site), 0)
        assert not weight[mask].any()
        torch.testing.assert_close(weight[~mask].detach(), means[site].movedim(guide.noise_dim(site), 0)[~mask])
    assert torch.equal(network.conv.bias, full.conv.bias)
    counts = prune(model, guide, max_alpha).counts
    assert counts["net.conv.weight"] == (int(pruned["net.conv.weight"].sum()), 3)
    assert counts["net.fc.weight"][1] == 8


def test_prune_goes_by_the_noise_of_the_unit_itself():
    """After a rotation α_k is no longer the variance of unit k: here one reflection swaps two units."""
    model = Classifier(bayesianize(nn.Linear(2, 3)), 20)
    guide = vsd.VSDGuide(model, num_reflections=1)
    with torch.no_grad():
        guide.vectors.net.weight.copy_(torch.tensor([[1.0, -1.0]]))
        guide.log_alpha.net.weight.copy_(torch.tensor([3.0, -3.0]))
    assert prune(model, guide, 1.0).pruned["net.weight"].tolist() == [False, True]
    assert rank_units(model, guide)["net.weight"].tolist() == [0, 1]


@pytest.mark.parametrize("max_alpha", [0.0, -1.0, float("nan")])
def test_bad_max_alpha(max_alpha):
    model, guide = trained(mlp([4, 5, 3]))
    with pytest.raises(ValueError, match=r"\bmax_alpha\b"):
        prune(model, guide, max_alpha)
