"""The noise axis of a weight, found by the operation that meets it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import pyro_vsd as vsd
from tests.infer import models


def model_of(shape, use):
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand(list(shape)).to_event(len(shape)))
        out = use(w)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(out.dim()), obs=torch.zeros_like(out))

    return model


x = torch.randn(5, 3)
image = torch.randn(2, 4, 6, 6)
PRODUCTS = {
    "x @ w": ((3, 2), lambda w: x @ w, -2),
    "matmul(x, w)": ((3, 2), lambda w: torch.matmul(x, w), -2),
    "x.mm(w)": ((3, 2), lambda w: x.mm(w), -2),
    "vector @ w": ((3, 2), lambda w: x[0] @ w, -2),
    "w @ x": ((2, 3), lambda w: w @ x.T, -1),
    "w @ vector": ((2, 3), lambda w: w @ x[0], -1),
    "w.mv(vector)": ((2, 3), lambda w: w.mv(x[0]), -1),
    "linear": ((2, 3), lambda w: F.linear(x, w), -1),
    "linear, by name": ((2, 3), lambda w: F.linear(input=x, weight=w), -1),
    "x @ w.T": ((2, 3), lambda w: x @ w.T, -1),
    "x @ w.t()": ((2, 3), lambda w: x @ w.t(), -1),
    "x @ w.mT": ((2, 3), lambda w: x @ w.mT, -1),
    "x @ w.transpose": ((2, 3), lambda w: x @ w.transpose(-1, -2), -1),
    "linear, w.T": ((3, 2), lambda w: F.linear(x, w.T), -2),
    "addmm": ((3, 2), lambda w: torch.addmm(torch.zeros(2), x, w), -2),
    "after clone": ((3, 2), lambda w: x @ w.clone(), -2),
    "after squeeze": ((3, 2), lambda w: x @ w.unsqueeze(0).squeeze(0), -2),
    "size first": ((2, 3), lambda w: F.linear(x.expand(5, w.size(1)), w), -1),
    "no product": ((2, 3), lambda w: w.sum(0), -1),
    "never met": ((2, 3), lambda w: torch.zeros(2), -1),
    "einsum": ((2, 3), lambda w: torch.einsum("bi,oi->bo", x, w), -1),
}


@pytest.mark.parametrize(("shape", "use", "axis"), PRODUCTS.values(), ids=PRODUCTS)
def test_axis_of_products(shape, use, axis):
    guide = vsd.VSDGuide(model_of(shape, use)).setup()
    assert guide.noise_dim("w") == axis
    assert guide.alpha("w").shape == (shape[axis],)


CONVOLUTIONS = {
    "conv1d": ((7, 4, 3), lambda w: F.conv1d(image[..., 0], w), (-3, -2)),
    "conv2d": ((7, 4, 3, 3), lambda w: F.conv2d(image, w), (-4, -3)),
    "conv2d, groups": ((8, 2, 3, 3), lambda w: F.conv2d(image, w, groups=2), (-4, -3)),
    "conv3d": ((7, 2, 3, 3, 3), lambda w: F.conv3d(image.unsqueeze(0)[:, :2], w), (-5, -4)),
    "transposed 1d": ((4, 7, 3), lambda w: F.conv_transpose1d(image[..., 0], w), (-2, -3)),
    "transposed 2d": ((4, 7, 3, 3), lambda w: F.conv_transpose2d(image, w), (-3, -4)),
}


@pytest.mark.parametrize("conv_noise", ["out", "in"])
@pytest.mark.parametrize(("shape", "use", "axes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_axis_of_convolutions(shape, use, axes, conv_noise):
    guide = vsd.VSDGuide(model_of(shape, use), conv_noise=conv_noise).setup()
    assert guide.noise_dim("w") == axes[conv_noise == "in"]


@pytest.mark.parametrize("conv_noise", ["out", "in"])
@pytest.mark.parametrize(
    "layer", [torch.nn.Conv2d(4, 7, 3), torch.nn.ConvTranspose2d(4, 7, 3)], ids=["conv", "transposed"]
)
def test_layers_of_the_library_and_by_hand_agree(layer, conv_noise):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = layer

        def forward(self, x):
            return self.conv(x).mean((-1, -2))

    ours = vsd.nn.Classifier(vsd.nn.bayesianize(Net()), num_data=10)
    call = F.conv2d if isinstance(layer, torch.nn.Conv2d) else F.conv_transpose2d
    hand = model_of(layer.weight.shape, lambda w: call(image, w))
    found = vsd.VSDGuide(ours, conv_noise=conv_noise).noise_dim("net.conv.weight")
    assert found == vsd.VSDGuide(hand, conv_noise=conv_noise).setup().noise_dim("w")


@pytest.mark.parametrize(("given", "axis"), [(-1, -1), (-2, -2), (0, -2), (1, -1)])
def test_a_dict_overrides(given, axis):
    guide = vsd.VSDGuide(model_of((3, 2), lambda w: x @ w), noise_dim={"w": given}).setup()
    assert guide.noise_dim("w") == axis
    assert guide.alpha("w").shape == ((3, 2)[axis],)


def test_the_axis_found_is_the_axis_used():
    """With noise on the three inputs, outputs of ``x @ w`` given unit inputs vary with the input alone."""
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        return x @ w

    guide = vsd.VSDGuide(model, init_loc_fn=lambda site: weights).setup(torch.eye(3))
    out = pyro.poutine.replay(model, trace=pyro.poutine.trace(guide).get_trace(torch.eye(3)))(torch.eye(3)).detach()
    ratio = out / weights
    assert_close(ratio[:, 0], ratio[:, 1])
    assert float(ratio[:, 0].std()) > 0


def test_setup_leaves_no_probe_behind():
    guide = vsd.VSDGuide(models.HandWritten()).setup(*models.data())
    assert all(type(p) is torch.nn.Parameter for p in guide.parameters())
    assert all(type(p.data) is torch.Tensor for p in guide.parameters())
    values = [site["value"] for _, site in guide.prototype_trace.iter_stochastic_nodes()]
    assert all(type(value) is torch.Tensor for value in values)


def test_a_hierarchical_prior_fixes_the_axis():
    prior = vsd.nn.HierarchicalPrior()
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 7, 3), torch.nn.Flatten(), torch.nn.Linear(7 * 16, 2))
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, prior), num_data=10)
    with pytest.raises(ValueError, match=r"\bconv_noise\b"):
        vsd.VSDGuide(model, conv_noise="in")
    stated = vsd.nn.Classifier(vsd.nn.bayesianize(net, vsd.nn.HierarchicalPrior(channels="in")), num_data=10)
    for options in ({}, {"conv_noise": "in"}):
        assert vsd.VSDGuide(stated, **options).noise_dim("net.0.weight") == -3
