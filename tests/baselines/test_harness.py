"""One harness for every method: it learns, its samples differ, its state survives, it keeps to itself."""

import copy
import inspect
import io
from pathlib import Path

import pyro
import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.baselines import METHODS, Method, make_method

FOLDER = Path(inspect.getfile(Method)).parent
# Files of the folder that hold what methods share, not a method.
SHARED = {"stacked", "__init__", "protocol", "layers"}
# Variants of a method live in its file.
VARIANTS = dict.fromkeys(["vsd_low_rank", "vsd_hierarchical", "ard_vd", "ard_vd_hierarchical"], "vsd")
VARIANTS["bbb_lrt"] = "bbb"
# Methods whose posterior is defined for Linear layers alone.
LINEAR_ONLY = {"vmg", "slang"}
ONE_NETWORK = {"map"}
WHOLE_NETWORK = ["map", "deep_ensemble", "swag"]

# Few steps on tiny problems: a larger learning rate than the default, snapshots early.
OPTIONS: dict[str, dict] = {
    "swag": {"start": 5, "period": 1},
    "deep_ensemble": {"num_members": 3},
}
LR = {"swag": 0.01}


def images(task):
    """The left or the right half of a noisy image is brighter."""
    x = torch.randn(8, 1, 12, 12)
    label = torch.arange(8) % 2
    x[label == 0, :, :, :6] += 0.5
    x[label == 1, :, :, 6:] += 0.5
    return x, label if task == "classification" else 2.0 * label - 1


def rows(task):
    x = torch.randn(40, 3)
    signal = x[:, 0] - x[:, 1].abs() + 0.3 + 0.3 * torch.randn(40)
    return x, (signal > 0).long() if task == "classification" else signal


def problem(kind, task):
    """A network, its data and the number of steps."""
    torch.manual_seed(1)
    outputs = 2 if task == "classification" else 1
    if kind == "mlp":
        return vsd.nn.mlp([3, 16, outputs]), *rows(task), 40
    return vsd.nn.lenet5(outputs, image_size=12), *images(task), 12


def build(name, net, num_data, task):
    options = {"lr": LR.get(name, 0.01 if isinstance(net[0], torch.nn.Linear) else 0.003), **OPTIONS.get(name, {})}
    return make_method(name, net, num_data=num_data, task=task, **options)


class Trained:
    """A method after some training, with the losses on its way."""

    def __init__(self, name, kind, task):
        self.name, self.kind, self.task = name, kind, task
        self.net, self.x, self.y, steps = problem(kind, task)
        self.before = copy.deepcopy(self.net.state_dict())
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        self.method = build(name, self.net, len(self.x), task)
        self.losses = [self.method.step(self.x, self.y) for _ in range(steps)]
        self.store = len(pyro.get_param_store())

    def again(self):
        """The same method from a different start."""
        torch.manual_seed(7)
        return build(self.name, vsd.nn.xavier_uniform_(copy.deepcopy(self.net)), len(self.x), self.task)


CASES = [
    pytest.param((name, kind, task), id=f"{name}-{kind}-{task}")
    for name in METHODS
    for kind in ("mlp", "lenet5")
    for task in ("classification", "regression")
    if not (kind == "lenet5" and name in LINEAR_ONLY)
]


@pytest.fixture(scope="module", params=CASES)
def trained(request):
    torch.set_num_threads(1)
    return Trained(*request.param)


def outputs(prediction):
    assert prediction.samples is not None
    return prediction.samples


def test_loss_falls(trained):
    start, end = trained.losses[:5], trained.losses[-5:]
    assert all(isinstance(loss, float) for loss in trained.losses)
    assert sum(end) < sum(start)


def test_samples_differ(trained):
    samples = outputs(trained.method.predict(trained.x, num_samples=5))
    if trained.name in ONE_NETWORK:
        assert len(samples) == 1
        return
    assert len(samples) > 1
    assert (samples[0] - samples[1]).abs().amax() > 1e-6


def test_prediction_is_that_of_predict(trained):
    prediction = trained.method.predict(trained.x, num_samples=3)
    if trained.task == "classification":
        assert type(prediction) is vsd.ClassificationPrediction
        torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(trained.x)))
    else:
        assert type(prediction) is vsd.RegressionPrediction
        assert prediction.mean.shape == (len(trained.x),)
        assert (prediction.aleatoric > 0).all()
    assert prediction.log_prob(trained.y).shape == (len(trained.x),)
    assert outputs(prediction).shape == (prediction.num_samples, *prediction.mean.shape)
    assert not outputs(prediction).requires_grad


def test_seed_makes_predictions_equal(trained):
    predictions = [trained.method.predict(trained.x, num_samples=3, seed=5) for _ in range(2)]
    assert torch.equal(outputs(predictions[0]), outputs(predictions[1]))


def test_state_round_trips_and_training_goes_on(trained):
    file = io.BytesIO()
    torch.save(trained.method.state_dict(), file)
    file.seek(0)
    revived = trained.again()
    revived.load_state_dict(torch.load(file, weights_only=True))
    here, there = (m.predict(trained.x, num_samples=4, seed=3) for m in (trained.method, revived))
    assert torch.equal(outputs(here), outputs(there))
    assert torch.equal(here.log_prob(trained.y), there.log_prob(trained.y))

    one, other = copy.deepcopy(trained.method), revived
    losses = []
    for method in (one, other):
        pyro.set_rng_seed(11)
        losses.append([method.step(trained.x, trained.y) for _ in range(3)])
    assert losses[0] == losses[1]
    assert one.num_steps == other.num_steps == len(trained.losses) + 3


def test_leaves_the_network_and_the_store_alone(trained):
    after = trained.net.state_dict()
    assert all(torch.equal(after[name], value) for name, value in trained.before.items())
    assert trained.store == 0


def test_two_of_a_kind_share_nothing(trained):
    """One by itself, and its double with a third trained in between: the same losses."""
    alone, double, third = trained.again(), trained.again(), trained.again()
    losses = {}
    for seed in range(3):
        for method in (alone, third, double):
            pyro.set_rng_seed(seed)
            losses.setdefault(method, []).append(method.step(trained.x, trained.y))
    assert losses[alone] == losses[double]
    pointers = [{p.data_ptr() for p in method.parameters() if p.numel()} for method in (double, third)]
    assert pointers[0].isdisjoint(pointers[1])


# ---- the folder


def test_every_file_is_a_method_and_every_method_a_file():
    files = {path.stem for path in FOLDER.glob("*.py")} - SHARED
    assert files == {VARIANTS.get(name, name) for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_method_lives_in_its_own_file(name):
    assert METHODS[name].__module__ == f"pyro_vsd.baselines.{VARIANTS.get(name, name)}"


@pytest.mark.parametrize("name", METHODS)
def test_file_tells_posterior_reference_cost_and_use(name):
    text = inspect.getmodule(METHODS[name]).__doc__
    year = [] if name == "map" else ["20"]
    assert [part for part in [".. math::", *year, "**Cost**", "**Prefer"] if part not in text] == []


@pytest.mark.parametrize("name", METHODS)
def test_options_are_documented(name):
    cls = METHODS[name]
    options = list(inspect.signature(cls.build).parameters)[2:]
    assert set(cls.options()) <= set(options)
    assert [o for o in options if f":param {o}:" not in inspect.getdoc(cls)] == []


# ---- errors of all


@pytest.mark.parametrize("name", METHODS)
def test_unknown_option(name):
    with pytest.raises(TypeError, match=r"\bdrop_rate\b"):
        make_method(name, vsd.nn.mlp([3, 4, 2]), num_data=10, drop_rate=0.1)


@pytest.mark.parametrize("name", WHOLE_NETWORK)
def test_layers_cannot_be_chosen(name):
    with pytest.raises(TypeError, match=r"\bexclude\b"):
        make_method(name, vsd.nn.mlp([3, 4, 2]), num_data=10, exclude="0")


@pytest.mark.parametrize("name", sorted(LINEAR_ONLY & set(METHODS)))
def test_convolution_raises(name):
    with pytest.raises(ValueError, match=r"\bnet\b.*'conv1'"):
        make_method(name, vsd.nn.lenet5(), num_data=10)


def test_unknown_method():
    with pytest.raises(ValueError, match=r"\bname\b"):
        make_method("laplace", vsd.nn.mlp([3, 4, 2]), num_data=10)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("net", 3, TypeError),
        ("num_data", 0, ValueError),
        ("task", "ranking", ValueError),
        ("noise", "latent", ValueError),
        ("noise", -1.0, ValueError),
        ("noise", None, ValueError),
    ],
)
def test_wrong_arguments(argument, value, error):
    with pytest.raises(error, match=rf"\b{argument}\b"):
        METHODS["map"](**{"net": vsd.nn.mlp([3, 4, 2]), "num_data": 10, argument: value})
