"""A diagnosis finds what is wrong with a training run, changes nothing, and takes models and data in all forms."""

import copy
import json
import math
import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.diagnosis import Diagnosis, Finding, diagnose
from tests.diagnosis.training_runs import SICK, classes, train

SEEDS = [pytest.param(seed, marks=[] if seed == 0 else pytest.mark.slow) for seed in range(3)]
CODES = {code for _, code in SICK.values()}


def untrained(num_data=200, sizes=(5, 12, 3), kl_weight=1.0, **options):
    """A guide at its start, with data."""
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp(sizes)), num_data=num_data)
    return model, vsd.VSDGuide(model, scale_vectors=False, **options), classes(200, 0)


def quick(model, guide, data, validation=None, **options):
    return diagnose(model, guide, data, validation, **{"num_rows": 100, "num_samples": 8, "batch_size": 50, **options})


def codes(report):
    return {finding.code for finding in report.findings}


@pytest.fixture(scope="module")
def healthy():
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model, guide, elbo, data, held_out = train(0)
    yield model, guide, elbo, data, held_out, diagnose(model, guide, data, held_out, elbo=elbo, batch_size=50)
    torch.set_default_dtype(previous)


# ---- healthy and not


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_training_run_is_called_healthy(seed):
    model, guide, elbo, data, held_out = train(seed)
    report = diagnose(model, guide, data, held_out, elbo=elbo, batch_size=50)
    assert report.healthy, report


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", SICK)
def test_what_is_wrong_has_its_own_finding(kind, seed):
    change, code = SICK[kind]
    model, guide, elbo, data, held_out = train(seed, **change)
    report = diagnose(model, guide, data, held_out, elbo=elbo, batch_size=50)
    assert report.codes & CODES == {code}, report


# ---- mistakes in the setup


def test_equal_noise_variances_with_reflections():
    report = quick(*untrained(init_alpha_spread=0.0, num_reflections=2))
    found = [finding for finding in report.findings if finding.code == "alpha_equal"]
    assert [finding.site for finding in found] == ["net.0.weight", "net.2.weight"]
    assert found[0].severity == "error"


@pytest.mark.parametrize("options", [{"init_alpha_spread": 0.5}, {"init_alpha_spread": 0.0, "num_reflections": 0}])
def test_spread_or_independent_noise_is_no_mistake(options):
    assert "alpha_equal" not in codes(quick(*untrained(**options)))


@pytest.mark.parametrize(
    ("num_data", "severity", "factor"),
    [(50, "error", "4"), (30, "error", "6.67"), (2000, "error", "0.1"), (160, "warning", "1.25")],
)
def test_num_data_that_is_not_the_number_of_rows(num_data, severity, factor):
    (found,) = [f for f in quick(*untrained(num_data)).findings if f.code == "num_data"]
    assert found.severity == severity
    assert {str(num_data), "200", factor} <= set(found.text.replace(",", "").split())


@pytest.mark.parametrize("num_data", [200, 201])
def test_num_data_that_is_right(num_data):
    assert "num_data" not in codes(quick(*untrained(num_data)))


def hand_written(scale=None, size=None):
    """A model without our classes, its likelihood in a plate of the batch or of a given size."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
        rows = None if size is None else torch.arange(len(x))
        with pyro.poutine.scale(scale=scale or 1.0), pyro.plate("rows", size or len(x), subsample=rows):
            return pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    return model


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        (hand_written(), "4"),
        (hand_written(scale=3.0), "1.33"),
        (hand_written(scale=4.0), None),
        (hand_written(size=200), None),
    ],
)
def test_the_scale_of_a_hand_written_model(model, factor):
    x, y = classes(200, 0)
    report = quick(model, vsd.VSDGuide(model).setup(x, y), (x, y))
    found = [finding.text for finding in report.findings if finding.code == "num_data"]
    assert (not found) if factor is None else factor in found[0].split()


def test_parameters_that_are_not_finite_end_the_diagnosis():
    model, guide, data = untrained()
    with torch.no_grad():
        dict(guide.named_parameters())["theta.net.0.weight"][0, 0] = math.nan
    report = quick(model, guide, data)
    assert report.codes == {"not_finite"}
    assert "theta.net.0.weight" in report.findings[0].text
    assert report.objective["log_likelihood"] is None
    assert len(report.left_out) == 1
    assert "theta.net.0.weight" in repr(report)


# ---- theta


def test_theta_left_out_of_the_optimiser_is_frozen():
    model, guide, data = untrained()
    report = quick(model, guide, data)
    assert {f.site for f in report.findings if f.code == "theta_frozen"} == {"net.0.weight", "net.2.weight"}
    assert report.sites["net.0.weight"]["theta_moved"] == 0
    assert report.sites["net.0.weight"]["theta_slope"] > 0


def test_theta_without_gradients_is_fixed():
    model, guide, data = untrained()
    guide.theta.requires_grad_(False)
    assert {"theta_fixed"} <= codes(quick(model, guide, data))


def test_theta_that_grew_has_drifted():
    model, guide, data = untrained()
    with torch.no_grad():
        dict(guide.named_parameters())["theta.net.2.weight"].mul_(20)
    report = quick(model, guide, data)
    (found,) = [f for f in report.findings if f.code == "theta_drifted"]
    assert found.site == "net.2.weight"
    assert report.sites["net.2.weight"]["theta_growth"] == pytest.approx(20)


def test_where_theta_started_is_not_known_of_a_hand_written_model():
    x, y = classes(200, 0)
    model = hand_written(size=200)
    report = quick(model, vsd.VSDGuide(model).setup(x, y), (x, y))
    assert report.sites["w"]["theta_moved"] is None
    assert report.sites["w"]["theta_slope"] is not None


# ---- measurements


def test_correlated_share_is_that_of_the_dense_covariance(healthy):
    _, guide, _, _, _, report = healthy
    for name, site in report.sites.items():
        S = guide.noise(name).covariance_matrix.detach()
        expected = 1 - S.diagonal().square().sum() / S.square().sum()
        assert site["correlated"] == pytest.approx(expected.item(), abs=1e-9)


def test_objective_is_that_of_the_elbo(healthy):
    model, guide, elbo, data, _, report = healthy
    losses = [vsd.VSD_ELBO(kl_weight=elbo.kl_weight).loss(model, guide, *data) / 1000 for _ in range(20)]
    found = -report.objective["log_likelihood"] + report.objective["weighted_kl"]
    assert found == pytest.approx(sum(losses) / 20, rel=0.15)
    assert report.objective["kl"] == pytest.approx(sum(site["kl"] for site in report.sites.values()))
    assert report.objective["balance"] * report.objective["kl"] == pytest.approx(-report.objective["log_likelihood"])


def test_constant_prediction_of_classes(healthy):
    _, _, _, data, _, report = healthy
    shares = torch.bincount(data[1]) / 1000
    assert report.objective["constant"] == pytest.approx(float((shares * shares.log()).sum()))


def test_predictions_are_measured_on_held_out_rows(healthy):
    model, guide, _, _, held_out, report = healthy
    prediction = vsd.predict(model, guide, held_out[0], num_samples=200)
    assert report.prediction["on"] == "held-out data"
    assert report.prediction["error_rate"] == pytest.approx(vsd.metrics.error_rate(prediction, held_out[1]), abs=0.03)
    assert report.prediction["nll"] == pytest.approx(vsd.metrics.nll(prediction, held_out[1]), rel=0.05)


@pytest.mark.parametrize(("options", "assumed"), [({}, True), ({"kl_weight": 1.0}, False)])
def test_advice_on_the_size_of_noise_says_which_kl_weight_it_assumes(options, assumed):
    x = torch.randn(60, 3)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 20, 1])), num_data=60, noise=1.0)
    report = quick(model, vsd.VSDGuide(model, init_alpha=1e-3), (x, x[:, 0]), **options)
    texts = [finding.text for finding in report.findings if finding.code == "droprates_lag"]
    assert texts
    assert all(("pass it to diagnose" in text) == assumed for text in texts)


def test_better_noise_is_ordered(healthy):
    for site in healthy[-1].sites.values():
        loss = site["better_noise"]
        assert loss["best"] <= loss["best_diagonal"]
        assert loss["best"] <= loss["rescaled"] <= loss["now"]


def test_strength_of_the_kl_follows_kl_scale():
    """With ``kl_scale="weight"`` and a weight that is smaller by Q, one layer has the same KL and best noise."""
    model, guide, data = untrained(sizes=(5, 3))
    unit, weight = (
        quick(model, guide, data, elbo=vsd.VSD_ELBO(kl_scale=scale, kl_weight=kl)).sites["net.0.weight"]["better_noise"]
        for scale, kl in (("unit", 1.0), ("weight", 1 / 3))
    )
    assert weight == pytest.approx(unit)


# ---- kinds of models and of data


def test_regressor_is_judged_by_its_coverage():
    x = torch.randn(150, 3)
    y = x[:, 0] + 0.3 * torch.randn(150)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=150, noise=0.01)
    report = quick(model, vsd.VSDGuide(model, init_alpha=1e-3), (x, y))
    assert report.prediction["coverage"] < 0.5
    assert "too_sure" in report.codes
    assert report.objective["constant"] == pytest.approx(-0.5 * math.log(2 * math.pi * math.e * y.var()), abs=0.3)


def test_binary_classifier():
    x = torch.randn(100, 3)
    model = vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 8, 1])), num_data=100)
    report = quick(model, vsd.VSDGuide(model), (x, (x[:, 0] > 0).double()))
    assert {"ece", "error_rate"} <= set(report.prediction)
    assert report.objective["constant"] == pytest.approx(-math.log(2), abs=0.02)


def test_other_likelihoods_have_no_constant():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
        with pyro.plate("rows", 60, subsample=torch.arange(len(x))):
            return pyro.sample("y", dist.Poisson((x @ w).squeeze(-1).exp()), obs=y)

    x = torch.randn(60, 3)
    report = quick(model, vsd.VSDGuide(model).setup(x, torch.ones(60)), (x, torch.ones(60)))
    assert report.objective["constant"] is None
    assert any("constant prediction" in text for text in report.left_out)
    assert report.prediction["nll"] > 0


def test_weights_that_are_not_used_row_by_row_have_no_best_noise():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 6), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(torch.zeros(6, 3), 1.0).to_event(2))
        with pyro.plate("rows", 200, subsample=torch.arange(len(x))):
            return pyro.sample("y", dist.Categorical(logits=(x @ w.tanh()).relu() @ v), obs=y)

    x, y = classes(200, 0)
    report = quick(model, vsd.VSDGuide(model).setup(x, y), (x, y))
    assert report.sites["w"]["better_noise"] is None
    assert report.sites["v"]["better_noise"] is not None
    assert any(text.startswith("the best noise of w:") for text in report.left_out)


def test_a_model_that_needs_its_targets_has_no_predictions():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
        with pyro.plate("rows", 200, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    x, y = classes(200, 0)
    report = quick(model, vsd.VSDGuide(model).setup(x, y), (x, y))
    assert report.prediction == {}
    assert any(text.startswith("predictions:") for text in report.left_out)


def loader(**options):
    return lambda x, y: DataLoader(TensorDataset(x, y), batch_size=50, **options)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x, y: (x, y), id="tuple"),
        pytest.param(vsd.datasets.Data, id="Data"),
        pytest.param(loader(), id="loader"),
        pytest.param(loader(shuffle=True), id="shuffled"),
        pytest.param(lambda x, y: [(x[:50], y[:50]), (x[50:], y[50:])], id="list"),
    ],
)
def test_forms_of_data(form):
    model, guide, (x, y) = untrained()
    report = diagnose(model, guide, form(x, y), num_rows=200, num_samples=4)
    assert report.objective["data"] == 200
    assert "num_data" not in codes(report)


def test_a_loader_knows_its_batch_size():
    model, guide, data = untrained(num_data=50)
    report = diagnose(model, guide, loader()(*data), num_rows=100, num_samples=4)
    assert report.findings[0].code == "num_data"
    assert "batch size" in report.findings[0].text


def test_under_confident_classes():
    """Half of the signal is noise: the most probable class is right more often than its probability says."""
    x = torch.randn(400, 4)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 2])), num_data=200)
    guide = vsd.VSDGuide(model, init_alpha=1e-4)
    with torch.no_grad():
        guide.get_parameter("theta.net.0.weight").copy_(torch.tensor([[0.5] * 4, [-0.5] * 4]))
        model.net.network[0].bias.zero_()
    y = (x.sum(-1) < 0).long()
    report = diagnose(model, guide, (x[:200], y[:200]), (x[200:], y[200:]))
    assert report.prediction["overconfidence"] < -0.1
    (found,) = [finding for finding in report.findings if finding.code == "miscalibrated"]
    assert "underconfident" in found.text


def test_batches_as_keywords():
    model, guide, (x, y) = untrained()
    halves = [(x[:100], y[:100]), (x[100:], y[100:])]
    reports = [quick(model, guide, batches) for batches in (halves, [{"x": a, "y": b} for a, b in halves])]
    assert reports[0].to_dict() == reports[1].to_dict()
    renamed = [{"x": a, "class": b} for a, b in halves]
    assert quick(model, guide, renamed, target="class").prediction == reports[0].prediction


def test_batches_without_a_target_have_no_predictions():
    def model(x, answer):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 1]).to_event(2))
        with pyro.plate("data", 200, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal((x @ w).squeeze(-1), 1.0), obs=answer)

    data = [{"x": torch.randn(100, 4), "answer": torch.randn(100)} for _ in range(2)]
    report = quick(model, vsd.VSDGuide(model).setup(**data[0]), data)
    assert report.prediction == {}
    assert any(text.startswith("predictions:") for text in report.left_out)


class Endless:
    """Batches of a stream that does not know its length."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        while True:
            yield tuple(tensor[:50] for tensor in self.tensors)


def test_a_stream_is_looked_at_for_num_rows():
    model, guide, data = untrained()
    report = quick(model, guide, Endless(*data))
    assert report.objective["data"] is None
    assert any("num_data" in text for text in report.left_out)


def test_settings_are_those_of_the_elbo():
    model, guide, data = untrained()
    elbo = vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(10), kl_scale="weight", num_particles=3)
    elbo.step = 5
    report = quick(model, guide, data, elbo=elbo)
    assert report.objective["kl_weight"] == pytest.approx(elbo.kl_weight(5))
    assert report.objective["kl_scale"] == "weight"
    assert not report.objective["assumed"]
    assert (elbo.step, elbo.terms, elbo.num_particles) == (5, {}, 3)


@pytest.mark.parametrize(
    ("options", "reason"), [({"kl_weight": 0.0}, "kl_weight is 0"), ({"prior": "model"}, "prior='model'")]
)
def test_objectives_without_a_best_covariance(options, reason):
    model, guide, data = untrained()
    report = quick(model, guide, data, elbo=vsd.VSD_ELBO(**options))
    assert any(text.endswith(reason) for text in report.left_out)
    assert "better_noise" not in report.sites["net.0.weight"]


# ---- nothing changes


def test_nothing_is_changed():
    model, guide, data = untrained()
    model.net.append(torch.nn.BatchNorm1d(3))
    guide(data[0], data[1])
    for parameter in guide.parameters():
        parameter.grad = torch.ones_like(parameter)
    batches = DataLoader(TensorDataset(*data), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(3))
    pyro.param("of_another_model", torch.ones(2), constraint=dist.constraints.positive)

    def state():
        store = pyro.get_param_store()
        return copy.deepcopy(
            {
                "guide": guide.state_dict(),
                "model": {**model.state_dict(), **dict(model.named_buffers())},
                "grads": [parameter.grad for parameter in guide.parameters()],
                "modes": [module.training for module in [*model.modules(), *guide.modules()]],
                "torch": torch.get_rng_state(),
                "loader": batches.generator.get_state(),
                "numpy": np.random.get_state()[1].tolist(),
                "python": random.getstate(),
                "store": {name: value.detach() for name, value in store.items()},
                "ids": [id(p) for p in guide.parameters()],
            }
        )

    before = state()
    quick(model, guide, batches, batches)
    _assert_equal(state(), before)


def _assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)
    else:
        assert found == expected


def test_training_continues_as_without_a_diagnosis():
    results = []
    for look in (False, True):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model, guide, data = untrained()
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), vsd.VSD_ELBO())
        svi.step(*data)
        if look:
            quick(model, guide, data)
        results.append([svi.step(*data) for _ in range(3)])
    assert results[0] == results[1]


def test_the_same_seed_gives_the_same_report():
    model, guide, data = untrained()
    first, second, third = (quick(model, guide, data, seed=seed).to_dict() for seed in (1, 1, 2))
    assert first == second != third


# ---- the report


def test_report_prints_as_a_table(healthy):
    text = repr(healthy[-1])
    assert text.startswith("1000 of 1000 rows, kl_weight 1, kl_scale 'unit'\n")
    assert all(name in text for name in ("net.0.weight", "KL/row", "held-out data: 500 rows, 50 samples", "ece"))
    assert max(len(line) for line in text.split("\n")[:12]) <= 120


def test_report_without_findings_says_so():
    report = Diagnosis({}, {"log_likelihood": None, "rows": 1, "data": 1, "kl_weight": 1.0, "kl_scale": "unit",
                            "assumed": True}, {}, [], [], {})  # fmt: skip
    assert "no problems" in repr(report)
    assert "assumed" in repr(report)


def test_findings_come_worst_first():
    notes = [Finding("a", "note", None, ""), Finding("b", "error", None, ""), Finding("c", "warning", "w", "x")]
    report = Diagnosis({}, {}, {}, notes, [], {})
    assert [finding.code for finding in report.findings] == ["b", "c", "a"]
    assert report.codes == {"b", "c"}
    assert str(report.findings[1]) == "warning  w: x"


def test_report_is_plain_data(healthy):
    plain = json.loads(json.dumps(healthy[-1].to_dict()))
    assert plain["healthy"] is True
    assert plain["sites"]["net.0.weight"]["K"] == 5
    assert set(plain) == {"healthy", "sites", "objective", "prediction", "findings", "left_out"}


def test_report_as_a_data_frame(healthy):
    pytest.importorskip("pandas")
    frame = healthy[-1].to_pandas()
    assert list(frame.index) == ["net.0.weight", "net.2.weight"]
    assert frame.loc["net.2.weight", "K"] == 30
    assert frame["alpha.median"].between(1e-4, 10).all()


def test_data_frame_without_pandas(healthy, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match=r"\bto_pandas\b"):
        healthy[-1].to_pandas()


# ---- errors


def test_a_guide_of_a_different_class():
    model, _, data = untrained()
    with pytest.raises(TypeError, match=r"\bguide\b.*AutoNormal"):
        diagnose(model, pyro.infer.autoguide.AutoNormal(model), data)


def test_a_guide_that_is_not_set_up():
    model = hand_written()
    with pytest.raises(ValueError, match=r"\bguide\b.*\bsetup\b"):
        diagnose(model, vsd.VSDGuide(model), classes(20, 0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_rows": 0}, ValueError),
        ({"num_samples": 3}, ValueError),
        ({"seed": None}, ValueError),
        ({"max_units": -1}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"elbo": pyro.infer.Trace_ELBO()}, TypeError),
        ({"validation": torch.zeros(3)}, TypeError),
        ({"data": (torch.zeros(3), torch.zeros(2))}, ValueError),
        ({"data": (torch.zeros(0, 2), torch.zeros(0))}, ValueError),
        ({"data": (np.zeros((5, 5)), np.zeros(5))}, ValueError),
        ({"data": [torch.zeros(5, 5)] * 2}, TypeError),
    ],
)
def test_wrong_arguments(options, error):
    model, guide, data = untrained()
    (name,) = options
    with pytest.raises(error, match=rf"\b{name}\b"):
        diagnose(model, guide, **{"data": data, **options})
