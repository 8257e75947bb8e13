"""``torch.compile``: the same numbers, gradients and names. Without generated code, which would take minutes."""

import pyro
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.ops.noise import noise_terms, structured_noise
from tests.infer import models
from tests.training import cases

pytestmark = [
    pytest.mark.slow,
    # the compiler tells that it leaves its graph where a draw is made
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    # it looks at the gradients of all tensors it meets
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    with pyro.validation_enabled(False):
        yield
    torch.compiler.reset()


def build(make):
    torch.manual_seed(2)
    model = make()
    guide = vsd.VSDGuide(model, scale_vectors=False)
    return model, guide, vsd.VSD_ELBO(max_plate_nesting=1)(model, guide)


def lenet(num_data=cases.N):
    net = vsd.nn.bayesianize(vsd.nn.lenet5(num_classes=2, image_size=8), vsd.nn.HierarchicalPrior("gamma"))
    return vsd.nn.Classifier(net, num_data=num_data)


def batches(make):
    if make is lenet:
        x = torch.randn(cases.N, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        return [(x[:16], torch.arange(16) % 2), (x[16:], torch.arange(8) % 2)]
    data = cases.data()
    return [(data.x[:16], data.y[:16]), (data.x[16:], data.y[16:])]


def trained(make, part=None):
    """Two steps with batches of two sizes; losses, parameters, and a prediction."""
    model, guide, loss = build(make)
    names = list(loss.state_dict())
    if part is not None:
        {"net": model.net, "loss": loss}[part].compile(backend="eager")
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-4)
    losses = []
    for x, y in batches(make):
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert list(loss.state_dict()) == names
    return losses, cases.values(model, guide), vsd.predict(model, guide, batches(make)[0][0], num_samples=3, seed=1)


@pytest.mark.parametrize(
    ("make", "part"), [(lenet, "net"), (cases.regressor, "loss")], ids=["lenet5-hierarchical", "whole-objective"]
)
def test_the_same_training_and_prediction(make, part):
    found, expected = trained(make, part), trained(make)
    assert found[0] == expected[0]
    assert cases.same(found[1], expected[1])
    assert torch.equal(found[2].mean, expected[2].mean)


def test_the_noise_kernel():
    """With the graph of forward and backward passes that compilers are given."""
    log_alpha, vectors = torch.randn(20, requires_grad=True), torch.randn(3, 20, requires_grad=True)
    eps, results = torch.randn(7, 20), []
    for function in (structured_noise, torch.compile(structured_noise, backend="aot_eager", fullgraph=True)):
        terms = noise_terms(log_alpha, vectors)
        noise = function(eps, terms.std, terms.N, terms.S)
        results.append([noise, *torch.autograd.grad(noise.square().sum(), (log_alpha, vectors))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_mean_network_compiles_without_a_break():
    """The network that is served: one graph, the same numbers (scvi-tools#2256)."""
    model, (x, _) = models.classifier(), models.data()
    net = vsd.nn.mean_network(model, vsd.VSDGuide(model))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
