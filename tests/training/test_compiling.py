"""The compiled step. Most tests run the captured graph as it is; those marked slow generate code."""

import random
import time
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.training import compiling
from tests.infer import models
from tests.training import cases
from tests.training.test_load import count_tensors


@pytest.fixture
def replayed(monkeypatch):
    """The captured operators run as they are, without a compiler."""
    monkeypatch.setattr(compiling, "_compile", compiling.replay)


def images():
    x = torch.randn(cases.N, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return [(x[:12], torch.arange(12) % 2), (x[12:], torch.arange(12) % 2)]


def lenet(**options):
    net = vsd.nn.bayesianize(vsd.nn.lenet5(num_classes=2, image_size=8), **options)
    return vsd.nn.Classifier(net, num_data=cases.N)


def normed():
    convolution = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()]
    net = nn.Sequential(*convolution, nn.Dropout(0.3), nn.Linear(108, 2))
    return vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=cases.N)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.layer(x.reshape(len(x), 8, 8)).mean(1))


class TwoInputs(PyroModule):
    """A hand-written model with two inputs and sampled weights and biases."""

    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](cases.D, 2)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, cases.D]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, mask, y=None):
        mean = self.linear(x * mask).sum(-1)
        with pyro.plate("data", cases.N, subsample=torch.arange(len(x))):
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def numbers():
    data = cases.data()
    return [(data.x[:12], data.y[:12]), (data.x[12:], data.y[12:])]


def labelled():
    data = cases.classes()
    return [(data.x[:12], data.y[:12]), (data.x[12:], data.y[12:])]


def masked():
    return [(x, (x > 0).to(x), y) for x, y in numbers()]


class Gated(nn.Module):
    """Two inputs, an output object, and tokens on request."""

    def __init__(self, tokens=False):
        super().__init__()
        self.tokens, self.linear = tokens, nn.Linear(cases.D, 3)

    def forward(self, x, gate):
        x = x * gate
        return SimpleNamespace(logits=self.linear(x.unsqueeze(1) * torch.ones(2, 1) if self.tokens else x))


def gated(tokens=False, **options):
    return lambda: vsd.nn.Classifier(vsd.nn.bayesianize(Gated(tokens)), cases.N, **options)


def packed():
    return [((x, (x > 0).to(x)), y) for x, y in labelled()]


def named():
    return [({"x": x, "gate": (x > 0).to(x)}, y) for x, y in labelled()]


def tokens():
    return [(inputs, torch.stack([y, torch.where(y == 0, -100, y)], 1)) for inputs, y in packed()]


def weighted():
    return [(x, y, torch.rand(len(y))) for x, y in labelled()]


def multilabel():
    return [(x, torch.stack([y, 1 - y], 1)) for x, y in labelled()]


def hierarchical(hyperprior):
    return lambda: cases.regressor(prior=vsd.nn.HierarchicalPrior(hyperprior))


# name: model, batches, options of the guide, options of the ELBO
MODELS = {
    "classifier": (cases.classifier, labelled, {}, {}),
    "learned": (cases.regressor, numbers, {}, {}),
    "latent": (lambda: cases.regressor(noise="latent"), numbers, {}, {}),
    "no-reflections": (cases.classifier, labelled, {"num_reflections": 0}, {}),
    "many-reflections": (cases.classifier, labelled, {"num_reflections": 5}, {}),
    "fc": (cases.classifier, labelled, {"vectors": "fc"}, {}),
    "low-rank": (cases.classifier, labelled, {"vectors": "low_rank", "rank": 2}, {}),
    "inverse-gamma": (hierarchical("inverse_gamma"), numbers, {}, {}),
    "gamma": (hierarchical("gamma"), numbers, {}, {}),
    "half-cauchy": (hierarchical("half_cauchy"), numbers, {}, {}),
    "stated-prior": (cases.classifier, labelled, {}, {"prior": "model"}),
    "weight-scale": (cases.classifier, labelled, {}, {"kl_scale": "weight", "kl_weight": 0.1}),
    "no-kl": (cases.classifier, labelled, {}, {"kl_weight": 0.0}),
    "schedule": (cases.classifier, labelled, {}, {"kl_weight": vsd.infer.linear_warmup(5)}),
    "particles": (cases.classifier, labelled, {}, {"num_particles": 3}),
    "lenet": (lenet, images, {}, {}),
    "lenet-in": (lenet, images, {"conv_noise": "in"}, {}),
    "batch-norm": (normed, images, {}, {}),
    "transformer": (lambda: vsd.nn.Classifier(vsd.nn.bayesianize(Encoder()), cases.N), images, {}, {}),
    "by-hand": (lambda: models.by_hand, numbers, {}, {}),
    "two-inputs": (TwoInputs, masked, {}, {}),
    "tuple": (gated(), packed, {}, {}),
    "dict": (gated(), named, {}, {}),
    "tokens": (gated(tokens=True), tokens, {}, {}),
    "class-weights": (gated(class_weights=[1.0, 2.0, 0.5]), named, {}, {}),
    "sample-weights": (cases.classifier, weighted, {}, {}),
    "multi-label": (
        lambda: vsd.nn.BinaryClassifier(vsd.nn.bayesianize(vsd.nn.mlp([cases.D, 5, 2])), cases.N),
        multilabel,
        {},
        {},
    ),
}


def build(name, **more):
    make, batches, options, elbo_options = MODELS[name]
    pyro.clear_param_store()
    torch.manual_seed(2)
    model = make()
    guide = vsd.VSDGuide(model, **options)
    guide.setup(*batches()[0])
    if isinstance(model, nn.Module):
        model.train()
    return vsd.VSD_ELBO(**{**elbo_options, **more})(model, guide), batches()


def eager_step(loss, optimizer):
    def step(*batch):
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def run(loss, batches, make_step, steps=4):
    """Losses, terms and all tensors after some steps from the same random state."""
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-4)
    step = make_step(loss, optimizer)
    torch.manual_seed(7)
    losses, terms = [], []
    for i in range(steps):
        losses.append(float(step(*batches[i % len(batches)])))
        terms.append({k: float(v) for k, v in loss.elbo.terms.items() if k != "kl"})
        terms[-1] |= {k: float(v) for k, v in loss.elbo.terms["kl"].items()}
    tensors = {k: v.clone() for k, v in loss.state_dict().items() if isinstance(v, torch.Tensor)}
    return losses, terms, tensors, step


def assert_same(found, expected, **tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance.get("rtol", 1e-9))
    for a, b in zip(found[1], expected[1], strict=True):
        assert a == pytest.approx(b, rel=tolerance.get("rtol", 1e-9), abs=1e-9)
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, msg=name, **tolerance)


@pytest.mark.filterwarnings("ignore:the likelihood of a batch")  # two batches of a model without a subsample
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_as_eager(name, replayed):
    expected = run(*build(name), eager_step)
    found = run(*build(name), vsd.compile_step)
    assert found[3].reason is None
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classifier", "half-cauchy", "batch-norm", "particles"])
def test_the_same_numbers_as_eager_with_generated_code(name):
    expected = run(*build(name), eager_step)
    found = run(*build(name), vsd.compile_step)
    assert found[3].reason is None
    assert_same(found, expected, rtol=1e-7, atol=1e-9)


def test_autocast_stays_eager(replayed):
    def both(make_step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(*float32("classifier"), make_step)

    expected = both(eager_step)
    with pytest.warns(UserWarning, match="autocast"):
        found = both(vsd.compile_step)
    assert found[0] == expected[0]


def float32(name):
    torch.set_default_dtype(torch.float32)
    loss, batches = build(name)
    return loss.float(), [tuple(t.float() if t.is_floating_point() else t for t in batch) for batch in batches]


def test_the_learning_rate_may_change(replayed):
    results = []
    for make_step in (eager_step, vsd.compile_step):
        loss, batches = build("classifier")
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
        step = make_step(loss, optimizer)
        torch.manual_seed(3)
        for rate in (1e-2, 1e-3, 1e-2):
            optimizer.param_groups[0]["lr"] = rate
            step(*batches[0])
        results.append(torch.cat([p.detach().flatten() for p in loss.parameters()]))
    torch.testing.assert_close(results[1], results[0])


def test_a_few_shapes_are_compiled_the_rest_runs_eagerly(replayed):
    loss, ((x, y), _) = build("classifier")
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-4))
    for rows in (12, 11, 10, 9):
        step(x[:rows], y[:rows])
        assert step.reason is None
    with pytest.warns(UserWarning, match="compiled"):
        step(x[:8], y[:8])
    assert "shapes" in step.reason
    step(x, y)  # those compiled stay so
    assert step.reason is None


def change_mode(loss):
    loss.model.eval()


def change_rate(loss):
    loss.model.net[4].p = 0.9


def freeze(loss):
    loss.model.net[0].bias.requires_grad_(False)


def add_hook(loss):
    loss.model.net[2].register_forward_hook(lambda module, args, out: 2 * out)


def replace_layer(loss):
    loss.model.net.network[2] = nn.Tanh()


@pytest.mark.parametrize("change", [change_mode, change_rate, freeze, add_hook, replace_layer])
def test_a_changed_module_is_captured_again(change, replayed):
    def changing(make_step):
        def make(loss, optimizer):
            step, calls = make_step(loss, optimizer), [0]

            def wrapped(*batch):
                if calls[0] == 3:
                    change(loss)
                calls[0] += 1
                return step(*batch)

            wrapped.inner = step
            return wrapped

        return run(*build("batch-norm"), make, steps=6)

    expected, found = changing(eager_step), changing(vsd.compile_step)
    assert found[3].inner.reason is None
    assert_same(found, expected)


class Scaled(nn.Module):
    """A network with settings of its own at the root."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(cases.D, 2)
        self.scale, self.options, self.sizes = 1.0, {"shift": 0.0}, [1.0]

    def forward(self, x):
        return self.linear(x) * self.scale * self.sizes[0] + self.options["shift"]


def set_scale(loss, parameter):
    loss.model.net.scale = 5.0


def set_option(loss, parameter):
    loss.model.net.options["shift"] = 5.0


def replace_list(loss, parameter):
    loss.model.net.network.sizes = [5.0]


def replace_forward(loss, parameter):
    linear = loss.model.net.linear
    linear.forward = lambda x: 5 * nn.functional.linear(x, linear.weight, linear.bias)


def hook_gradient(loss, parameter):
    parameter.register_hook(lambda gradient: 5 * gradient)


@pytest.mark.parametrize("change", [set_scale, set_option, replace_list, replace_forward, hook_gradient])
def test_changes_at_the_root_and_hooks_on_gradients_are_seen(change):
    results = []
    for make_step in (eager_step, partial(vsd.compile_step, mode="capture")):
        pyro.clear_param_store()
        torch.manual_seed(2)
        model = vsd.nn.Classifier(vsd.nn.bayesianize(Scaled()), num_data=cases.N)
        loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model))
        batch = labelled()[0]
        loss(*batch)
        parameters = list(loss.parameters())
        step = make_step(loss, torch.optim.SGD(parameters, lr=1e-3))
        torch.manual_seed(3)
        for _ in range(3):
            step(*batch)
        change(loss, parameters[-1])
        step(*batch)
        results.append((step(*batch), torch.cat([p.detach().flatten() for p in parameters])))
    torch.testing.assert_close(results[1], results[0])


def test_one_tensor_for_two_arguments():
    loss, ((x, mask, y), _) = build("two-inputs")
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=0.0), mode="capture")
    for inputs in ((x, x), (x, x), (x, x), (x, mask)):
        torch.manual_seed(4)
        expected = loss(*inputs, y).detach()
        torch.manual_seed(4)
        torch.testing.assert_close(step(*inputs, y), expected)


def test_a_handler_of_pyro_is_seen():
    loss, (batch, _) = build("classifier")
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=0.0), mode="capture")
    plain = [step(*batch) for _ in range(3)]
    with pyro.poutine.scale(scale=100.0):
        assert step(*batch) > 10 * plain[-1]
    assert step.reason
    step(*batch)
    assert step.reason is None


@pytest.mark.parametrize("how", ["compile_step", "fit"])
def test_hooks_on_a_step_find_its_gradients(how):
    model = cases.regressor()
    guide = vsd.VSDGuide(model)
    data = cases.data()
    loss = vsd.VSD_ELBO()(model, guide)
    loss(data.x, data.y)
    optimizer, norms = torch.optim.SGD(loss.parameters(), lr=1e-6), []
    optimizer.register_step_pre_hook(lambda *_: norms.append(gradient_norm(loss)))
    if how == "fit":
        vsd.fit(model, guide, data, epochs=2, batch_size=len(data), optimizer=optimizer)
    else:
        step = vsd.compile_step(loss, optimizer, mode="capture")
        for _ in range(2):
            step(data.x, data.y)
    assert len(norms) == 2
    assert min(norms) > 0


def gradient_norm(loss):
    return sum(float(p.grad.norm()) for p in loss.parameters() if p.grad is not None)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(cases.D, 2)

    def forward(self, x):
        return self.linear(x if x.sum() > 0 else -x)


class Coin(Branch):
    def forward(self, x):
        return self.linear(x) * random.random()


class Numpy(Branch):
    def forward(self, x):
        return self.linear(x) * float(x.numpy().sum() if not x.requires_grad else 0.0)


class Counting(Branch):
    """Its calls change what it computes, which is to be seen at once."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 if self.calls < 4 else 3.0)


class Rewriting(Branch):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(cases.D))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


class Nonzero(Branch):
    def forward(self, x):
        return self.linear(x) * len((x > 1).nonzero())


class Masked(Branch):
    def forward(self, x):
        return self.linear(x) * x[x > 1].sum()


class Listing(Branch):
    def forward(self, x):
        return self.linear(x) * (5.0 if max(x.flatten().tolist()) > 100 else 1.0)


@pytest.mark.parametrize("net", [Branch, Coin, Numpy, Counting, Rewriting, Nonzero, Masked, Listing])
def test_what_cannot_be_captured_runs_eagerly_and_says_why(net, replayed):
    def make(make_step):
        torch.manual_seed(2)
        random.seed(3)
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net()), num_data=cases.N)
        return run(vsd.VSD_ELBO()(model, vsd.VSDGuide(model)), labelled(), make_step)

    expected = make(eager_step)
    with pytest.warns(UserWarning, match="eagerly"):
        found = make(vsd.compile_step)
    assert found[3].reason
    if net is not Coin:
        assert_same(found, expected)


def test_a_hook_on_a_gradient_runs(replayed):
    """One that autograd runs when it stores the gradient is seen to be missing."""
    loss, batches = build("classifier")
    parameter = next(loss.parameters())

    def zero(p):
        p.grad.zero_()

    parameter.register_post_accumulate_grad_hook(zero)
    before = parameter.detach().clone()
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-2))
    with pytest.warns(UserWarning, match="eagerly"):
        step(*batches[0])
    assert "gradients" in step.reason
    assert torch.equal(parameter, before)


def test_vectorised_particles_stay_eager(replayed):
    options = {"num_particles": 3, "vectorize_particles": True}
    expected = run(*build("classifier", **options), eager_step)
    with pytest.warns(UserWarning, match="vectorize_particles"):
        found = run(*build("classifier", **options), vsd.compile_step)
    assert "vectorize_particles" in found[3].reason
    assert_same(found, expected)


def test_without_a_compiler_captured_operators_run(monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(compiling, "_compile", missing)
    expected = run(*build("classifier"), eager_step)
    with pytest.warns(UserWarning, match="no C"):
        found = run(*build("classifier"), vsd.compile_step)
    assert "compiler" in found[3].reason
    assert found[:2] == expected[:2]
    assert cases.same(found[2], expected[2])


@pytest.mark.parametrize("name", ["classifier", "lenet", "batch-norm", "half-cauchy"])
def test_captured_operators_give_the_eager_numbers_bit_for_bit(name):
    expected = run(*build(name), eager_step)
    found = run(*build(name), partial(vsd.compile_step, mode="capture"))
    assert found[3].reason is None
    assert found[0] == expected[0]
    assert cases.same(found[2], expected[2])


def test_the_wrong_mode():
    loss, _ = build("classifier")
    with pytest.raises(ValueError, match="mode"):
        vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=0.1), mode="eager")


def test_a_loss_that_is_not_finite_names_the_site_before_parameters_change(replayed):
    loss, ((x, y), _) = build("learned")
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-2))
    for _ in range(3):
        step(x, y)
    before = cases.values(loss)
    with pytest.raises(ValueError, match=r"'y'"):
        step(x * torch.nan, y)
    assert cases.same(cases.values(loss), before)


@pytest.mark.slow
def test_labels_out_of_range_raise():
    loss, ((x, y), _) = build("classifier")
    step = vsd.compile_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-2))
    for _ in range(3):
        step(x, y)
    before = cases.values(loss)
    with pytest.raises(ValueError, match=r"\by\b"):
        step(x, y + 5)
    assert cases.same(cases.values(loss), before)


@pytest.mark.parametrize("optimizer", [None, "torch.optim.Adam", pyro.optim.Adam({"lr": 0.1})])
def test_the_wrong_optimizer(optimizer):
    loss, _ = build("classifier")
    with pytest.raises(TypeError, match="optimizer"):
        vsd.compile_step(loss, optimizer)


def test_a_loss_that_is_no_module():
    with pytest.raises(TypeError, match="loss"):
        vsd.compile_step(lambda x: x, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


def test_lbfgs(replayed):
    results = []
    for make_step in (None, vsd.compile_step):
        loss, (batch, _) = build("learned")
        optimizer = torch.optim.LBFGS(loss.parameters(), lr=1e-3, max_iter=3)
        torch.manual_seed(3)
        if make_step is not None:
            make_step(loss, optimizer)(*batch)
        else:

            def closure(loss=loss, batch=batch, optimizer=optimizer):
                optimizer.zero_grad()
                value = loss(*batch)
                value.backward()
                return value

            optimizer.step(closure)
        results.append(torch.cat([p.detach().flatten() for p in loss.parameters()]))
    torch.testing.assert_close(results[1], results[0])


def test_memory_does_not_grow(replayed):
    loss, batches = build("classifier")
    step = vsd.compile_step(loss, torch.optim.Adam(loss.parameters(), lr=1e-4))
    counts = []
    for i in range(301):
        step(*batches[i % 2])
        if i in (100, 300):
            counts.append(count_tensors())
    assert counts[0] == counts[1]


# ---- fit


def fitted(compile, stop=None, path=None, epochs=6, **options):
    pyro.clear_param_store()
    torch.manual_seed(2)
    model = cases.batch_norm()
    guide = vsd.VSDGuide(model)
    callbacks = [] if stop is None else [lambda history: len(history) == stop]
    history = vsd.fit(
        model, guide, cases.data(), epochs=epochs, batch_size=10, seed=5, compile=compile, checkpoint=path,
        callbacks=callbacks, optimizer=torch.optim.SGD(guide.parameter_groups(lr=1e-4)), **options,
    )  # fmt: skip
    return history, cases.values(model, guide)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_gives_the_same_numbers(accumulate, replayed):
    expected, found = (fitted(compile, accumulate=accumulate) for compile in (False, True))
    for a, b in zip(found[0], expected[0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value)


def check_resumed(tmp_path):
    path = tmp_path / "run.pt"
    whole = fitted(True)
    fitted(True, stop=2, path=path)
    resumed = fitted(True, path=path)
    assert cases.same(resumed[1], whole[1])
    assert [record["loss"] for record in resumed[0]] == [record["loss"] for record in whole[0]]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, replayed):
    check_resumed(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_of_generated_code_goes_on_bit_for_bit(tmp_path):
    check_resumed(tmp_path)


def test_a_short_run_is_not_captured(monkeypatch):
    def never(*_):
        raise AssertionError("captured")

    monkeypatch.setattr(compiling, "Program", never)
    fitted("auto")


def programs(monkeypatch, rows, epochs, **options):
    """How many rows the programs of a run with batches of up to ten rows were made for."""
    made = []
    init = compiling.Program.__init__

    def count(self, loss, args, kwargs, tensors):
        made.append(len(tensors[0]))
        init(self, loss, args, kwargs, tensors)

    monkeypatch.setattr(compiling.Program, "__init__", count)
    monkeypatch.setattr(compiling, "_CAPTURE_STEPS", 10)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 2])), num_data=rows)
    data = torch.randn(rows, 3), torch.arange(rows) % 2
    vsd.fit(model, vsd.VSDGuide(model), data, epochs=epochs, batch_size=10, seed=0, **options)
    return made


def test_each_size_of_batches_is_captured_once(monkeypatch):
    measure = compiling.CompiledLoss._time

    def seconds(self, args, kwargs, program=None, tensors=None):
        measure(self, args, kwargs, program, tensors)  # its evaluations count
        return 2.0 if program is None else 1.0

    monkeypatch.setattr(compiling.CompiledLoss, "_time", seconds)
    assert sorted(programs(monkeypatch, rows=28, epochs=6)) == [9, 10]  # one batch of ten rows in each epoch


def test_a_size_with_few_batches_is_not_captured(monkeypatch):
    assert programs(monkeypatch, rows=37, epochs=4) == [9]  # four batches of ten rows in all, twelve of nine


def test_a_program_is_timed_when_it_is_warm():
    """TorchScript optimises in its first calls."""
    calls = []

    def backward(tensors, weight, share):
        calls.append(weight)
        time.sleep(0.2 * (len(calls) <= 3))
        return torch.zeros(())

    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([3, 4, 2])), num_data=30)
    guide = vsd.VSDGuide(model)
    guide.setup(torch.randn(10, 3), torch.arange(10) % 2)
    loss = compiling.CompiledLoss(vsd.VSD_ELBO()(model, guide))
    assert loss._time((), {}, SimpleNamespace(backward=backward), []) < 0.1


def timed(monkeypatch, captured, compiled, compilation=1e-3):
    """Eager evaluations take two seconds, others this long. Returns a list with an entry for each compilation."""
    made = []

    def seconds(self, args, kwargs, program=None, tensors=None):
        return 2.0 if program is None else compiled if program.compiled else captured

    def compile(graph, inputs):
        made.append(graph)
        return compiling.replay(graph, inputs)

    monkeypatch.setattr(compiling.CompiledLoss, "_time", seconds)
    monkeypatch.setattr(compiling, "_CAPTURE_STEPS", 0)
    monkeypatch.setattr(compiling, "_COMPILATION", compilation)
    monkeypatch.setattr(compiling, "_compile", compile)
    return made


def test_a_long_run_is_compiled_and_the_choice_is_kept(monkeypatch, tmp_path):
    made = timed(monkeypatch, captured=1.0, compiled=0.5)
    fitted("auto", stop=2, path=tmp_path / "run.pt")
    assert len(made) == 1  # three batches of eight rows
    monkeypatch.setattr(compiling, "_COMPILATION", 1e9)
    fitted("auto", path=tmp_path / "run.pt")
    assert len(made) == 2


def test_a_run_of_middle_length_is_captured_bit_for_bit(monkeypatch):
    expected = fitted(False)
    made = timed(monkeypatch, captured=1.0, compiled=0.5, compilation=1e9)
    found = fitted("auto")
    assert not made
    assert cases.same(found[1], expected[1])
    assert [record["loss"] for record in found[0]] == [record["loss"] for record in expected[0]]


@pytest.mark.parametrize(("captured", "compiled", "choice"), [(1.0, 1.5, "captured"), (3.0, 2.5, "eager")])
def test_what_is_slower_is_left(captured, compiled, choice, monkeypatch):
    made, losses = timed(monkeypatch, captured, compiled), []
    init = compiling.CompiledLoss.__init__
    monkeypatch.setattr(compiling.CompiledLoss, "__init__", lambda self, *a: (init(self, *a), losses.append(self))[0])
    fitted("auto")
    assert len(made) == 1
    assert losses[0].choices == {8: choice}


def test_pyros_optimisers_run_eagerly_and_that_is_said(replayed):
    model = cases.regressor()
    optimizer = pyro.optim.Adam({"lr": 0.01})
    with pytest.warns(UserWarning, match="compile"):
        vsd.fit(model, vsd.VSDGuide(model), cases.data(), epochs=1, optimizer=optimizer, compile=True)


def test_the_wrong_word():
    model = cases.regressor()
    with pytest.raises(ValueError, match=r"\bcompile\b"):
        vsd.fit(model, vsd.VSDGuide(model), cases.data(), epochs=1, compile="always")


class OfUsers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(cases.D, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x):
        return self.layers(x)


def test_fit_captures_a_network_of_ones_own():
    """No pass in evaluation mode, such as that which scales the vectors, is taken for a change of the network."""
    model = vsd.nn.Regressor(vsd.nn.bayesianize(OfUsers()), num_data=cases.N)
    guide = vsd.VSDGuide(model).setup(cases.data().x, cases.data().y)
    optimizer = torch.optim.Adam(guide.parameter_groups())
    step = vsd.compile_step(vsd.VSD_ELBO()(model, guide), optimizer, mode="capture")
    for _ in range(2):
        step(cases.data().x, cases.data().y)
        vsd.predict(model, guide, cases.data().x, num_samples=1)
    assert step.reason is None


def test_a_captured_step_leaves_nothing_in_torchs_registry_of_functions():
    registry, rows = torch.jit._state._python_cu, cases.data()
    before = len(registry.get_functions())
    model = cases.regressor()
    guide = vsd.VSDGuide(model).setup(rows.x, rows.y)
    optimizer = torch.optim.Adam(guide.parameter_groups())
    step = vsd.compile_step(vsd.VSD_ELBO()(model, guide), optimizer, mode="capture")
    step(rows.x, rows.y)
    assert step.reason is None
    assert len(registry.get_functions()) == before
