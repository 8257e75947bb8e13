"""Networks that were not written for us become Bayesian in one line and train."""

import pyro
import pytest
import torch
import torchvision.models as models
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

import pyro_vsd as vsd


def vit():
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10
    )


class Nested(nn.Module):
    """Lists in dictionaries around an encoder layer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        self.heads = nn.ModuleDict({"deep": nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 10)])})

    def forward(self, x):
        h = self.encoder(x.flatten(2).mT[:, :6, :].repeat(1, 1, 4)).mean(1)
        first, second = self.heads["deep"]
        return second(torch.relu(first(h)))


def candidates(net):
    return [m for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: models.resnet18(num_classes=10), id="resnet18"),
        pytest.param(vit, id="vit"),
        pytest.param(lambda: models.mobilenet_v3_small(num_classes=10), id="mobilenet", marks=pytest.mark.slow),
        pytest.param(lambda: models.convnext_tiny(num_classes=10), id="convnext", marks=pytest.mark.slow),
        pytest.param(lambda: models.swin_t(num_classes=10), id="swin", marks=pytest.mark.slow),
        pytest.param(Nested, id="nested"),
    ],
)
def test_becomes_bayesian_and_trains(make):
    pyro.set_rng_seed(0)
    net = make().to(torch.float32)
    x, y = torch.randn(4, 3, 32, 32, dtype=torch.float32), torch.arange(4)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=50)
    guide = vsd.VSDGuide(model)
    assert len(model.latent_sites()) == len(candidates(net))
    svi = SVI(model, guide, Adam({"lr": 1e-3}), vsd.VSD_ELBO())
    losses = [svi.step(x, y) for _ in range(6)]
    assert min(losses[3:]) < losses[0]
    assert vsd.predict(model, guide, x, num_samples=2).probs.shape == (4, 10)
    net.load_state_dict(vsd.nn.mean_network(model, guide).state_dict())


def test_vit_b_16_itself():
    """The whole architecture, one forward pass of three of its blocks."""
    net = models.vit_b_16(num_classes=10).to(torch.float32)
    del net.encoder.layers[3:]
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, inplace=True), num_data=50)
    sites = list(model.latent_sites())
    assert "net.conv_proj.weight" in sites
    assert "net.encoder.layers.0.self_attention.out_proj.weight" in sites
    assert "net.encoder.layers.2.mlp.3.weight" in sites
    assert sites[-1] == "net.heads.head.weight"
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
    loss(torch.randn(1, 3, 224, 224, dtype=torch.float32), torch.tensor([3])).backward()
    assert all(p.grad is not None for p in loss.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_attention_uses_the_draw_of_its_output_projection(training):
    """In evaluation mode too, where torch has a fast path that a lazy weight must not take."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = vsd.nn.bayesianize(layer).train(training)
    x = torch.randn(3, 5, 8)
    names = [name for name, _ in net.named_parameters() if name.endswith("in_proj_weight")]
    assert names == ["self_attn.in_proj_weight"]
    values = {f"{name}.weight": m.weight for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    with torch.no_grad():
        conditioned = pyro.poutine.condition(net, values)(x)
        torch.testing.assert_close(conditioned, layer.train(training)(x))
