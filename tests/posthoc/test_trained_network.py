"""Noise for trained networks: the weights stay, the noise is the closed form, and it finds what is odd."""

import copy

import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.diagnosis import best_droprates, best_variances, leading_reflections
from pyro_vsd.diagnosis.gauss_newton import curvature_or_reason


def trained(net, x, y, loss, steps=150):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net.eval()


def blobs(num_rows=400):
    """Three classes of two inputs; a third input is always zero."""
    y = torch.arange(num_rows) % 3
    centres = torch.tensor([[0.0, 1.5, 0.0], [1.3, -0.8, 0.0], [-1.3, -0.8, 0.0]])
    return centres[y] + torch.randn(num_rows, 3) * torch.tensor([0.7, 0.7, 0.0]), y


def halves(x, y):
    """Copies, so that the halves share no memory."""
    return tuple(t[::2].clone() for t in (x, y)), tuple(t[1::2].clone() for t in (x, y))


@pytest.fixture
def classes():
    train, validation = halves(*blobs())
    return trained(vsd.nn.mlp([3, 12, 3]), *train, nn.functional.cross_entropy), train, validation


def nll(model, guide, rows):
    return vsd.metrics.nll(vsd.predict(model, guide, rows[0], seed=0), rows[1])


def test_weights_stay_bit_for_bit(classes):
    net, train, validation = classes
    before = copy.deepcopy(net.state_dict())
    model, guide = vsd.from_trained(net, train, validation)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(guide.mean()["net.0.weight"], before["0.weight"])
    assert torch.equal(guide.mean()["net.2.weight"], before["2.weight"])
    assert torch.equal(model.net[0].bias, before["0.bias"])


def test_validation_is_as_good_as_before(classes):
    net, train, validation = classes
    model, guide = vsd.from_trained(net, train, validation, tolerance=0.01)
    plain = vsd.metrics.nll(net(validation[0]).softmax(-1), validation[1])
    assert nll(model, guide, validation) < 1.011 * plain
    assert guide.alpha("net.0.weight")[:2].min() > 1e-4


def test_more_tolerance_is_more_noise(classes):
    variances = [vsd.from_trained(*classes, tolerance=t)[1].alpha("net.2.weight").median() for t in (0.003, 0.1)]
    assert variances[1] > 1.5 * variances[0]


def test_an_input_that_was_always_zero_is_found_out(classes):
    """Noise on it costs nothing, so it has much, and a row that uses it has predictions that disagree."""
    net, train, validation = classes
    model, guide = vsd.from_trained(net, train, validation)
    assert guide.noise("net.0.weight").variance[2] > 100
    odd = torch.tensor([0.0, 0.0, 3.0]) + validation[0]
    inside, outside = (vsd.predict(model, guide, x, seed=0).mutual_information for x in (validation[0], odd))
    assert vsd.metrics.auroc(-inside, -outside) > 0.95


def test_noise_is_the_closed_form_of_a_linear_gaussian_model():
    """There A = diag(θ) Xᵀ X diag(θ) / σ², whatever the labels."""
    x = torch.randn(400, 5) @ torch.randn(5, 5)
    net = nn.Linear(5, 1, bias=False)
    y = net(x).squeeze(-1).detach() + 0.3 * torch.randn(400)
    train, validation = halves(x, y)
    model, guide = vsd.from_trained(net, train, validation, "regression", num_reflections=4)
    sigma = (net(validation[0]).squeeze(-1) - validation[1]).square().mean().sqrt()
    torch.testing.assert_close(model.log_sigma.exp().squeeze(), sigma)
    h = (train[0] * net.weight / sigma).detach()
    vectors = leading_reflections(h.mT @ h, 4)
    found = guide.noise("net.weight").covariance_matrix.detach()
    expected = [
        vsd.distributions.HouseholderNormal(1.0, best_variances(h.mT @ h, vectors, c), vectors).covariance_matrix
        for c in (2.0 ** torch.arange(-16, 17, 0.25)).tolist()
    ]
    closest = min(expected, key=lambda S: float((S - found).abs().max()))
    torch.testing.assert_close(found, closest, rtol=1e-6, atol=1e-9)


def test_wide_weights_have_independent_noise(classes):
    _, guide = vsd.from_trained(*classes, max_units=3)
    assert bool(guide.get_parameter("vectors.net.0.weight").any())
    assert not bool(guide.get_parameter("vectors.net.2.weight").any())
    assert guide.alpha("net.2.weight").std() > 0


def test_seeds_repeat_and_generators_stay(classes):
    state = torch.get_rng_state()
    first, second = (vsd.from_trained(*classes, seed=4)[1] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.alpha("net.0.weight"), second.alpha("net.0.weight"))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.drop(self.norm(self.conv(x)).relu().mean((-2, -1))))


def images():
    y = torch.arange(120) % 2
    return torch.randn(120, 1, 6, 6) + y.reshape(-1, 1, 1, 1), y


def test_convolutions_batch_norm_and_dropout():
    train, validation = halves(*images())
    net = trained(Images().train(), *train, nn.functional.cross_entropy)
    statistics = net.norm.running_mean.clone()
    model, guide = vsd.from_trained(net, train, validation)
    assert guide.alpha("net.conv.weight").shape == (4,)
    assert guide.alpha("net.conv.weight").max() > 1e-4
    assert torch.equal(model.net.norm.running_mean, statistics)


def test_frozen_weights_have_no_noise():
    train, validation = halves(*images())
    net = trained(Images(), *train, nn.functional.cross_entropy)
    net.conv.requires_grad_(False)
    _, guide = vsd.from_trained(net, train, validation)
    assert list(guide.sites) == ["net.out.weight"]


def test_chosen_weights_and_options_of_the_guide():
    train, validation = halves(*images())
    net = vsd.nn.bayesianize(trained(Images(), *train, nn.functional.cross_entropy), include="conv")
    _, guide = vsd.from_trained(net, train, validation, conv_noise="in")
    assert guide.alpha("net.conv.weight").shape == (1,)


def test_yes_or_no():
    train, validation = halves(*images())
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 1))
    trained(net, train[0], train[1].double().unsqueeze(-1), nn.functional.binary_cross_entropy_with_logits)
    model, guide = vsd.from_trained(net, train, (validation[0], validation[1].double()))
    assert isinstance(model, vsd.nn.BinaryClassifier)
    assert vsd.calibrate(model, guide, (validation[0], validation[1].double()), num_samples=10).num_rows == 60


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression(outputs):
    x = torch.randn(300, 2)
    y = torch.stack([x[:, 0].sin() + 0.1 * torch.randn(300), x[:, 1] + 0.5 * torch.randn(300)], -1)
    train, validation = halves(x, y if outputs == 2 else y[:, 0])
    net = vsd.nn.mlp([2, 20, outputs])
    trained(net, train[0], train[1].reshape(-1, outputs), nn.functional.mse_loss)
    model, guide = vsd.from_trained(net, train, validation, task="regression")
    sigma = model.log_sigma.exp().reshape(-1)
    assert len(sigma) == outputs
    assert 0.05 < sigma[0] < 0.25
    assert bool((vsd.predict(model, guide, validation[0]).epistemic > 0).all())


def test_a_column_of_targets():
    x = torch.randn(200, 2)
    y = x.sum(-1) + 0.1 * torch.randn(200)
    net = trained(vsd.nn.mlp([2, 10, 1]), x[:100], y[:100, None], nn.functional.mse_loss)
    one, column = (
        vsd.from_trained(net, (x[:100], t[:100]), (x[100:], t[100:]), "regression") for t in (y, y.unsqueeze(-1))
    )
    assert torch.equal(column[0].log_sigma, one[0].log_sigma)
    assert torch.equal(column[1].alpha("net.0.weight"), one[1].alpha("net.0.weight"))


def test_a_loader_will_do(classes):
    net, train, validation = classes
    sets = [torch.utils.data.TensorDataset(*rows) for rows in (train, validation)]
    model, guide = vsd.from_trained(net, *(torch.utils.data.DataLoader(rows, batch_size=50) for rows in sets))
    assert guide.alpha("net.0.weight").isfinite().all()
    assert model.num_data == 200


def test_training_goes_on(classes):
    net, train, validation = classes
    model, guide = vsd.from_trained(net, train, validation, num_reflections=2)
    before = nll(model, guide, validation)
    vsd.fit(model, guide, train, epochs=3, lr=1e-3, progress=False)
    assert nll(model, guide, validation) < before + 0.1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_a_weight_whose_rows_share_a_draw_has_no_noise():
    y = torch.arange(80) % 2
    train, validation = halves(torch.randn(80, 3, 4) + y.reshape(-1, 1, 1), y)
    with pytest.warns(UserWarning, match=r"net\.attention\.out_proj\.weight"):
        _, guide = vsd.from_trained(Attention().eval(), train, validation)
    assert guide.alpha("net.attention.out_proj.weight").max() < 1e-10
    assert guide.alpha("net.out.weight").max() > 1e-4


def test_progress_is_shown(classes, capsys):
    vsd.from_trained(*classes, progress=True)
    shown = capsys.readouterr().err
    assert "curvature" in shown
    assert "strength" in shown


@pytest.mark.parametrize(
    ("name", "error", "change"),
    [
        ("net", TypeError, {"net": "mlp"}),
        ("net", ValueError, {"net": nn.ReLU()}),
        ("task", ValueError, {"task": "ranking"}),
        ("validation", ValueError, {"validation": blobs(20)}),
        ("num_reflections", ValueError, {"num_reflections": -1}),
        ("tolerance", ValueError, {"tolerance": 0.0}),
        ("num_samples", ValueError, {"num_samples": 0}),
        ("max_units", ValueError, {"max_units": -1}),
        ("seed", ValueError, {"seed": "a"}),
        ("train", TypeError, {"train": torch.zeros(3)}),
        ("train", ValueError, {"train": (batch for batch in ())}),
    ],
)
def test_wrong_arguments(classes, name, error, change):
    arguments = dict(zip(("net", "train", "validation"), classes, strict=True)) | change
    with pytest.raises((error, TypeError), match=rf"\b{name}\b"):
        vsd.from_trained(**arguments)


@pytest.mark.parametrize("validation", [lambda t: t, lambda t: t[50:150], lambda t: t[:100].clone()])
def test_training_rows_are_no_validation(classes, validation):
    net, train, _ = classes
    with pytest.raises(ValueError, match=r"\bvalidation\b"):
        vsd.from_trained(net, train, tuple(validation(t) for t in train))


@pytest.mark.parametrize("num_labels", [None, 1])
def test_drawn_labels_give_the_same_curvature_on_average(classes, num_labels):
    net, train, _ = classes
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=200)
    guide = vsd.VSDGuide(model, init_alpha=1e-12, init_alpha_spread=0.0, scale_vectors=False)
    exact = curvature_or_reason(model, guide, train, {}, 512)[0]["net.2.weight"]
    draws = [
        curvature_or_reason(model, guide, train, {}, 4, num_labels=num_labels, wide=True)[0]["net.2.weight"]
        for _ in range(100 if num_labels else 1)
    ]
    found = torch.stack(draws).mean(0)  # wide: the diagonal alone
    near = {"rtol": 0.2, "atol": 0.02 * float(exact.max())} if num_labels else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, exact.diagonal(), **near)
    torch.testing.assert_close(best_droprates(exact, 1.0), best_droprates(exact.diagonal(), 1.0))
