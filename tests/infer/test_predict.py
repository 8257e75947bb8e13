"""The predictive distribution: how samples are made, that their spread is right, and any likelihood."""

import copy
import gc
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_vsd as vsd
from pyro_vsd.distributions import LazyWeight
from pyro_vsd.infer import predictive
from tests.infer import models


def by_rows(model, guide, *inputs):
    """Whether predict repeats rows; else it makes one pass per sample. A trial has at most twice the rows."""
    seen = []

    class Watch(poutine.messenger.Messenger):
        def _pyro_post_sample(self, message):
            if message["name"] == "y":
                seen.append(message["value"].shape[0])

    with Watch():
        vsd.predict(model, guide, *inputs, num_samples=6, seed=0)
    return max(seen) > 2 * len(inputs[0])


def brute_force(model, guide, x, num_samples):
    """Means of the observed site for dense draws of everything: ``(S, rows)``."""
    means = []
    with torch.no_grad():
        for _ in range(num_samples):
            values = {n: v.dense() if isinstance(v, LazyWeight) else v for n, v in guide(x).items()}
            trace = poutine.trace(poutine.condition(model, data=values)).get_trace(x)
            means.append(trace.nodes["y"]["fn"].mean)
    return torch.stack(means)


class Recurrent(PyroModule):
    """A Bayesian recurrence written by hand: ``h ← tanh(x_t Wᵀ + h Vᵀ)``."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([4, 1]).to_event(2))
        self.v = PyroSample(dist.Normal(0.0, 1.0).expand([4, 4]).to_event(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x, y=None):
        w, v = self.w, self.v
        h = torch.zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t : t + 1] @ w.T + h @ v.T)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(self.head(h).squeeze(-1), 0.3), obs=y)


class SampledBias(models.HandWritten):
    def __init__(self):
        super().__init__()
        self.first.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))


class DenseUse(models.HandWritten):
    """A weight that meets an operation which sees the dense draw."""

    def forward(self, x, y=None):
        mean = self.last((x @ (2 * self.first.weight).T).tanh()).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


class Lstm(PyroModule):
    """An LSTM whose input weight is random: it meets a fused kernel, so the dense draw."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 3, batch_first=True)
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([12, 1]).to_event(2))
        self.head = nn.Linear(3, 1)

    def forward(self, x, y=None):
        out, _ = torch.func.functional_call(self.lstm, {"weight_ih_l0": self.w + 0.0}, (x.unsqueeze(-1),))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(self.head(out[:, -1]).squeeze(-1), 0.3), obs=y)


class OverRows(models.HandWritten):
    """A weight that multiplies something that does not grow with the rows."""

    def forward(self, x, y=None):
        mean = x.sum(-1) + self.first(torch.ones(1, 3)).sum() + self.last(torch.ones(1, 4)).sum()
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


class Attends(nn.Module):
    """Attention uses the dense draw of its output projection."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.embed(x).unsqueeze(1)
        return self.head(self.attention(h, h, h)[0].squeeze(1))


PATHS = {
    "mlp": (models.regressor, True),
    "hand_written": (models.HandWritten, True),
    "hierarchical": (lambda: models.hierarchical, True),
    "hierarchical_prior": (lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()), True),
    "recurrent": (Recurrent, True),
    "learned_noise": (lambda: models.regressor(noise="learned"), True),
    "latent_noise": (lambda: models.regressor(noise="latent"), False),
    "sampled_bias": (SampledBias, False),
    "lstm": (Lstm, False),
    "dense_use": (DenseUse, False),
    "over_rows": (OverRows, False),
    "function": (lambda: models.by_hand, False),
}


@pytest.mark.parametrize(("make", "expected"), PATHS.values(), ids=PATHS)
def test_the_path_and_its_spread(make, expected):
    """Copies of a row would share what is not drawn per row: the spread over samples shows it."""
    model, (x, _) = make(), models.data(3)
    guide = vsd.VSDGuide(model, init_alpha=0.3, init_scale=0.3).setup(x, torch.zeros(3))
    assert by_rows(model, guide, x) is expected
    S = 500
    prediction = vsd.predict(model, guide, x, num_samples=S, seed=0)
    samples = prediction.samples.reshape(S, 3)
    expected_means = brute_force(model, guide, x, S)
    error = ((samples.var(0) + expected_means.var(0)) / S).sqrt()
    assert float(((samples.mean(0) - expected_means.mean(0)) / error).abs().max()) < 4.5
    kurtosis = ((expected_means - expected_means.mean(0)) ** 4).mean(0) / expected_means.var(0) ** 2
    bound = 4.5 * (2 * kurtosis / S).sqrt()
    assert bool(((samples.var(0) / expected_means.var(0)).log().abs() < bound).all())


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (lambda: vsd.nn.mlp([3, 4, 3]), (3,)),
        (lambda: vsd.nn.convnet(3, 1, 8), (1, 8, 8)),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)), (1, 8, 8)),
    ],
    ids=["mlp", "convnet", "batch_norm"],
)
def test_networks_take_the_path_per_row(net, shape):
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net()), num_data=10)
    assert by_rows(model, vsd.VSDGuide(model), torch.randn(4, *shape))


def test_without_coherent_rows_of_one_sample_are_independent_and_samples_of_one_row_too():
    model, x = models.regressor(), torch.ones(2, 3)
    samples = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=2000, seed=0, coherent=False).samples
    assert abs(float(torch.corrcoef(samples.T)[0, 1])) < 4.5 / math.sqrt(2000)
    assert abs(float(torch.corrcoef(torch.stack([samples[1:, 0], samples[:-1, 0]]))[0, 1])) < 4.5 / math.sqrt(2000)
    assert len(samples.unique()) == samples.numel()


# ---- batches and seeds

CASES = {
    "mlp": models.regressor,
    "classifier": models.classifier,
    "hierarchical": lambda: models.regressor(prior=vsd.nn.HierarchicalPrior()),
    "latent": lambda: models.regressor(noise="latent"),
    "sampled_bias": SampledBias,
    "lstm": Lstm,
    "over_rows": OverRows,
    "attention": lambda: vsd.nn.Regressor(vsd.nn.bayesianize(Attends()), num_data=12),
}


def targets(model, rows):
    return torch.zeros(rows, dtype=torch.long if isinstance(model, vsd.nn.Classifier) else None)


every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


# gpax#116: there predictions in batches differ from those in one piece.
@every_case
@pytest.mark.parametrize("batch_size", [1, 5, 7, 100, 10_000])
@pytest.mark.parametrize("coherent", [False, True])
def test_batches_do_not_change_the_result(make, batch_size, coherent):
    model, (x, _) = make(), models.data(11)
    guide = vsd.VSDGuide(model).setup(x, targets(model, 11))
    kwargs = {"num_samples": 6, "seed": 3, "coherent": coherent}
    whole = vsd.predict(model, guide, x, **kwargs)
    cut = vsd.predict(model, guide, x, batch_size=batch_size, **kwargs)
    assert_close(cut.samples, whole.samples, rtol=1e-9, atol=1e-9)
    assert_close(cut.mean, whole.mean, rtol=1e-9, atol=1e-9)
    assert_close(cut.variance, whole.variance, rtol=1e-9, atol=1e-9)


@every_case
def test_a_seed_makes_it_reproducible_and_touches_nothing(make):
    model, (x, _) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, targets(model, 12))
    state = torch.get_rng_state()
    first = vsd.predict(model, guide, x, num_samples=4, seed=1).samples
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(vsd.predict(model, guide, x, num_samples=4, seed=1).samples, first)
    assert not torch.equal(vsd.predict(model, guide, x, num_samples=4, seed=2).samples, first)


def test_without_a_seed_torchs_generator_decides():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append([vsd.predict(model, guide, x, num_samples=4).samples for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_more_samples_begin_with_fewer():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    few, many = (vsd.predict(model, guide, x, num_samples=n, seed=0).samples for n in (3, 9))
    assert_close(many[:3], few)


@every_case
def test_coherent_samples_are_functions(make):
    """Equal rows get equal predictions within a sample, and different ones between samples."""
    model = make()
    x = torch.ones(4, 3)
    guide = vsd.VSDGuide(model).setup(x, targets(model, 4))
    samples = vsd.predict(model, guide, x, num_samples=5, seed=0, coherent=True).samples
    assert_close(samples, samples[:, :1].expand_as(samples))
    assert float(samples[:, 0].std(0).max()) > 0


def test_a_coherent_sample_of_a_linear_model_is_linear():
    x = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]])
    guide = vsd.VSDGuide(models.one_weight).setup(x, torch.zeros(3))
    samples = vsd.predict(models.one_weight, guide, x, num_samples=5, coherent=True).samples
    assert_close(samples[:, 0] + samples[:, 1], samples[:, 2])


# ---- one draw for all rows


class SequenceFirst(nn.Module):
    """A transformer's layer on sequences ``(T, B, D)``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.T.unsqueeze(-1))).mean(0))


class Turns(models.HandWritten):
    """Turns the order of its rows round between two layers, and back."""

    def forward(self, x, y=None):
        mean = self.last(self.first(x).tanh().flip(0)).flip(0).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


class Tokens(models.HandWritten):
    """Has two examples for each row."""

    def forward(self, x, y=None):
        mean = self.last(self.first(x.repeat_interleave(2, 0)).tanh().reshape(len(x), 2, -1).mean(1)).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def convolutional():
    net = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    return vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=12)


SHARED = {
    **{name: (make, {}) for name, make in CASES.items()},
    "hand_written": (models.HandWritten, {}),
    "hierarchical_by_hand": (lambda: models.hierarchical, {}),
    "recurrent": (Recurrent, {}),
    "conv_out": (convolutional, {"conv_noise": "out"}),
    "conv_in": (convolutional, {"conv_noise": "in"}),
    "sequence_first": (lambda: vsd.nn.Regressor(vsd.nn.bayesianize(SequenceFirst()), num_data=12), {"example_dim": 1}),
    "turns": (Turns, {}),
    "tokens": (Tokens, {}),
    "plated": (lambda: models.by_hand, {}),
}
every_shared = pytest.mark.parametrize(("make", "options"), SHARED.values(), ids=SHARED)


@every_shared
def test_a_row_does_not_depend_on_the_other_rows(make, options, monkeypatch):
    model, (x, _) = make(), models.data(11)
    guide = vsd.VSDGuide(model, **options).setup(x, targets(model, 11))
    whole = vsd.predict(model, guide, x, num_samples=7, seed=3).samples
    for rows in ([4], [9, 0, 9]):
        assert_close(vsd.predict(model, guide, x[rows], num_samples=7, seed=3).samples, whole[:, rows])
    # many rows: one sample in each pass
    monkeypatch.setattr(predictive, "_FEW_NUMBERS", 0)
    assert_close(vsd.predict(model, guide, x, num_samples=7, seed=3).samples, whole)
    # chunks of samples
    monkeypatch.setattr(predictive, "_CHUNK", 2)
    assert_close(vsd.predict(model, guide, x[:1], num_samples=7, seed=3).samples, whole[:, :1])


# Where a row has several examples, noise per row is noise per example: not the same distribution.
@pytest.mark.parametrize(
    ("make", "options"),
    [pytest.param(*case, id=name) for name, case in SHARED.items() if name != "tokens"],
)
def test_moments_agree_with_noise_per_row(make, options):
    model, (x, _) = make(), models.data(2)
    guide = vsd.VSDGuide(model, **options).setup(x, targets(model, 2))
    S = 600
    one, each = (
        vsd.predict(model, guide, x, num_samples=S, seed=0, coherent=coherent).samples for coherent in (True, False)
    )
    error = ((one.var(0) + each.var(0)) / S).sqrt()
    assert float(((one.mean(0) - each.mean(0)) / error).abs().max()) < 4.5
    kurtosis = ((each - each.mean(0)) ** 4).mean(0) / each.var(0) ** 2
    assert bool(((one.var(0) / each.var(0)).log().abs() < 4.5 * (2 * kurtosis.clamp(min=3) / S).sqrt()).all())


def test_a_foreign_guide_draws_one_function_per_sample():
    model, (x, y) = models.HandWritten(), models.data(5)
    guide = AutoNormal(model, init_scale=0.3)
    guide(x, y)
    whole = vsd.predict(model, guide, x, num_samples=6, seed=0).samples
    assert_close(vsd.predict(model, guide, x[2:3], num_samples=6, seed=0).samples, whole[:, 2:3])


# ---- plans


def plans_made(monkeypatch):
    made = []
    original = predictive._Run._new_plan

    def counted(run):
        made.append(run)
        return original(run)

    monkeypatch.setattr(predictive._Run, "_new_plan", counted)
    return made


@pytest.mark.parametrize("make", [models.regressor, models.HandWritten, lambda: models.one_weight])
def test_a_plan_is_made_once(make, monkeypatch):
    made, model, (x, _) = plans_made(monkeypatch), make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, targets(model, 12))
    first = vsd.predict(model, guide, x, num_samples=3, seed=0).samples
    assert torch.equal(vsd.predict(model, guide, x, num_samples=3, seed=0).samples, first)
    vsd.predict(model, guide, x[:1], num_samples=5)
    assert len(made) == 1


def test_a_plan_is_made_again(monkeypatch):
    made, model, (x, _) = plans_made(monkeypatch), models.regressor(), models.data()
    guide = vsd.VSDGuide(model)

    def again(model, guide, x, **options):
        before = len(made)
        vsd.predict(model, guide, x, num_samples=2, **options)
        return len(made) > before

    assert again(model, guide, x)
    assert not again(model, guide, x)
    assert again(model, guide, x, site="y")
    assert again(model, vsd.VSDGuide(model), x)
    assert again(model, copy.deepcopy(guide), x)
    assert again(copy.deepcopy(model), guide, x)
    model.net.network[1] = nn.Tanh()
    assert again(model, guide, x)
    with pytest.raises(ValueError, match=r"\bnet\.0\.weight\b"):
        again(model, guide, x.float())
    model.net.network[0] = nn.Linear(models.D, 5)
    with pytest.raises(ValueError, match=r"\bnet\.0\.weight\b"):
        again(model, guide, x)


def test_a_function_that_changes_its_ways():
    """A plan of a function cannot see what the function refers to: the passes notice."""
    way = "rows"

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        h = x @ w if way == "rows" else x @ (1.0 * w)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(h.squeeze(-1), 0.3), obs=y)

    x, y = models.data()
    guide = vsd.VSDGuide(model).setup(x, y)
    first = vsd.predict(model, guide, x, num_samples=4, seed=0).samples
    way = "dense"
    assert_close(vsd.predict(model, guide, x, num_samples=4, seed=0).samples, first)


def test_guides_are_copied_and_pickled_without_plans():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    expected = vsd.predict(model, guide, x, num_samples=3, seed=0).samples
    size = len(pickle.dumps(guide))
    vsd.predict(model, guide, x, num_samples=3, site="y")
    assert len(pickle.dumps(guide)) == size
    copies = copy.deepcopy((model, guide)), (model, pickle.loads(pickle.dumps(guide)))
    for other_model, other in copies:
        assert_close(vsd.predict(other_model, other, x, num_samples=3, seed=0).samples, expected)


def test_plans_do_not_pile_up():
    gc.collect()
    before = len(predictive._PLANS)
    model = models.regressor()
    guide = vsd.VSDGuide(model)
    for rows in range(1, 20):
        vsd.predict(model, guide, torch.randn(rows, 3), num_samples=2)
        vsd.predict(poutine.block(model, hide=[]), guide, torch.randn(2, 3), num_samples=2)
        vsd.predict(lambda x, y=None, size=rows: model(x, y), guide, torch.randn(2, 3), num_samples=2)
    assert len(predictive._PLANS) == before + 1
    assert len(predictive._PLANS[guide]) <= predictive._MOST_PLANS
    guide = model = None
    gc.collect()
    assert len(predictive._PLANS) == before


def test_hooks_and_handlers_see_the_model():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    expected = vsd.predict(model, guide, x, num_samples=3, seed=0).samples
    calls = []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    assert_close(vsd.predict(model, guide, x, num_samples=3, seed=0).samples, expected)
    handle.remove()
    assert calls
    with poutine.trace() as trace:
        assert_close(vsd.predict(model, guide, x, num_samples=3, seed=0).samples, expected)
    assert "y" in trace.trace.nodes


class Mixing(nn.Module):
    """Rows depend on each other if ``on``."""

    def __init__(self, on):
        super().__init__()
        self.first, self.second, self.on = nn.Linear(3, 8), nn.Linear(8, 1), on

    def forward(self, x):
        h = self.first(x).tanh()
        return self.second(h - h.mean(0) if self.on else h)


class Sorting(Mixing):
    def forward(self, x):
        return self.second(self.first(x).tanh()[x[:, 0].argsort()])


def switch_on(model):
    model.net.on = True


def add_hook(model):
    model.net.first.register_forward_hook(lambda module, args, out: out - out.mean(0))


@pytest.mark.parametrize("change", [switch_on, add_hook])
def test_a_changed_network_is_looked_at_again(change):
    model, (x, _) = vsd.nn.Regressor(vsd.nn.bayesianize(Mixing(False)), num_data=10, noise=0.5), models.data()
    guide = vsd.VSDGuide(model)
    vsd.predict(model, guide, x[:4], num_samples=6, seed=3)
    change(model)
    found, expected = (vsd.predict(model, guide, x[:4], num_samples=6, seed=3, batch_size=n).mean for n in (None, 4))
    assert_close(found, expected)


def test_rows_that_change_places():
    model, (x, _) = vsd.nn.Regressor(vsd.nn.bayesianize(Sorting(False)), num_data=10, noise=0.5), models.data()
    guide = vsd.VSDGuide(model)
    found, expected = (vsd.predict(model, guide, x[:4], num_samples=6, seed=3, batch_size=n).mean for n in (None, 4))
    assert_close(found, expected)


# ---- kinds of predictions


def one_layer(outputs, law):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, outputs]).to_event(2))
        h = x @ w
        with pyro.plate("data", len(x)):
            return pyro.sample("y", law(h if outputs > 1 else h.squeeze(-1)), obs=y)

    return model


LIKELIHOODS = {
    "normal": (1, lambda h: dist.Normal(h, 0.3), vsd.RegressionPrediction),
    "normal_vector": (2, lambda h: dist.Normal(h, 0.3).to_event(1), vsd.RegressionPrediction),
    "categorical": (3, lambda h: dist.Categorical(logits=h), vsd.ClassificationPrediction),
    "one_hot": (3, lambda h: dist.OneHotCategorical(logits=h), vsd.ClassificationPrediction),
    "bernoulli": (1, lambda h: dist.Bernoulli(logits=h), vsd.ClassificationPrediction),
    "bernoulli_vector": (2, lambda h: dist.Bernoulli(logits=h).to_event(1), vsd.ClassificationPrediction),
    "poisson": (1, lambda h: dist.Poisson(h.exp()), vsd.Prediction),
    "poisson_vector": (2, lambda h: dist.Poisson(h.exp()).to_event(1), vsd.Prediction),
    "student": (1, lambda h: dist.StudentT(5.0, h, 0.3), vsd.Prediction),
    "negative_binomial": (1, lambda h: dist.NegativeBinomial(4.0, logits=h), vsd.Prediction),
    "multivariate": (2, lambda h: dist.MultivariateNormal(h, torch.eye(2) * 0.1), vsd.Prediction),
    "log_normal": (1, lambda h: dist.LogNormal(h, 0.3), vsd.Prediction),
    "gamma": (1, lambda h: dist.Gamma(2.0, h.exp()), vsd.Prediction),
    "beta": (1, lambda h: dist.Beta(h.exp(), 1.0), vsd.Prediction),
    "laplace": (1, lambda h: dist.Laplace(h, 0.3), vsd.Prediction),
    "zero_inflated": (1, lambda h: dist.ZeroInflatedPoisson(h.exp(), gate=torch.tensor(0.2)), vsd.Prediction),
}


@pytest.mark.parametrize(("outputs", "law", "kind"), LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_any_likelihood(outputs, law, kind):
    model, (x, _) = one_layer(outputs, law), models.data()
    y = model(x)
    guide = vsd.VSDGuide(model).setup(x, y)
    S = 30
    prediction = vsd.predict(model, guide, x, num_samples=S, seed=0, batch_size=50)
    assert type(prediction) is kind
    assert (len(prediction), prediction.num_samples) == (12, S)
    one_hot = isinstance(law(torch.zeros(1, outputs)), dist.OneHotCategorical)
    target = y.argmax(-1) if one_hot else y
    density = prediction.log_prob(target)
    assert density.shape == (12,)
    # the same by hand: each sample's law from the kept means of a linear model under the same seed
    plain = vsd.predict(one_layer(outputs, lambda h: dist.Normal(h, 1.0).to_event(h.dim() - 1)), guide, x,
                        num_samples=S, seed=0, batch_size=50)  # fmt: skip
    laws = law(plain.samples)
    assert_close(density, laws.log_prob(y).logsumexp(0) - math.log(S))
    if kind is not vsd.ClassificationPrediction:
        assert_close(prediction.mean, laws.mean.mean(0))
        assert_close(prediction.variance, laws.variance.mean(0) + laws.mean.var(0, correction=0))
        assert_close(prediction.samples, laws.mean)
    elif hasattr(laws, "base_dist") or outputs == 1:  # Bernoulli
        assert_close(prediction.probs[..., 1], getattr(laws, "base_dist", laws).probs.mean(0))
    else:
        assert_close(prediction.probs, laws.probs.mean(0))


@pytest.mark.parametrize("name", ["poisson", "multivariate", "bernoulli_vector"])
def test_other_predictions_move(name):
    outputs, law, _ = LIKELIHOODS[name]
    model, (x, _) = one_layer(outputs, law), models.data()
    y = model(x)
    guide = vsd.VSDGuide(model).setup(x, y)
    prediction = vsd.predict(model, guide, x, num_samples=4)
    moved = prediction.to(torch.float32)
    assert moved.mean.dtype == torch.float32
    assert moved.log_prob(y.float()).dtype == torch.float32
    assert_close(moved.log_prob(y.float()).double(), prediction.log_prob(y), rtol=1e-4, atol=1e-4)


def test_regression_splits_its_variance():
    model, (x, y) = models.regressor(noise=0.3), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=40, seed=0)
    assert_close(prediction.aleatoric, torch.full((12,), 0.09))
    assert_close(prediction.epistemic, prediction.samples.var(0, correction=0))
    assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    assert_close(prediction.mean, prediction.samples.mean(0))
    each = torch.distributions.Normal(prediction.samples, 0.3).log_prob(y)
    assert_close(prediction.log_prob(y), each.logsumexp(0) - math.log(40))


def test_a_small_spread_around_a_large_mean_survives_float32():
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, 1e4)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(layer), num_data=10, noise=0.1).float()
    guide = vsd.VSDGuide(model, init_alpha=0.01, init_alpha_spread=0.0).float()
    prediction = vsd.predict(model, guide, torch.ones(3, 1, dtype=torch.float32), num_samples=2000, seed=0)
    assert_close(prediction.epistemic, torch.full((3,), 0.01, dtype=torch.float32), rtol=0.25, atol=0)


@pytest.mark.parametrize("make", [models.regressor, models.classifier, lambda: one_layer(1, LIKELIHOODS["poisson"][1])],
                         ids=["regression", "classification", "other"])  # fmt: skip
def test_without_samples(make):
    model, (x, _) = make(), models.data()
    guide = vsd.VSDGuide(model).setup(x, targets(model, 12))
    kept = vsd.predict(model, guide, x, num_samples=7, seed=0)
    lean = vsd.predict(model, guide, x, num_samples=7, seed=0, keep_samples=False)
    assert kept.samples.shape[:2] == (7, 12)
    assert lean.samples is None
    assert_close(lean.mean, kept.mean)
    assert_close(lean.variance, kept.variance)


def test_one_sample_has_no_epistemic_variance():
    model, (x, _) = models.regressor(), models.data()
    assert_close(vsd.predict(model, vsd.VSDGuide(model), x, num_samples=1).epistemic, torch.zeros(12))


# ---- inputs and models


def test_several_inputs():
    def model(a, scale, b, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", len(a)):
            return pyro.sample("y", dist.Normal(scale * (a @ w).squeeze(-1) + b["shift"], 0.5), obs=y)

    x, _ = models.data()
    shift = torch.arange(12.0) * 100
    guide = vsd.VSDGuide(model).setup(x, 2.0, {"shift": shift}, torch.zeros(12))
    prediction = vsd.predict(model, guide, x, 2.0, {"shift": shift}, num_samples=5, batch_size=7)
    assert float((prediction.mean - shift).abs().max()) < 50


def test_a_network_of_two_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a, b):
            return self.left(a) + self.right(b)

    model = vsd.nn.Classifier(vsd.nn.bayesianize(Two()), num_data=10)
    x = (torch.randn(6, 3), torch.randn(6, 4))
    assert vsd.predict(model, vsd.VSDGuide(model), x, num_samples=3).probs.shape == (6, 2)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_without_a_plate(outputs):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, outputs]).to_event(2))
        h = x @ w if outputs > 1 else (x @ w).squeeze(-1)
        return pyro.sample("y", dist.Normal(h, 0.5).to_event(h.dim()), obs=y)

    x, _ = models.data()
    guide = vsd.VSDGuide(model).setup(x, torch.zeros(12, outputs).squeeze(-1))
    prediction = vsd.predict(model, guide, x, num_samples=4, batch_size=5)
    assert isinstance(prediction, vsd.RegressionPrediction)
    assert prediction.mean.shape == ((12,) if outputs == 1 else (12, 2))


def test_a_plate_of_fixed_size():
    """As of ``plate("data", 100, subsample=…)`` in training: predict feeds no more rows at once than it admits."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", 7, subsample=torch.arange(len(x))):
            return pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)

    x, _ = models.data()
    guide = vsd.VSDGuide(model).setup(x[:5], torch.zeros(5))
    free = vsd.predict(models.one_weight, guide, x, num_samples=4, seed=0)
    assert_close(vsd.predict(model, guide, x, num_samples=4, seed=0).samples, free.samples)


@pytest.mark.parametrize("known", ["sigma", "w"])
def test_a_site_known_by_condition_is_not_predicted(known):
    value = torch.tensor(0.5) if known == "sigma" else torch.ones(models.D, 1)
    model = poutine.condition(models.by_hand, data={known: value})
    guide = AutoNormal(model) if known == "w" else vsd.VSDGuide(model)
    x, y = torch.randn(5, models.D), torch.randn(5)
    guide(x, y)
    prediction = vsd.predict(model, guide, x, num_samples=3)
    assert prediction.mean.shape == (5,)
    if known == "sigma":
        assert_close(prediction.aleatoric, torch.full((5,), 0.25))


def test_a_guide_set_up_without_targets_is_named():
    guide = vsd.VSDGuide(models.one_weight).setup(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"\by\b"):
        vsd.predict(models.one_weight, guide, torch.randn(5, 3))


@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_seed_of_the_wrong_kind(seed):
    model = models.regressor()
    with pytest.raises(ValueError, match=r"\bseed\b"):
        vsd.predict(model, vsd.VSDGuide(model), torch.randn(5, models.D), seed=seed)


def test_several_observed_sites():
    def model(x, y=None, v=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("v", dist.Poisson((x @ w).squeeze(-1).exp()), obs=v)
            pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 0.5), obs=y)

    x, y = models.data()
    guide = vsd.VSDGuide(model).setup(x, y, torch.ones(12))
    with pytest.raises(ValueError, match=r"\bv\b"):
        vsd.predict(model, guide, x, num_samples=2)
    with pytest.raises(ValueError, match=r"\bsite\b"):
        vsd.predict(model, guide, x, num_samples=2, site="u")
    assert isinstance(vsd.predict(model, guide, x, num_samples=2, site="y"), vsd.RegressionPrediction)
    assert type(vsd.predict(model, guide, x, num_samples=2, site="v")) is vsd.Prediction


def test_without_coherent_hierarchical_models_draw_z_for_each_row():
    model = models.regressor(prior=vsd.nn.HierarchicalPrior(), sizes=(3, 1))
    guide = vsd.VSDGuide(model, init_alpha=1e-12, init_scale=0.5)
    x = torch.ones(2, 3)
    S = 4000
    samples = vsd.predict(model, guide, x, num_samples=S, seed=0, coherent=False).samples
    theta = guide.posterior("net.0.weight").theta.detach()
    expected = (theta.square() * (math.exp(0.25) - 1) * math.exp(0.25)).sum()
    assert_close(samples.var(0), expected.expand(2), rtol=0.2, atol=0)
    assert abs(float(torch.corrcoef(samples.T)[0, 1])) < 4.5 / math.sqrt(S)


# ---- modes


@pytest.mark.parametrize("as_function", [False, True], ids=["module", "function"])
def test_evaluation_mode_and_back(as_function):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    inner = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=12)
    inner.net[2].eval()  # each module goes back to its own mode
    guide = vsd.VSDGuide(inner, init_alpha=1e-20)
    model = (lambda x, y=None: inner(x, y)) if as_function else inner
    x, _ = models.data()
    buffers = {n: b.clone() for n, b in inner.named_buffers()}
    samples = vsd.predict(model, guide, x, num_samples=3).samples
    assert_close(samples[0], samples[1])  # neither dropout nor statistics of the batch
    one = vsd.predict(model, guide, x[:1], num_samples=3).samples
    assert_close(one[0, 0], samples[0, 0])
    assert [m.training for m in inner.net] == [True, True, False, True]
    assert inner.training
    for name, buffer in inner.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_modes_return_after_an_error():
    model, (x, _) = models.regressor(), models.data()
    with pytest.raises(ValueError, match=r"\bnet\.0\.weight\b"):
        vsd.predict(model, vsd.VSDGuide(model), x[:, :2])
    assert all(m.training for m in model.modules())


def test_nothing_of_a_prediction_has_gradients():
    model, (x, y) = models.regressor(noise="learned"), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x.requires_grad_(), num_samples=3)
    assert not any(t.requires_grad for t in (prediction.mean, prediction.variance, prediction.log_prob(y)))


@pytest.mark.parametrize("progress", [True, False])
def test_progress(progress, capsys):
    model, (x, _) = models.regressor(), models.data()
    vsd.predict(model, vsd.VSDGuide(model), x, num_samples=3, progress=progress)
    assert ("predict" in capsys.readouterr().err) is progress


# ---- mistakes

ERRORS = [
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": 2.5}, "num_samples"),
    ({"batch_size": 0}, "batch_size"),
]


@pytest.mark.parametrize(("options", "argument"), ERRORS)
def test_bad_options(options, argument):
    model, (x, _) = models.regressor(), models.data()
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        vsd.predict(model, vsd.VSDGuide(model), x, **options)


INPUTS = [(), (3.0,), (torch.ones(3, 3), torch.ones(4)), (torch.ones(0, 3),)]


@pytest.mark.parametrize("inputs", INPUTS)
def test_bad_inputs(inputs):
    model = models.regressor()
    with pytest.raises(ValueError, match=r"\binputs\b"):
        vsd.predict(model, vsd.VSDGuide(model), *inputs)


def test_a_guide_without_parameters():
    with pytest.raises(ValueError, match=r"\bguide\b"):
        vsd.predict(models.HandWritten(), vsd.VSDGuide(models.HandWritten()), models.data()[0])


def test_a_likelihood_without_moments():
    def law(h):
        return dist.TransformedDistribution(dist.Normal(h, 1.0), [dist.transforms.SoftplusTransform()])

    model, (x, _) = one_layer(1, law), models.data()
    guide = vsd.VSDGuide(model).setup(x, torch.ones(12))
    with pytest.raises(ValueError, match=r"\bTransformedDistribution\b"):
        vsd.predict(model, guide, x, num_samples=2)


def test_rows_that_are_not_in_the_batch_shape():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        return pyro.sample("y", dist.Normal((x @ w).mean(), 0.5), obs=y)

    x, _ = models.data()
    guide = vsd.VSDGuide(model).setup(x, torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"\brows\b"):
        vsd.predict(model, guide, x, num_samples=2)


# ---- memory


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries = max(self.entries, result.untyped_storage().nbytes() // result.element_size())
        return result


# numpyro#1503: there memory grows with the number of draws.
def test_no_tensor_grows_with_the_number_of_draws():
    model, (x, _) = models.regressor(), models.data()
    guide = vsd.VSDGuide(model)
    largest = []
    for num_samples in (300, 1000):
        with Largest() as mode:
            vsd.predict(model, guide, x, num_samples=num_samples, batch_size=100, keep_samples=False)
        largest.append(mode.entries)
    assert largest[0] == largest[1]


@pytest.mark.slow
def test_working_memory_is_flat_in_the_number_of_samples():
    """Peak of tensors alive on the way, what is kept for the caller left out: 100 against 1000 samples."""
    import threading
    import time

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    model = models.classifier(sizes=(3, 200, 3))
    guide, (x, _) = vsd.VSDGuide(model), models.data(500)

    def peak(num_samples):
        top, done = [resident()], threading.Event()

        def watch():
            while not done.is_set():
                top[0] = max(top[0], resident())
                time.sleep(0.005)

        start = resident()
        thread = threading.Thread(target=watch)
        thread.start()
        with warnings.catch_warnings():
            vsd.predict(model, guide, x, num_samples=num_samples, keep_samples=False)
        done.set()
        thread.join()
        return top[0] - start

    peak(20)  # caches of allocator and kernels
    few, many = peak(50), peak(500)
    # all samples at once would take 500 × 500 × 200 numbers: 400 MB
    assert many < few + 40e6


# ---- what newcomers ask: what to call, where the uncertainty of a class is (blitz#56, Laplace#131)


def test_classes_come_with_names_and_shapes():
    model, (x, _) = models.classifier(), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=7)
    assert prediction.probs.shape == (12, 3)
    assert prediction.samples.shape == (7, 12, 3)
    for name in ("labels", "confidence", "entropy", "expected_entropy", "mutual_information"):
        assert getattr(prediction, name).shape == (12,), name
    assert_close(prediction.entropy, prediction.expected_entropy + prediction.mutual_information)


@pytest.mark.parametrize(("sizes", "shape"), [((3, 5, 1), (12,)), ((3, 5, 2), (12, 2))])
def test_regressions_come_with_names_and_shapes(sizes, shape):
    model, (x, _) = models.regressor(sizes=sizes), models.data()
    prediction = vsd.predict(model, vsd.VSDGuide(model), x, num_samples=7)
    for name in ("mean", "variance", "aleatoric", "epistemic", "stddev"):
        assert getattr(prediction, name).shape == shape, name
    assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    low, high = prediction.interval(0.9)
    assert bool(((low < prediction.mean) & (prediction.mean < high)).all())


def test_a_prediction_is_not_the_observed_value():
    """numpyro#1278: there a model called with its targets returns them."""
    model, (x, y) = models.regressor(noise=0.01), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y, steps=1)
    assert float((vsd.predict(model, guide, x, num_samples=20).mean - y).abs().max()) > 0.1


def test_from_scratch_or_converted():
    """bayesian-torch#37: there it is unclear whether a network must be converted."""
    x, _ = models.data()
    trained = torch.nn.Sequential(torch.nn.Linear(3, 1))
    for net in (vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 1])), vsd.nn.bayesianize(trained)):
        model = vsd.nn.Regressor(net, num_data=12)
        assert vsd.predict(model, vsd.VSDGuide(model), x, num_samples=3).mean.shape == (12,)


# ---- three gates of uncertainty: two moons (Laplace#88), a gap in the data, coverage (blitz#50, #97)
# Not promised: multiplicative noise vanishes where activations do. A ReLU network on a single input that is zero in the
# gap is not less certain there; with features that live in the gap it is.


def fit_by_adam(model, guide, x, y, steps):
    loss = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


def moons(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(rows, generator=generator)
    y = torch.arange(rows) % 2
    upper = torch.stack([angle.cos(), angle.sin()], -1)
    x = torch.where(y.unsqueeze(-1) == 0, upper, torch.tensor([1.0, 0.5]) - upper)
    return x + 0.15 * torch.randn(rows, 2, generator=generator), y


@pytest.mark.slow
def test_two_moons():
    x, y = moons(200, seed=0)
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([2, 50, 50, 1])), num_data=200)
    guide = vsd.VSDGuide(model)
    fit_by_adam(model, guide, x, y, 600)
    x, y = moons(400, seed=1)
    near = vsd.predict(model, guide, x, num_samples=100, seed=0)
    assert vsd.metrics.accuracy(near, y) > 0.96
    assert vsd.metrics.ece(near, y) < 0.05
    # uncertain between the moons, and more uncertain far away than at the data
    between = vsd.predict(model, guide, torch.tensor([[0.5, 0.25], [0.1, 0.4], [0.9, 0.1]]), num_samples=100, seed=0)
    angle = torch.arange(16) * math.pi / 8
    circle = torch.tensor([0.5, 0.25]) + 8 * torch.stack([angle.cos(), angle.sin()], -1)
    far = vsd.predict(model, guide, circle, num_samples=100, seed=0)
    assert float(between.entropy.mean()) > 2 * float(near.entropy.mean())
    assert float(far.mutual_information.mean()) > 1.5 * float(near.mutual_information.mean())
    plain = vsd.nn.mean_network(model, guide)(circle).detach().abs().sigmoid()
    assert float(plain.mean()) > 0.99  # where a plain network is certain
    assert float(far.confidence.mean()) < 0.98


class Waves(nn.Module):
    """Fixed random cosines of one input: features that do not vanish anywhere."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("frequency", 2 * torch.randn(1, 50, generator=generator))
        self.register_buffer("phase", 2 * math.pi * torch.rand(50, generator=generator))

    def forward(self, x):
        return torch.cos(x @ self.frequency + self.phase)


def test_a_gap_in_the_middle_and_noise_of_the_right_size():
    train_set, grid = vsd.datasets.two_clusters()
    net = nn.Sequential(Waves(), *vsd.nn.mlp([50, 50, 1]))
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=len(train_set), noise="learned")
    guide = vsd.VSDGuide(model)
    fit_by_adam(model, guide, train_set.x, train_set.y, 500)
    x = grid.x.squeeze(-1)
    at_data = ((x > -1) & (x < -0.7)) | ((x > 0.5) & (x < 1))
    in_gap, outside = (x > -0.4) & (x < 0.2), x.abs() > 1.3
    prediction = vsd.predict(model, guide, grid.x, num_samples=200, seed=0)
    spread = prediction.epistemic.sqrt()
    assert float(spread[in_gap].mean()) > 2 * float(spread[at_data].mean())
    assert float(spread[outside].mean()) > 2 * float(spread[at_data].mean())
    # Laplace#142: learned noise that explains everything. The true one is 0.1.
    assert 0.07 < float(prediction.aleatoric.sqrt().mean()) < 0.15
    # blitz#50, #97: the truth inside the interval, at the data
    generator = torch.Generator().manual_seed(1)
    y = grid.y[at_data] + 0.1 * torch.randn(int(at_data.sum()), generator=generator)
    held_out = vsd.predict(model, guide, grid.x[at_data], num_samples=200, seed=0)
    assert vsd.metrics.coverage(held_out, y) > 0.85


def test_the_guide_of_a_model_with_different_sites():
    model, other = models.regressor(sizes=(models.D, 4, 1)), models.regressor(sizes=(models.D, 4))
    for options in ({}, {"site": "y"}):
        with pytest.raises(ValueError, match=r"guide.*net\.2\.weight"):
            vsd.predict(model, vsd.VSDGuide(other), torch.randn(5, models.D), **options)


def test_a_guide_or_an_ensemble_in_the_place_of_the_model():
    model, (x, _) = models.classifier(), models.data()
    guide = vsd.VSDGuide(model)
    with pytest.raises(TypeError, match=r"\bmodel\b"):
        vsd.predict(guide, model, x)
    with pytest.raises(TypeError, match=r"\bmodel\b.*ensemble"):
        vsd.predict(vsd.Ensemble(models.classifier, members=2), x, x)
