"""Any network, Bayesian: its weights become sample sites with priors, the network itself stays as it is."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from pyro_vsd.distributions.layers import MODULES, layer_of
from pyro_vsd.nn.priors import GaussianPrior, Prior, as_prior

__all__ = ["BayesianNetwork", "Candidate", "Selector", "bayesianize", "candidates", "select"]

# Methods of transformers and peft that use the network's own weights: neither the posterior's mean nor a draw.
_OF_MEAN = ("generate", "merge_adapter", "merge_and_unload", "push_to_hub", "save_pretrained")

Rule = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Selector = Rule | Iterable[Rule]


def bayesianize(
    net: nn.Module,
    prior: Prior | torch.distributions.Distribution = GaussianPrior(1.0),  # noqa: B008 (frozen)
    include: Selector | None = None,
    exclude: Selector | None = None,
    inplace: bool = False,
) -> "BayesianNetwork":
    r"""Makes the weights of a network random: each becomes a Pyro sample site named after its path.

    Weights of ``nn.Linear``, ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d`` at any depth become sites. All else
    stays a parameter and is trained as such: biases, norms, embeddings, the weights of recurrent layers, and in
    ``nn.MultiheadAttention`` the input projection (``in_proj_weight``); its ``out_proj`` is a Linear and becomes a
    site. Where the noise acts:

    =========================  ========================  ======================================================
    layer                      weight                    noise units
    =========================  ========================  ======================================================
    ``Linear``                 ``(out, in)``             inputs, one noise vector per example
    ``Conv*d``                 ``(out, in/groups, …)``   output channels (``VSDGuide(conv_noise="in")``: inputs)
    ``ConvTranspose*d``        ``(in, out/groups, …)``   output channels (``VSDGuide(conv_noise="in")``: inputs)
    attention's ``out_proj``   ``(out, in)``             inputs, one noise vector for the batch
    =========================  ========================  ======================================================

    (``nn.Linear.weight`` is the paper's Θ, which is ``K × Q``, transposed.)

    **Layers keep their classes.** In a call the draws take the place of the weights; outside of one ``layer.weight``
    is the weight the network came with, a buffer that moves with ``.to()`` and is not part of ``state_dict``.

    **Turning a trained network Bayesian** is the same line: the guide's Θ starts at the weights the network comes
    with.

    **Frozen parameters** (``requires_grad=False``) stay as they are: a frozen weight does not become a site. Parameters
    that are frozen later are not trained. (Pyro alone would train them.)

    **Shared weights.** A module used twice has one site. A parameter that several modules share (tied weights,
    an embedding and the output layer for instance) becomes one site as soon as one of its layers is selected; the
    others use the same draw. The site is named after the last path that leads to the module, as Pyro does.

    :param net: the network; left untouched unless ``inplace``.
    :param prior: a :class:`GaussianPrior` or :class:`HierarchicalPrior` (which adds a site ``<path>.weight_z``), or any
        distribution of a number, such as ``dist.Laplace(0.0, 1.0)``, for each entry. The default objective replaces
        zero-mean Gaussian priors; others need ``VSD_ELBO(prior="model")``.
    :param include: which layers, all by default: a shell pattern (``fnmatch``) for the path of the layer, of its
        weight or of a module above it (``"fc*"``, ``"layer1"``, ``"blocks.*.mlp.*"``), a layer type (``nn.Linear``),
        a function ``(path, module) -> bool``, or a list of these.
    :param exclude: which layers to leave out, written the same way.
    :param inplace: uses ``net`` itself, whose weights become buffers, instead of a copy.
    :returns: the network in a :class:`BayesianNetwork`. Calling it twice with different ``include`` gives layers
        different priors: weights that are sites already keep theirs.

    >>> net = vsd.nn.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), exclude="0")
    >>> trace = pyro.poutine.trace(net).get_trace(torch.ones(5, 4))
    >>> trace.stochastic_nodes
    ['2.weight']
    >>> sorted(net.state_dict())
    ['0.bias', '0.weight', '2.bias']
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be an nn.Module, not {type(net).__name__}.")
    if isinstance(net, torch.jit.ScriptModule) or hasattr(net, "_orig_mod"):
        raise ValueError(
            f"net is a scripted or compiled module ({type(net).__name__}). Make the network Bayesian first."
        )
    prior = as_prior(prior)
    layers = _trainable(candidates(net))
    if not layers and any(isinstance(module, BayesianNetwork) for module in net.modules()):
        raise ValueError("net: all its weights are sites already.")
    chosen = select(layers, include, exclude)
    for candidate in chosen:
        _check_layer(candidate)
    if not inplace:
        positions = {id(c.layer): i for i, c in enumerate(layers)}
        wanted = [positions[id(c.layer)] for c in chosen]
        net = copy.deepcopy(net)
        layers = _trainable(candidates(net))
        chosen = [layers[i] for i in wanted]
    network = net if isinstance(net, BayesianNetwork) else BayesianNetwork(net)
    network.add_sites(chosen, prior)
    return network


@dataclass(frozen=True)
class WeightSite:
    """A weight that is a sample site.

    :ivar name: its path, the name of the site inside the network.
    :ivar keys: all paths of the tensor, where draws are put.
    :ivar noise_dim: the axis of the noise units; for convolutions ``{"out": axis, "in": axis}``.
    :ivar scale_dim: the axis along which z of a hierarchical prior runs.
    """

    name: str
    keys: tuple[str, ...]
    prior: Any
    noise_dim: Any
    scale_dim: int


class BayesianNetwork(PyroModule):
    """A network whose chosen weights are drawn in each call: what :func:`bayesianize` returns.

    The network is used as it is. It shares its children, parameters and buffers with this module, so that names,
    ``.to``, ``state_dict`` (without the random weights) and ``net.fc1`` or ``net[0]`` are those of the network itself.
    Weights are drawn where this module is called. Its parts and the other methods of the network use the weights that
    the network came with; inside a model that warns.

    :ivar network: the network.
    :ivar weight_sites: the random weights.

    >>> net = vsd.nn.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> [site.name for site in net.weight_sites], type(net[0]) is nn.Linear
    (['0.weight', '2.weight'], True)
    >>> net(torch.ones(5, 4)).shape  # weights drawn from the prior
    torch.Size([5, 2])
    """

    network: nn.Module
    weight_sites: list[WeightSite]
    _fixed_priors: dict[str, tuple[Tensor, Any, Any]]

    def __init__(self, network: nn.Module):
        super().__init__()
        own = self.__dict__
        own["network"] = network
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = network.__dict__[name]
        self.training = network.training
        own["weight_sites"] = []
        own["_fixed_priors"] = {}
        self._pyro_set_supermodule("", self._pyro_context)

    def add_sites(self, chosen: "list[Candidate]", prior: Prior) -> None:
        """Makes the weights of layers random, each with every use of that parameter in the network."""
        users: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in self.network.named_modules():
            for name, parameter in module._parameters.items():
                users.setdefault(id(parameter), []).append((path, module, name))
        for candidate in chosen:
            weight, row = candidate.layer._parameters.get("weight"), layer_of(candidate.layer)
            if weight is None:  # an earlier layer has taken it: shared
                continue
            assert row is not None
            init, rank, places = weight.detach(), weight.dim(), users[id(weight)]
            for _, module, name in places:
                del module._parameters[name]
                module.register_buffer(name, init, persistent=False)
            axes: Any = {way: row.noise_dim(rank, way) for way in ("out", "in")}
            self.weight_sites.append(
                WeightSite(
                    name=_join(candidate.paths[-1], "weight"),
                    keys=tuple(_join(path, name) for path, _, name in places),
                    prior=prior,
                    noise_dim=axes if row.convolution else axes["in"],
                    scale_dim=axes[getattr(prior, "channels", "out")],
                )
            )
        order = {path: i for i, (path, _) in enumerate(self.network.named_modules(remove_duplicate=False))}
        self.weight_sites.sort(key=lambda site: order[site.name.rpartition(".")[0]])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.draw_weights()
        prefix = f"{self._pyro_name}." if self._pyro_name else ""
        for name, parameter in self.network.named_parameters():
            # Pyro's store would thaw what is frozen, and train a contiguous copy of what is not contiguous.
            if not parameter.requires_grad or name.endswith("_unconstrained"):
                continue
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
            pyro.param(prefix + name, parameter)
        if self.network.training != self.training:
            self.network.training = self.training
        return functional_call(self.network, tensors, args, kwargs, tie_weights=False)

    def draw_weights(self) -> dict[str, Tensor]:
        """A draw of every weight by ``pyro.sample``, by its paths in the network; one draw for all calls of the network
        in a call of the model."""
        tensors: dict[str, Tensor] = {}
        context, prefix = self._pyro_context, f"{self._pyro_name}." if self._pyro_name else ""
        for site in self.weight_sites:
            full = prefix + site.name
            value = context.get(full)
            if value is None:
                value = self._draw(site, full)
                context.set(full, value)
            for key in site.keys:
                tensors[key] = value
        return tensors

    def _draw(self, site: WeightSite, full: str) -> Tensor:
        try:
            init = self.network.get_buffer(site.keys[0])
        except AttributeError:
            raise ValueError(
                f"{full}: its layer was replaced after bayesianize. Make the new network Bayesian instead."
            ) from None
        stated: dict[str, Any] = {"noise_dim": site.noise_dim, "init": init}
        fixed = self._fixed_priors.get(site.name)
        if fixed is None or fixed[0] is not init:  # new, or moved by .to()
            scales = site.prior.scales(init, site.scale_dim)
            prior = site.prior.weight(init, site.scale_dim) if scales is None else None
            fixed = self._fixed_priors[site.name] = (init, prior, scales)
        _, prior, scales = fixed
        infer: Any = {"vsd": stated}
        if scales is not None:
            stated["z"] = f"{full}_z"
            z = pyro.sample(stated["z"], scales)
            prior = site.prior.weight(init, site.scale_dim, z)
        value: Tensor = pyro.sample(full, prior, infer=infer)
        return value

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        """Names all Pyro modules inside by their paths, also those below plain modules."""
        self._pyro_name, self._pyro_context = name, context
        for path, module in self.network.named_modules():
            if isinstance(module, BayesianNetwork):
                module._pyro_set_supermodule(_join(name, path), context)
            elif isinstance(module, PyroModule):
                module._pyro_name, module._pyro_context = _join(name, path), context

    def train(self, mode: bool = True) -> "BayesianNetwork":
        self.network.train(mode)  # which may be a method of the user's own
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            found = super().__getattr__(name)
        except AttributeError:
            if "network" not in self.__dict__:
                raise
            found = getattr(self.network, name)
        if name in _OF_MEAN and self.weight_sites:
            raise ValueError(
                f"net.{name} would use the weights that the network came with. Call it on the trained network: "
                f"vsd.nn.mean_network(model, guide).{name}."
            )
        part = isinstance(found, nn.Module) or getattr(found, "__self__", None) is self.network
        if part and self._pyro_context.active and self.weight_sites:
            warnings.warn(
                f"{name!r} of a Bayesian network is used on its own, with the weights that the network came with. Call "
                "the network itself, or make the parts that you call Bayesian one by one.",
                stacklevel=2,
            )
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "network" in own and name not in own and name in self.network.__dict__:
            setattr(self.network, name, value)  # an attribute of the user's own, which its forward reads
        else:
            super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        return cast(Any, self.network)[index]

    def __iter__(self) -> Any:
        return iter(cast(Any, self.network))

    def __len__(self) -> int:
        return len(cast(Any, self.network))

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fixed_priors": {}}

    def __repr__(self) -> str:
        return f"BayesianNetwork(sites={[site.name for site in self.weight_sites]},\n{self.network!r})"


# ---- which layers


class Candidate(NamedTuple):
    """A layer that may become Bayesian, with every path that leads to it."""

    layer: nn.Module
    paths: tuple[str, ...]

    @property
    def site(self) -> str:
        """The path of the weight, for messages."""
        return _join(self.paths[0], "weight")


def candidates(net: nn.Module) -> list[Candidate]:
    """Layers of a kind that can be Bayesian and are not yet, each once, in the order of the network."""
    network = net.network if isinstance(net, BayesianNetwork) else net
    random = {
        id(module.network.get_submodule(key.rpartition(".")[0]))
        for module in net.modules()
        if isinstance(module, BayesianNetwork)
        for site in module.weight_sites
        for key in site.keys
    }
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        layer = module.network if isinstance(module, BayesianNetwork) else module
        taken = id(layer) in random or "weight" in module.__dict__.get("_pyro_samples", ())
        if isinstance(layer, MODULES) and not taken:
            found.setdefault(id(layer), (layer, []))[1].append(path)
    return [Candidate(module, tuple(paths)) for module, paths in found.values()]


def _trainable(layers: list[Candidate]) -> list[Candidate]:
    weights = [layer.layer._parameters.get("weight") for layer in layers]
    return [layer for layer, weight in zip(layers, weights, strict=True) if weight is None or weight.requires_grad]


def select(layers: list[Candidate], include: Selector | None, exclude: Selector | None) -> list[Candidate]:
    """The layers that some rule of ``include`` takes (all, without one) and no rule of ``exclude`` does."""
    chosen = layers
    if include is not None:
        chosen = _matches("include", layers, include)
    if exclude is not None:
        left_out = {id(c.layer) for c in _matches("exclude", layers, exclude)}
        chosen = [c for c in chosen if id(c.layer) not in left_out]
    if not chosen:
        raise ValueError(
            f"net: no weight is left to become Bayesian with include={include!r} and exclude={exclude!r}. "
            f"{_choices(layers)}"
        )
    return chosen


def _matches(argument: str, layers: list[Candidate], selector: Selector) -> list[Candidate]:
    if isinstance(selector, (str, type)) or callable(selector) or not isinstance(selector, Iterable):
        selector = [selector]
    taken: set[int] = set()
    for rule in selector:
        if not (isinstance(rule, (str, type)) or callable(rule)):
            raise TypeError(
                f"{argument} must be a pattern, a layer type, a function (path, module) -> bool, or a list of these, "
                f"not {rule!r}."
            )
        hits = {id(c.layer) for c in layers if any(_takes(rule, path, c.layer) for path in c.paths)}
        # A function may well say no to all; a pattern or type that matches nothing is a slip.
        if not hits and isinstance(rule, (str, type)):
            shown = repr(rule) if isinstance(rule, str) else rule.__name__
            raise ValueError(f"{argument}: {shown} matches no layer. {_choices(layers)}")
        taken |= hits
    return [c for c in layers if id(c.layer) in taken]


def _takes(rule: Any, path: str, layer: nn.Module) -> bool:
    if isinstance(rule, type):
        return isinstance(layer, rule)
    if not isinstance(rule, str):
        return bool(rule(path, layer))
    parts = path.split(".") if path else []
    above = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, rule) for name in [*above, _join(path, "weight")])


def _choices(layers: list[Candidate]) -> str:
    if not layers:
        return "The network has no Linear or convolution layer whose weight is a parameter that is trained."
    names = ", ".join(repr(path) for c in layers for path in c.paths)
    return f"Layers: {names}. Frozen and quantised layers are left as they are."


def _check_layer(candidate: Candidate) -> None:
    layer, site = candidate.layer, candidate.site
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(f"{site} belongs to a lazy module that has not seen data. Call the network on a batch first.")
    if parametrize.is_parametrized(layer, "weight") or "weight" not in layer._parameters:
        raise ValueError(
            f"{site} is computed (by a parametrization such as weight_norm or spectral_norm, or by pruning), not a "
            f"plain parameter. Remove that first, or leave the layer out: exclude={candidate.paths[0]!r}."
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
