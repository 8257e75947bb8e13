"""Any network becomes Bayesian: names, axes, what stays, and that nothing else changes."""

import copy
import io
import pickle

import pyro
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import pyro_vsd as vsd
from pyro_vsd import VSDGuide
from pyro_vsd.distributions import ScaleMixtureNormal
from pyro_vsd.nn import Classifier, GaussianPrior, HierarchicalPrior, bayesianize


class Nested(nn.Module):
    """Lists in dictionaries, an unused slot, a norm, an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.parts = nn.ModuleDict(
            {"list": nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))]), "head": nn.Linear(4, 2)}
        )
        self.norm = nn.LayerNorm(4)
        self.gone = nn.Identity()
        self.gone = None

    def forward(self, x):
        h = self.embedding(x).mean(-2)
        for part in self.parts["list"]:
            h = self.norm(torch.tanh(part(h)))
        return self.parts["head"](h)


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def sites(net, *args):
    return poutine.trace(net).get_trace(*args).stochastic_nodes


def test_sites_are_named_after_paths():
    net = bayesianize(Nested())
    assert sites(net, torch.zeros(5, 3, dtype=torch.long)) == [
        "parts.list.0.weight",
        "parts.list.1.0.weight",
        "parts.head.weight",
    ]


def test_a_single_layer_is_a_network():
    assert sites(bayesianize(nn.Linear(3, 2)), torch.ones(5, 3)) == ["weight"]


def test_the_rest_stays_parameters():
    net = bayesianize(Nested())
    assert [name for name, _ in net.named_parameters()] == [
        "embedding.weight",
        "parts.list.0.bias",
        "parts.list.1.0.bias",
        "parts.head.bias",
        "norm.weight",
        "norm.bias",
    ]


def test_the_original_is_untouched():
    net = small()
    before = copy.deepcopy(net.state_dict())
    bayesianize(net)
    assert type(net) is nn.Sequential
    assert type(net[0]) is nn.Linear
    torch.testing.assert_close(dict(net.state_dict()), dict(before))


def test_inplace_uses_the_network_itself():
    net = small()
    assert bayesianize(net, inplace=True).network is net
    assert [name for name, _ in net.named_parameters()] == ["0.bias", "1.weight", "1.bias", "3.bias"]


def test_a_draw_is_used_by_the_network():
    net = bayesianize(nn.Linear(3, 2, bias=False))
    weight, x = torch.randn(2, 3), torch.randn(5, 3)
    torch.testing.assert_close(poutine.condition(net, {"weight": weight})(x), x @ weight.mT)


LAYERS = [
    # layer, input, noise axis by default, with conv_noise="in"
    (nn.Linear(3, 4), (2, 3), -1, -1),
    (nn.Conv1d(3, 4, 5), (2, 3, 9), -3, -2),
    (nn.Conv2d(3, 4, 3), (2, 3, 5, 5), -4, -3),
    (nn.Conv3d(3, 4, 2), (2, 3, 4, 4, 4), -5, -4),
    (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5), -4, -3),
    (nn.ConvTranspose1d(3, 4, 5), (2, 3, 9), -2, -3),
    (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5), -3, -4),
    (nn.ConvTranspose3d(3, 4, 2), (2, 3, 4, 4, 4), -4, -5),
]


@pytest.mark.parametrize(("layer", "shape", "out", "inp"), LAYERS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("channels", ["out", "in"])
@pytest.mark.parametrize("hierarchical", [False, True], ids=["gaussian", "hierarchical"])
def test_noise_axes(layer, shape, out, inp, channels, hierarchical):
    prior = HierarchicalPrior(channels=channels) if hierarchical else GaussianPrior()
    net = bayesianize(layer, prior)
    trace = poutine.trace(net).get_trace(torch.randn(shape))
    site = trace.nodes["weight"]
    stated, axis = site["infer"]["vsd"], out if channels == "out" else inp
    assert stated["noise_dim"] == (out if isinstance(layer, nn.Linear) else {"out": out, "in": inp})
    assert site["fn"].event_shape == layer.weight.shape
    torch.testing.assert_close(stated["init"], layer.weight.detach())
    guide = VSDGuide(vsd.nn.Regressor(net, num_data=3), conv_noise=channels)
    assert guide.noise_dim("net.weight") == axis
    if hierarchical:
        assert isinstance(site["fn"], ScaleMixtureNormal)
        assert (stated["z"], site["fn"].noise_dim) == ("weight_z", axis)
        assert trace.nodes["weight_z"]["fn"].event_shape == (layer.weight.shape[axis],)
        assert trace.nodes["weight_z"]["value"] is site["fn"].z


def test_layers_keep_their_classes():
    net = Nested()
    kinds = [type(module) for module in net.modules()]
    twin = bayesianize(net)
    assert [type(module) for module in twin.modules()][1:] == kinds[1:]
    assert type(twin.network) is Nested
    assert torch.equal(twin.parts["head"].weight, net.parts["head"].weight)


def test_frozen_weights_do_not_become_sites():
    net = small()
    net[0].weight.requires_grad_(False)
    assert sites(bayesianize(net), torch.randn(5, 4)) == ["3.weight"]
    with pytest.raises(ValueError, match=r"\binclude\b"):
        bayesianize(net, include="0")


class Own(nn.Module):
    """A network with an attribute, a method and a mode of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.sites = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.temperature = 1.0

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def encode(self, x):
        return self.norm(self.body(x))

    def forward(self, x):
        return self.sites(self.encode(x)) / self.temperature


def test_attributes_of_the_network_are_set_and_read_through():
    net = bayesianize(Own())
    draws = {"body.weight": torch.randn(3, 4), "sites.weight": torch.randn(2, 3)}
    x = torch.randn(5, 4)
    before = poutine.condition(net, draws)(x)
    net.temperature = 4.0
    assert net.network.temperature == net.temperature == 4.0
    torch.testing.assert_close(poutine.condition(net, draws)(x), before / 4)
    assert not net.train().norm.training


@pytest.mark.parametrize("part", ["encode", "body"])
def test_a_part_that_is_called_on_its_own_warns(part):
    class Parts(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = bayesianize(Own())

        def forward(self, x):
            return getattr(self.net, part)(x)

    with pytest.warns(UserWarning, match=part):
        Parts()(torch.randn(5, 4))
    getattr(bayesianize(Own()), part)(torch.randn(5, 4))  # outside of a model nobody is surprised


def test_a_layer_that_was_replaced():
    model = vsd.nn.Classifier(bayesianize(small()), num_data=5)
    model.net.network[0] = nn.Linear(4, 8)
    with pytest.raises(ValueError, match=r"0\.weight"):
        model(torch.randn(5, 4))


def test_sites_of_the_root_are_listed():
    class Root(PyroModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.factor = PyroSample(pyro.distributions.LogNormal(0.0, 1.0))

        def forward(self, x):
            return self.factor * self.layer(x)

    model = vsd.nn.Classifier(bayesianize(Root()), num_data=5)
    assert sorted(model.latent_sites()) == ["net.factor", "net.layer.weight"]
    vsd.VSD_ELBO().loss(model, VSDGuide(model), torch.randn(5, 3), torch.zeros(5).long())


@pytest.mark.parametrize("training", [True, False])
def test_the_network_keeps_its_mode_and_follows_the_model(training):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(3, 2), []

        def forward(self, x):
            self.seen.append(self.training)
            return self.layer(x)

    net = bayesianize(Root().train(training))
    model = vsd.nn.Classifier(net, num_data=5)
    x = torch.randn(5, 3)
    net(x)
    model.train()(x), model.eval()(x)
    vsd.predict(model.train(), VSDGuide(model), x, num_samples=2)
    assert net.seen[:3] == [training, True, False]
    assert not any(net.seen[3:])


def test_a_network_called_twice_in_a_model_has_one_draw():
    class Twice(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = bayesianize(small().eval())

        def forward(self, x):
            return self.net(x), self.net(x)

    trace = poutine.trace(Twice().eval()).get_trace(torch.randn(5, 4))
    assert trace.stochastic_nodes == ["net.0.weight", "net.3.weight"]
    assert torch.equal(*trace.nodes["_RETURN"]["value"])


@pytest.mark.parametrize("entry", [pyro.distributions.Laplace(0.0, 0.5), pyro.distributions.StudentT(3.0)])
def test_any_distribution_is_a_prior(entry):
    model = vsd.nn.Regressor(bayesianize(nn.Linear(3, 1), entry).to(torch.float32), num_data=7)
    x, y = torch.randn(7, 3, dtype=torch.float32), torch.randn(7, dtype=torch.float32)
    guide = VSDGuide(model)
    assert type(poutine.trace(model).get_trace(x).nodes["net.weight"]["fn"].base_dist) is type(entry)
    with pytest.raises(ValueError, match="net.weight"):
        vsd.VSD_ELBO().loss(model, guide, x, y)
    loss = vsd.VSD_ELBO(prior="model")(model, guide)(x, y)
    loss.backward()
    assert loss.isfinite()


def test_a_hyperprior_may_be_any_positive_distribution():
    prior = HierarchicalPrior(pyro.distributions.LogNormal(0.0, 0.5))
    model = vsd.nn.Regressor(bayesianize(nn.Linear(3, 1), prior), num_data=7)
    loss = vsd.VSD_ELBO()(model, VSDGuide(model))
    loss(torch.randn(7, 3), torch.randn(7)).backward()
    assert sorted(loss.elbo.terms["kl"]) == ["net.weight", "net.weight_z"]


def test_scales_are_sites_next_to_their_weights():
    net = bayesianize(small(), HierarchicalPrior("gamma"))
    trace = poutine.trace(net).get_trace(torch.randn(5, 4))
    assert trace.stochastic_nodes == ["0.weight_z", "0.weight", "3.weight_z", "3.weight"]
    assert trace.nodes["3.weight"]["infer"]["vsd"]["z"] == "3.weight_z"


def test_state_dict_holds_parameters_and_statistics_only():
    assert sorted(bayesianize(small(), HierarchicalPrior()).state_dict()) == [
        "0.bias", "1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight", "3.bias",
    ]  # fmt: skip


def test_to_moves_the_start_too():
    net = bayesianize(small(), HierarchicalPrior()).to(torch.float32)
    trace = poutine.trace(net).get_trace(torch.randn(5, 4, dtype=torch.float32))
    for name in trace.stochastic_nodes:
        assert trace.nodes[name]["value"].dtype == torch.float32
    assert net[0].weight.dtype == torch.float32


def copies(net):
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(net),
        "pickle": pickle.loads(pickle.dumps(net)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "after a call"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("prior", [GaussianPrior(), HierarchicalPrior()], ids=["gaussian", "hierarchical"])
def test_copies_are_alive(way, prior, ran):
    net = bayesianize(small(), prior)
    x = torch.randn(5, 4)
    if ran:
        poutine.trace(net).get_trace(x)
    twin = copies(net.eval())[way]
    assert sites(twin, x) == sites(net, x)
    pyro.set_rng_seed(1)
    expected = net(x)
    pyro.set_rng_seed(1)
    torch.testing.assert_close(twin(x), expected)
    assert twin[0].weight is not net[0].weight


# ---- shared modules and weights


class Tied(nn.Module):
    """An embedding whose weight is the output layer's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.embedding(x).mean(-2))))


def test_a_module_used_twice_has_one_site():
    layer = nn.Linear(4, 4)
    net = bayesianize(nn.Sequential(layer, nn.ReLU(), layer))
    trace = poutine.trace(net).get_trace(torch.randn(5, 4))
    assert len(trace.stochastic_nodes) == 1
    assert net[0] is net[2]


@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("prior", [GaussianPrior(), HierarchicalPrior()], ids=["gaussian", "hierarchical"])
def test_tied_weights_share_a_draw(way, prior):
    net = bayesianize(Tied(), prior)
    if way != "itself":
        net = copies(net)[way]
    x = torch.randint(7, (5, 3))
    trace = poutine.trace(net).get_trace(x)
    weights = [name for name in trace.stochastic_nodes if not name.endswith("_z")]
    assert sorted(weights) == ["head.weight", "middle.weight"]
    values = {name: trace.nodes[name]["value"] for name in weights}
    h = torch.tanh(nn.functional.linear(values["head.weight"][x].mean(-2), values["middle.weight"], net.middle.bias))
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], h @ values["head.weight"].mT)
    assert sorted(net.state_dict()) == ["middle.bias"]


def test_tied_linears_share_a_draw():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net = bayesianize(net)
    assert sites(net, torch.randn(5, 4)) == ["0.weight", "1.weight"]


def test_a_tied_weight_is_random_as_soon_as_one_user_is_selected():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert sites(bayesianize(net, include="1"), torch.randn(5, 4)) == ["1.weight"]


# ---- frozen and strangely stored parameters


def test_frozen_parameters_stay_frozen():
    net = small()
    net[0].requires_grad_(False)
    model = bayesianize(net, include="3")
    before = model[0].weight.clone()
    for twin in (model, *copies(model).values()):
        trace = poutine.trace(twin).get_trace(torch.randn(5, 4))
        assert "0.weight" not in trace.nodes
        assert not any(parameter.requires_grad for parameter in twin[0].parameters())
        assert torch.equal(twin[0].weight, before)


def test_parameters_frozen_later_stay_frozen():
    model = bayesianize(small(), include="3")
    poutine.trace(model).get_trace(torch.randn(5, 4))
    model[0].requires_grad_(False)
    trace = poutine.trace(model).get_trace(torch.randn(5, 4))
    assert "0.weight" not in trace.nodes
    assert not model[0].weight.requires_grad


def test_a_frozen_parameter_can_be_thawed():
    net = small()
    net[0].requires_grad_(False)
    model = bayesianize(net, include="3")
    model[0].requires_grad_(True)
    assert "0.weight" in poutine.trace(model).get_trace(torch.randn(5, 4)).nodes


@pytest.mark.parametrize("before", [True, False])
def test_parameters_in_another_memory_format_are_the_ones_that_pyro_trains(before):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    if before:
        net.to(memory_format=torch.channels_last)
    net = bayesianize(net, include="2").to(memory_format=torch.channels_last)
    poutine.trace(net).get_trace(torch.randn(2, 3, 5, 5))
    assert pyro.get_param_store()["0.weight"] is net[0].weight


# ---- include and exclude


def chosen(**options):
    net = bayesianize(Nested(), **options)
    return sites(net, torch.zeros(5, 3, dtype=torch.long))


FIRST, SECOND, HEAD = "parts.list.0.weight", "parts.list.1.0.weight", "parts.head.weight"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "parts.head"}, [HEAD]),
        ({"include": "parts.head.weight"}, [HEAD]),
        ({"include": "parts.list"}, [FIRST, SECOND]),
        ({"include": "*.list.*"}, [FIRST, SECOND]),
        ({"include": ["parts.list.0", "parts.head"]}, [FIRST, HEAD]),
        ({"include": nn.Linear}, [FIRST, SECOND, HEAD]),
        ({"include": lambda name, module: module.out_features == 2}, [HEAD]),
        ({"exclude": "parts.head"}, [FIRST, SECOND]),
        ({"exclude": lambda name, module: False}, [FIRST, SECOND, HEAD]),
        ({"exclude": ("*.0",)}, [HEAD]),
        ({"include": "parts.list", "exclude": "parts.list.1"}, [FIRST]),
    ],
)
def test_selection(options, expected):
    assert chosen(**options) == expected


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_lists_the_names(argument):
    with pytest.raises(ValueError, match=rf"(?s)\b{argument}\b.*parts\.list\.0"):
        chosen(**{argument: ["parts.head", "fc"]})


def test_a_type_that_matches_nothing():
    with pytest.raises(ValueError, match=r"\binclude\b"):
        chosen(include=nn.Conv2d)


@pytest.mark.parametrize("rule", [[3], 3])
def test_a_rule_of_the_wrong_kind(rule):
    with pytest.raises(TypeError, match=r"\binclude\b"):
        chosen(include=rule)


def test_nothing_left():
    with pytest.raises(ValueError, match=r"\bexclude\b"):
        chosen(exclude="*")


def test_no_weight_at_all():
    with pytest.raises(ValueError):
        bayesianize(nn.Sequential(nn.ReLU()))


def test_two_calls_give_two_priors():
    net = bayesianize(bayesianize(small(), GaussianPrior(0.1), include="0"), HierarchicalPrior())
    trace = poutine.trace(net).get_trace(torch.randn(5, 4))
    assert trace.stochastic_nodes == ["0.weight", "3.weight_z", "3.weight"]
    assert bool((trace.nodes["0.weight"]["fn"].base_dist.scale == 0.1).all())


# ---- errors


def test_already_bayesian():
    with pytest.raises(ValueError):
        bayesianize(bayesianize(small()))


def test_lazy_modules():
    with pytest.raises(ValueError, match=r"\b0\.weight\b"):
        bayesianize(nn.Sequential(nn.LazyLinear(3)))


def test_a_lazy_module_that_has_seen_data_is_fine():
    net = nn.Sequential(nn.LazyLinear(3))
    net(torch.randn(2, 4))
    assert sites(bayesianize(net), torch.randn(5, 4)) == ["0.weight"]


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_computed_weights(wrap):
    net = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"\b0\.weight\b"):
        bayesianize(net)
    bayes = bayesianize(net, exclude="0")
    assert sites(bayes, torch.randn(5, 4)) == ["1.weight"]
    x = torch.randn(5, 4)
    torch.testing.assert_close(bayes[0](x), net[0](x))


def test_pruned_weights():
    with pytest.raises(ValueError, match=r"\bweight\b"):
        bayesianize(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5))


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        (lambda: bayesianize(torch.randn(3)), TypeError, "net"),
        (lambda: bayesianize(small(), 1.0), TypeError, "prior"),
        (lambda: bayesianize(small(), GaussianPrior), TypeError, "prior"),
        (lambda: bayesianize(small(), torch.distributions.Laplace(0.0, 1.0)), TypeError, "prior"),
        (lambda: bayesianize(small(), pyro.distributions.Gamma(1.0, 1.0)), ValueError, "prior"),
        (lambda: bayesianize(small(), pyro.distributions.Normal(torch.zeros(2), 1.0)), ValueError, "prior"),
        (lambda: bayesianize(torch.compile(small())), ValueError, "net"),
    ],
)
def test_bad_arguments(call, error, argument):
    with pytest.raises(error, match=rf"\b{argument}\b"):
        call()


def test_a_failure_leaves_the_network_as_it_was():
    net = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"\b1\.weight\b"):
        bayesianize(net, inplace=True)
    assert type(net) is nn.Sequential
    assert isinstance(net[0].weight, nn.Parameter)


def test_own_samples_of_a_network_are_kept():
    net = PyroModule[nn.Sequential](PyroModule[nn.Linear](4, 2))
    net[0].bias = PyroSample(pyro.distributions.Normal(0.0, 1.0).expand([2]).to_event(1))
    assert sorted(sites(bayesianize(net), torch.randn(5, 4))) == ["0.bias", "0.weight"]


def test_weights_are_declared_whole():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(-3), nn.Linear(8, 3))
    model = Classifier(bayesianize(net), num_data=20)
    shapes = {name: (site["fn"].batch_shape, site["fn"].event_dim) for name, site in model.latent_sites().items()}
    assert shapes == {"net.0.weight": ((), 4), "net.2.weight": ((), 2)}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(3, 4), nn.Linear(4, 1), use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_activation_checkpoints_raise_in_training_only(use_reentrant):
    model = vsd.nn.Regressor(bayesianize(Checkpointed(use_reentrant)), num_data=10)
    guide, x = vsd.VSDGuide(model), torch.randn(10, 3)
    assert vsd.predict(model, guide, x, num_samples=3, coherent=False).mean.isfinite().all()
    with pytest.raises(ValueError, match=r"net\.second\.weight"):
        vsd.VSD_ELBO()(model, guide)(x, torch.randn(10)).backward()


def test_a_checkpoint_around_the_whole_model_has_the_same_gradients():
    model = vsd.nn.Regressor(bayesianize(nn.Linear(3, 1)), num_data=10)
    guide, x, y = vsd.VSDGuide(model), torch.randn(10, 3), torch.randn(10)
    loss, gradients = vsd.VSD_ELBO()(model, guide.setup(x, y)), []
    for call in (loss, lambda *args: checkpoint(loss, *args, use_reentrant=False)):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(call(x, y), list(guide.parameters())))
    torch.testing.assert_close(*gradients)
