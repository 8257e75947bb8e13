"""Samplers: plain modules with their draws inside, through ``torch.export`` and ONNX."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.testing import assert_close

import pyro_vsd as vsd
from pyro_vsd.export import matched

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="the extra `export` is not installed")


class Attention(nn.Module):
    """Classifies token sequences."""

    def __init__(self, first=True):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.first = first

    def forward(self, x):
        h = self.embedding(x)
        h = self.encoder(h) if self.first else self.encoder(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


class Tied(nn.Module):
    """The output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


class Frames(nn.Module):
    """A layer whose examples are frames, not rows; a matrix product; a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.frame, self.lstm, self.head = nn.Linear(4, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        frames = torch.relu(self.frame(x.transpose(0, 1).reshape(-1, 4)))
        h, _ = self.lstm(frames.reshape(x.shape[1], x.shape[0], 5).transpose(0, 1))
        return h[:, -1] @ self.head.weight.T + self.head.bias


class Centred(nn.Module):
    """Rows depend on each other."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(torch.tanh(h - 0.5 * h.mean(0)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, a, b):
        return self.head(torch.tanh(self.left(a) + self.right(b)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


IMAGES, TOKENS = torch.randn(5, 2, 6, 6), torch.randint(0, 7, (5, 4))
#: network, input, whether all draws pass at once, options of the guide, prior
CASES = {
    "mlp": (lambda: vsd.nn.mlp([4, 6, 6, 3]), torch.randn(5, 4), True, {}, vsd.nn.GaussianPrior()),
    "hierarchical": (lambda: vsd.nn.mlp([4, 6, 3]), torch.randn(5, 4), True, {}, vsd.nn.HierarchicalPrior()),
    "vectors": (lambda: vsd.nn.mlp([4, 3]), torch.randn(5, 4), True, {"vectors": "fc"}, vsd.nn.GaussianPrior()),
    "noise on outputs": (convolutions, IMAGES, True, {}, vsd.nn.HierarchicalPrior(channels="out")),
    "noise on inputs": (convolutions, IMAGES, True, {"conv_noise": "in"}, vsd.nn.GaussianPrior()),
    "attention": (Attention, TOKENS, True, {}, vsd.nn.GaussianPrior()),
    "sequence first": (lambda: Attention(False), TOKENS, True, {"example_dim": 1}, vsd.nn.GaussianPrior()),
    "rows in an unknown place": (lambda: Attention(False), TOKENS, False, {}, vsd.nn.GaussianPrior()),
    "tied": (Tied, TOKENS, False, {}, vsd.nn.GaussianPrior()),
    "frames": (Frames, torch.randn(5, 3, 4), False, {}, vsd.nn.GaussianPrior()),
    "rows that depend on each other": (Centred, torch.randn(5, 4), False, {}, vsd.nn.GaussianPrior()),
    "two inputs": (TwoInputs, (torch.randn(5, 4), torch.randn(5, 5)), True, {}, vsd.nn.GaussianPrior()),
}  # fmt: skip


def moved(model, guide):
    """All parameters and running statistics somewhere else than they started."""
    with torch.no_grad():
        for parameter in [*model.parameters(), *guide.parameters()]:
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
    return model, guide


def trained(case):
    make, x, _, options, prior = CASES[case]
    model = vsd.nn.Classifier(vsd.nn.bayesianize(make(), prior), num_data=20)
    return *moved(model, vsd.VSDGuide(model, **options)), x


@pytest.mark.parametrize("case", CASES)
def test_random_draws_are_those_of_predict(case):
    model, guide, x = trained(case)
    module = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")
    prediction = vsd.predict(model, guide, x, num_samples=6, seed=3)
    out = module(x)
    torch.testing.assert_close(out["samples"], prediction.samples)
    torch.testing.assert_close(out["probs"], prediction.probs)
    assert module.members[0].batched is CASES[case][2]


def trained_ensemble(classes):
    x = torch.randn(80, 4)
    net = vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3 if classes else 1]))
    if classes:
        model, y = vsd.nn.Classifier(net, num_data=80), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    else:
        model, y = vsd.nn.Regressor(net, num_data=80, noise="learned"), x[:, 0]
    ensemble = vsd.Ensemble(model, members=3, kl_weight=[0.1, 1.0, None])
    return ensemble.fit((x, y), epochs=2, validation=None, progress=False), x


@pytest.mark.parametrize("classes", [True, False])
def test_an_ensemble_gives_what_its_predictions_are(classes):
    ensemble, x = trained_ensemble(classes)
    ensemble.stacking = vsd.ensemble.Stacking(torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([1.5, 0.7, 1.0]))
    found = vsd.export.sampler(ensemble, draws=12, seed=3, noise="random")(x)
    expected = ensemble.predict(x, num_samples=12, seed=3)
    if classes:
        assert_close(found["probs"], expected.probs)
    else:
        assert_close(found["mean"], expected.mean)
        assert_close(found["stddev"], expected.stddev)
    with pytest.raises(ValueError, match="draws"):
        vsd.export.sampler(ensemble, draws=2)
    with pytest.raises(ValueError, match="guide"):
        vsd.export.sampler(ensemble, ensemble.members[0][1])


@pytest.mark.parametrize("calibration", [{"noise": 2.0, "temperature": 1.5}, {"noise": 0.5, "scale": 1.5}])
def test_a_calibration_is_that_of_predict(calibration):
    ensemble, x = trained_ensemble("temperature" in calibration)
    (model, guide), calibration = ensemble.members[1], vsd.Calibration(**calibration)
    found = vsd.export.sampler(model, guide, draws=12, seed=3, noise="random", calibration=calibration)(x)
    expected = vsd.predict(model, guide, x, num_samples=12, seed=3, calibration=calibration)
    assert_close(found["samples"], expected.samples)
    if "stddev" in found:
        assert_close(found["stddev"], expected.stddev)
    wrong = vsd.Calibration(scale=2.0) if "probs" in found else vsd.Calibration(temperature=2.0)
    with pytest.raises(ValueError, match="calibration"):
        vsd.export.sampler(model, guide, calibration=wrong)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("noise", [0.3, "learned", "latent", "heteroscedastic"])
def test_numbers_are_those_of_predict(noise, outputs):
    net = vsd.nn.mlp([4, 6, outputs * (2 if noise == "heteroscedastic" else 1)])
    options = {"num_outputs": outputs} if noise in ("learned", "latent") else {}
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=20, noise=noise, **options)
    model, guide = moved(model, vsd.VSDGuide(model))
    x = torch.randn(5, 4)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")(x)
    prediction = vsd.predict(model, guide, x, num_samples=6, seed=3)
    for name in ("samples", "mean", "stddev"):
        torch.testing.assert_close(out[name], getattr(prediction, name))


def test_numbers_of_a_network_without_parameters():
    model = vsd.nn.Regressor(vsd.nn.bayesianize(nn.Linear(4, 1, bias=False)), num_data=20)
    guide, x = vsd.VSDGuide(model), torch.randn(5, 4)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")(x)
    torch.testing.assert_close(out["stddev"], vsd.predict(model, guide, x, num_samples=6, seed=3).stddev)


def test_two_classes_are_those_of_predict():
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 1])), num_data=20)
    model, guide = moved(model, vsd.VSDGuide(model))
    x = torch.randn(5, 4)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")(x)
    prediction = vsd.predict(model, guide, x, num_samples=6, seed=3)
    torch.testing.assert_close(out["samples"], prediction.samples)
    torch.testing.assert_close(out["probs"], prediction.probs)


def test_several_labels_are_those_of_predict():
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 3])), num_data=20)
    model, guide = moved(model, vsd.VSDGuide(model))
    x, calibration = torch.randn(5, 4), vsd.Calibration(temperature=2.0)
    for options in ({}, {"calibration": calibration}):
        out = vsd.export.sampler(model, guide, draws=5, seed=3, noise="random", **options)(x)
        prediction = vsd.predict(model, guide, x, num_samples=5, seed=3, **options)
        assert_close(out["samples"], prediction.samples)
        assert_close(out["probs"], prediction.probs)


def test_factors_of_classes_at_positions():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 3])), num_data=20)
    (model, guide), x = moved(model, vsd.VSDGuide(model)), torch.randn(5, 7, 4)
    calibration = vsd.Calibration(temperature=2.0)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random", calibration=calibration)(x)
    prediction = vsd.predict(model, guide, x, num_samples=6, seed=3, calibration=calibration)
    assert_close(out["samples"], prediction.samples)
    assert_close(out["probs"], prediction.probs)


def test_an_ensemble_of_classes_at_positions():
    x = torch.randn(40, 3, 4)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 2])), num_data=40)
    ensemble = vsd.Ensemble(model, members=2, kl_weight=[0.1, 1.0])
    ensemble.fit((x, (x[..., 0] > 0).long()), epochs=1, validation=None, progress=False)
    ensemble.stacking = vsd.ensemble.Stacking(torch.tensor([0.4, 0.6]).double(), torch.tensor([1.5, 0.7]))
    found = vsd.export.sampler(ensemble, draws=6, seed=3, noise="random")(x)
    assert_close(found["probs"], ensemble.predict(x, num_samples=6, seed=3).probs)


class Logits(TwoInputs):
    """Returns an object, as the models of transformers do."""

    def forward(self, a, b):
        return SimpleNamespace(logits=super().forward(a, b))


def named_inputs():
    x = {"b": torch.randn(5, 5, dtype=torch.float32), "a": torch.randn(5, 4, dtype=torch.float32)}
    model = vsd.nn.Classifier(vsd.nn.bayesianize(Logits()), num_data=20).float()
    return *moved(model, vsd.VSDGuide(model)), x


def test_named_inputs_and_objects_with_logits():
    model, guide, x = named_inputs()
    module = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")
    torch.testing.assert_close(module(x)["samples"], vsd.predict(model, guide, x, num_samples=6, seed=3).samples)
    assert module.members[0].batched


def test_no_rows_come_first():
    model, guide, x = trained("mlp")
    module = vsd.export.sampler(model, guide, draws=6)
    assert module(x[:0])["samples"].shape == (6, 0, 3)
    assert_close(module(x)["samples"], vsd.export.sampler(model, guide, draws=6)(x)["samples"])
    assert module.members[0].batched


class Counts(vsd.nn.ObservationModel):
    def likelihood(self, output, y):
        return dist.Poisson(output.squeeze(-1).exp()), len(output), y


def test_other_likelihoods_give_the_outputs_of_the_network():
    model = Counts(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 1])), num_data=20)
    guide, x = vsd.VSDGuide(model), torch.randn(5, 4)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")(x)
    prediction = vsd.predict(model, guide, x, num_samples=6, seed=3)
    assert list(out) == ["samples"]
    torch.testing.assert_close(out["samples"].squeeze(-1).exp(), prediction.samples)


def test_a_mixture_of_members():
    model, guide, x = trained("mlp")
    (a,), (b,) = (vsd.export.sampler(model, guide, draws, seed).members for draws, seed in ((4, 0), (6, 1)))
    out = vsd.export.Sampler([a, b], "classes", weights=[0.25, 0.75], factors=[1.0, 2.0])(x)
    first, second = a(x).softmax(-1), (b(x) / 2).softmax(-1)
    torch.testing.assert_close(out["samples"], torch.cat([first, second]))
    torch.testing.assert_close(out["probs"], 0.25 * first.mean(0) + 0.75 * second.mean(0))


@pytest.mark.parametrize("noise", [0.3, "heteroscedastic"])
def test_a_factor_of_sigma(noise):
    net = vsd.nn.mlp([4, 6, 2 if noise == "heteroscedastic" else 1])
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=20, noise=noise)
    module, x = vsd.export.sampler(model, vsd.VSDGuide(model)), torch.randn(5, 4)
    out, wider = module(x), vsd.export.Sampler(module.members, "numbers", factors=[2.0])(x)
    epistemic = out["samples"].var(0, correction=0)
    torch.testing.assert_close(wider["stddev"] ** 2 - epistemic, 4 * (out["stddev"] ** 2 - epistemic))


def test_a_network_without_likelihood_gives_its_outputs():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 2])), num_data=20)
    module = vsd.export.sampler(model.net, vsd.VSDGuide(model))
    assert module(torch.randn(5, 4))["samples"].shape == (32, 5, 2)


def test_bayesian_parts_of_a_plain_network():
    net = nn.Sequential(vsd.nn.bayesianize(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))
    model = vsd.nn.Classifier(net, num_data=20)
    model, guide = moved(model, vsd.VSDGuide(model))
    x = torch.randn(5, 4)
    out = vsd.export.sampler(model, guide, draws=6, seed=3, noise="random")(x)
    torch.testing.assert_close(out["samples"], vsd.predict(model, guide, x, num_samples=6, seed=3).samples)


def test_a_sampler_is_fixed():
    model, guide, x = trained("noise on outputs")
    module = vsd.export.sampler(model, guide)
    out = module(x)["samples"]
    again = vsd.export.sampler(model, guide)(x)["samples"]
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    moved(model, guide)
    torch.testing.assert_close(module.train()(x)["samples"], out, rtol=0, atol=0)
    assert not torch.equal(vsd.export.sampler(model, guide, seed=1)(x)["samples"], out)


@pytest.mark.parametrize("case", ["mlp", "attention"])
def test_a_row_depends_on_no_other(case):
    model, guide, x = trained(case)
    module = vsd.export.sampler(model, guide)
    torch.testing.assert_close(module(x[3:4])["samples"], module(x)["samples"][:, 3:4])


def test_gradients_reach_the_input():
    model, guide, x = trained("mlp")
    x = x.clone().requires_grad_()
    vsd.export.sampler(model, guide)(x)["probs"][:, 0].sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(("S", "K"), [(1, 3), (2, 3), (8, 3), (8, 8), (8, 40)])
def test_matched_points_have_the_moments(S, K):
    points = matched(torch.randn(S, K))
    torch.testing.assert_close(points.mean(0), torch.zeros(K))
    covariance = points.mT @ points / S
    if S > K:
        torch.testing.assert_close(covariance, torch.eye(K))
    elif S > 1:  # as even as the rank allows
        values = torch.linalg.eigvalsh(covariance)[-(S - 1) :]
        torch.testing.assert_close(values, torch.full((S - 1,), K / (S - 1)))


def test_chosen_draws_are_nearer_to_many_than_random_ones():
    model, guide, x = trained("mlp")
    many = vsd.predict(model, guide, x, num_samples=4000, seed=1).probs

    def error(noise):
        found = [vsd.export.sampler(model, guide, seed=s, noise=noise)(x)["probs"] - many for s in range(20)]
        return torch.stack(found).square().mean().sqrt()

    assert error("matched") < 0.7 * error("random")


# ---- what does not export


class ByHand(PyroModule):
    def __init__(self):
        super().__init__()
        self.layer = PyroModule[nn.Linear](4, 3)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))

    def forward(self, x):
        return self.layer(x)


def by_hand():
    model = vsd.nn.Classifier(ByHand(), num_data=20)
    return model, vsd.VSDGuide(model)


def partly_by_hand():
    net = nn.Sequential(vsd.nn.bayesianize(nn.Linear(4, 4)), ByHand())
    model = vsd.nn.Classifier(net, num_data=20)
    return model, vsd.VSDGuide(model)


def batch_statistics():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=20)
    return model, vsd.VSDGuide(model)


def foreign_guide():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 3])), num_data=20)
    return model, AutoNormal(model)


def different_guide():
    net, other = (vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(sizes)), 20) for sizes in ([4, 5, 3], [4, 3]))
    return net, vsd.VSDGuide(other)


def guide_of_other_shapes():
    net, other = (vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(sizes)), 20) for sizes in ([4, 5, 3], [4, 6, 3]))
    return net, vsd.VSDGuide(other)


def empty_guide():
    net = vsd.nn.bayesianize(vsd.nn.mlp([4, 3]))

    def model(x, y=None):
        return pyro.sample("y", dist.Normal(net(x), 1.0).to_event(2), obs=y)

    return net, vsd.VSDGuide(model)


def own_forward():
    class Guide(vsd.VSDGuide):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 3])), num_data=20)
    return model, Guide(model)


@pytest.mark.parametrize(
    ("make", "error", "argument"),
    [
        (by_hand, ValueError, "model"),
        (partly_by_hand, ValueError, "model"),
        (batch_statistics, ValueError, "model"),
        (foreign_guide, TypeError, "guide"),
        (different_guide, ValueError, "guide"),
        (guide_of_other_shapes, ValueError, "guide"),
        (empty_guide, ValueError, "guide"),
        (own_forward, ValueError, "guide"),
    ],
)
def test_what_does_not_export_raises(make, error, argument):
    model, guide = make()
    with pytest.raises(error, match=argument):
        vsd.export.sampler(model, guide)


def test_networks_of_several_outputs_raise():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x), x

    model = vsd.nn.Classifier(vsd.nn.bayesianize(Pair()), num_data=20)
    with pytest.raises(TypeError, match=r"\bnet\b"):
        vsd.export.sampler(model.net, vsd.VSDGuide(model))(torch.randn(5, 4))


@pytest.mark.parametrize(("option", "value"), [("draws", 0), ("seed", 0.5), ("noise", "sobol")])
def test_options_are_checked(option, value):
    model, guide, _ = trained("mlp")
    with pytest.raises(ValueError, match=option):
        vsd.export.sampler(model, guide, **{option: value})


def test_the_calibration_is_checked():
    model, guide, _ = trained("mlp")
    with pytest.raises(TypeError, match="calibration"):
        vsd.export.sampler(model, guide, calibration=2.0)


# ---- torch.export

WITHOUT_US = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyro", "pyro_vsd"):
            raise ImportError(f"{name} is absent")

sys.meta_path.insert(0, Absent())
import torch

for path in sys.argv[1:]:
    program = torch.export.load(path + ".pt2").module()
    for x, out in torch.load(path + ".pt"):
        found = program(x)
        assert list(found) == list(out)
        for name, value in out.items():
            torch.testing.assert_close(found[name], value)
assert "pyro" not in sys.modules and "pyro_vsd" not in sys.modules
"""


def rows_of(x, n):
    index = torch.arange(n) % 5
    return tuple(t[index] for t in x) if isinstance(x, tuple) else x[index]


@pytest.mark.slow
def test_exported_programs_need_neither_pyro_nor_us(tmp_path):
    paths = []
    for case in ("mlp", "noise on outputs", "attention", "tied"):
        model, guide, x = trained(case)
        module = vsd.export.sampler(model, guide, draws=6)
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
        paths.append(str(tmp_path / case))
        torch.export.save(program, paths[-1] + ".pt2")
        torch.save([(rows, module(rows)) for rows in (rows_of(x, n) for n in (1, 7, 33))], paths[-1] + ".pt")
    done = subprocess.run([sys.executable, "-c", WITHOUT_US, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- ONNX


def in_single_precision(case):
    model, guide, x = trained(case)
    single = torch.utils._pytree.tree_map(lambda t: t.float() if t.is_floating_point() else t, x)
    return model.float(), guide.float(), single


SLOW = ("hierarchical", "noise on outputs", "noise on inputs", "attention", "tied", "two inputs")


@needs_onnx
@pytest.mark.parametrize("case", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_onnx_equals_torch(case, tmp_path):
    import onnx
    import onnxruntime

    model, guide, x = in_single_precision(case)
    path = tmp_path / "model.onnx"
    vsd.export.onnx(model, guide, path, rows_of(x, 1), draws=6)
    assert not [node.op_type for node in onnx.load(path).graph.node if "Random" in node.op_type]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    module = vsd.export.sampler(model, guide, draws=6)
    assert [output.name for output in session.get_outputs()] == ["probs", "samples"]
    assert session.get_outputs()[1].shape == [6, "batch", session.get_outputs()[0].shape[1]]
    for n in (1, 7, 33):
        rows = rows_of(x, n)
        tensors = rows if isinstance(rows, tuple) else (rows,)
        feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
        probs, samples = session.run(None, feed)
        out = module(rows)
        torch.testing.assert_close(torch.from_numpy(samples), out["samples"], rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(probs), out["probs"], rtol=0, atol=1e-5)
        assert (session.run(None, feed)[1] == samples).all()


@needs_onnx
def test_onnx_of_numbers(tmp_path):
    import onnxruntime

    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([4, 6, 1])), num_data=20, noise="latent")
    model, guide = moved(model.float(), vsd.VSDGuide(model).float())
    x = torch.randn(7, 4, dtype=torch.float32)
    vsd.export.onnx(model, guide, tmp_path / "model.onnx", x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x.numpy()}), strict=True))
    for name, value in vsd.export.sampler(model, guide)(x).items():
        torch.testing.assert_close(torch.from_numpy(found[name]), value, rtol=0, atol=1e-5)


@needs_onnx
@pytest.mark.slow
def test_onnx_of_named_inputs(tmp_path):
    import onnxruntime

    model, guide, x = named_inputs()
    vsd.export.onnx(model, guide, tmp_path / "model.onnx", x, draws=6)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (probs,) = session.run(["probs"], {f"x_{name}": value.numpy() for name, value in x.items()})
    expected = vsd.export.sampler(model, guide, draws=6)(x)["probs"]
    torch.testing.assert_close(torch.from_numpy(probs), expected, rtol=0, atol=1e-5)


@needs_onnx
@pytest.mark.slow
def test_an_onnx_file_holds_the_weights_once(tmp_path):
    torch.set_default_dtype(torch.float32)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([784, 400, 400, 10])), num_data=100)
    guide, x = vsd.VSDGuide(model), torch.randn(2, 784)
    vsd.export.onnx(model, guide, tmp_path / "sampler.onnx", x)
    plain = torch.export.export(vsd.nn.mean_network(model, guide), (x,), strict=False)
    torch.onnx.export(plain, f=tmp_path / "plain.onnx", dynamo=True, external_data=False, verbose=False)
    sizes = [(tmp_path / f"{name}.onnx").stat().st_size for name in ("sampler", "plain")]
    assert sizes[0] <= 1.15 * sizes[1]


@needs_onnx
def test_what_torch_cannot_capture_raises(tmp_path):
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    model = vsd.nn.Classifier(vsd.nn.bayesianize(Choice()), num_data=20)
    with pytest.raises(ValueError, match="model"):
        vsd.export.onnx(model, vsd.VSDGuide(model), tmp_path / "model.onnx", torch.randn(2, 4))


@needs_onnx
@pytest.mark.parametrize(
    ("name", "error", "word"),
    [(None, TypeError, "path"), ("nowhere/a.onnx", FileNotFoundError, "path"), (".", IsADirectoryError, ".")],
)
def test_onnx_checks_the_path(name, error, word, tmp_path):
    model, guide, x = trained("mlp")
    with pytest.raises(error, match=word):
        vsd.export.onnx(model, guide, name and tmp_path / name, x, draws=2)


@needs_onnx
def test_onnx_needs_a_row(tmp_path):
    model, guide, x = trained("mlp")
    with pytest.raises(ValueError, match="example"):
        vsd.export.onnx(model, guide, tmp_path / "model.onnx", x[:0])


def test_onnx_names_the_extra(tmp_path, monkeypatch):
    model, guide, x = trained("mlp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="export"):
        vsd.export.onnx(model, guide, tmp_path / "model.onnx", x)
