"""Any network, Bayesian: its weights become sample sites with priors."""

import copy
from typing import Any

import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from pyro_vsd.nn.conversion import read_from, to_pyro
from pyro_vsd.nn.priors import GaussianPrior, Prior
from pyro_vsd.nn.selection import TRANSPOSED, Candidate, Selector, candidates, select
from pyro_vsd.nn.sites import ScaleSite, WeightSite, init_name, scale_name

__all__ = ["bayesianize"]


def bayesianize(
    net: nn.Module,
    prior: Prior = GaussianPrior(1.0),  # noqa: B008 (frozen)
    include: Selector | None = None,
    exclude: Selector | None = None,
    inplace: bool = False,
    conv_noise: str = "out",
) -> PyroModule:
    r"""Makes the weights of a network random: each becomes a Pyro sample site named after its path.

    Weights of ``nn.Linear``, ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d`` at any depth become sites. All else
    stays a parameter and is trained as such: biases, norms, embeddings, the weights of recurrent layers, and in
    ``nn.MultiheadAttention`` the input projection (``in_proj_weight``); its ``out_proj`` is a Linear and becomes a
    site. Where the noise acts:

    =========================  ========================  =============================================
    layer                      weight                    noise units
    =========================  ========================  =============================================
    ``Linear``                 ``(out, in)``             inputs, one noise vector per example
    ``Conv*d``                 ``(out, in/groups, …)``   output channels (``conv_noise="in"``: inputs)
    ``ConvTranspose*d``        ``(in, out/groups, …)``   output channels (``conv_noise="in"``: inputs)
    attention's ``out_proj``   ``(out, in)``             inputs, one noise vector for the batch
    =========================  ========================  =============================================

    (``nn.Linear.weight`` is the paper's Θ, which is ``K × Q``, transposed.)

    **Turning a trained network Bayesian** is the same line: the guide's Θ starts at the weights the network comes
    with. They are kept in buffers ``weight_init``, which move with ``.to()`` and are not part of ``state_dict``.

    **Frozen parameters** (``requires_grad=False``) stay as they are, frozen before or after: make the head of a frozen
    network Bayesian with ``include``. (Pyro alone would train them.)

    **Shared weights.** A module used twice has one site. A parameter that several modules share (tied weights,
    an embedding and the output layer for instance) becomes one site as soon as one of its layers is selected; the
    others read the same draw. The site is named after the last path that leads to the module, as Pyro does.

    :param net: the network; left untouched unless ``inplace``.
    :param prior: a :class:`GaussianPrior` or :class:`HierarchicalPrior`; the latter adds a site ``<path>.weight_z``.
    :param include: which layers, all by default: a shell pattern (``fnmatch``) for the path of the layer, of its
        weight or of a module above it (``"fc*"``, ``"layer1"``, ``"blocks.*.mlp.*"``), a layer type (``nn.Linear``),
        a function ``(path, module) -> bool``, or a list of these.
    :param exclude: which layers to leave out, written the same way.
    :param inplace: changes ``net`` itself.
    :param conv_noise: ``"out"`` or ``"in"``: the channels of convolutions that the noise acts on.
    :returns: the network as a ``PyroModule``. Calling it twice with different ``include`` gives layers different
        priors: weights that are sites already keep theirs.

    >>> import pyro
    >>> net = bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), exclude="0")
    >>> trace = pyro.poutine.trace(net).get_trace(torch.ones(5, 4))
    >>> trace.stochastic_nodes
    ['2.weight']
    >>> sorted(net.state_dict())
    ['0.bias', '0.weight', '2.bias']
    """
    _check_arguments(net, prior, conv_noise)
    layers = candidates(net)
    if not layers and any(module.__dict__.get("_pyro_samples") for module in net.modules()):
        raise ValueError("net: expected weights to make Bayesian, got a network whose weights are sites already.")
    chosen = select(layers, include, exclude)
    for candidate in chosen:
        _check_layer(candidate)
    if not inplace:
        positions = {id(c.layer): i for i, c in enumerate(layers)}
        wanted = [positions[id(c.layer)] for c in chosen]
        net = copy.deepcopy(net)
        layers = candidates(net)
        chosen = [layers[i] for i in wanted]
    users = _users(net)
    to_pyro(net)
    for candidate in chosen:
        layer: Any = candidate.layer
        if "weight" in layer._parameters:  # else an earlier layer has taken it: shared
            _make_site(layer, prior, conv_noise, users[id(layer._parameters["weight"])])
    assert isinstance(net, PyroModule)
    return net


def _make_site(layer: PyroModule, prior: Prior, conv_noise: str, users: list[tuple[Any, str]]) -> None:
    weight = layer._parameters["weight"]
    assert weight is not None
    init = weight.detach()
    noise_dim, input_dim = _axes(layer, init.dim(), conv_noise)
    hierarchical = prior.scales(init, noise_dim) is not None
    layer.weight = PyroSample(WeightSite("weight", prior, noise_dim, input_dim, hierarchical))
    layer.register_buffer(init_name("weight"), init, persistent=False)
    if hierarchical:
        setattr(layer, scale_name("weight"), PyroSample(ScaleSite("weight", prior, noise_dim)))
    for user, name in users:
        if user is not layer:
            read_from(user, name, layer, "weight")


def _axes(layer: nn.Module, rank: int, conv_noise: str) -> tuple[int, int | None]:
    """The axis of the noise units, and for convolutions that of the input channels."""
    if isinstance(layer, nn.Linear):
        return -1, None
    first, second = -rank, 1 - rank
    output, channels = (second, first) if isinstance(layer, TRANSPOSED) else (first, second)
    return (output if conv_noise == "out" else channels), channels


def _users(net: nn.Module) -> dict[int, list[tuple[Any, str]]]:
    """Who holds each parameter, and under which name."""
    users: dict[int, list[tuple[Any, str]]] = {}
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users


def _check_arguments(net: Any, prior: Any, conv_noise: str) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected an nn.Module, got {type(net).__name__}.")
    if isinstance(net, torch.jit.ScriptModule) or hasattr(net, "_orig_mod"):
        raise ValueError(
            f"net: expected an ordinary module, got a scripted or compiled one ({type(net).__name__}). Make the "
            "network Bayesian first."
        )
    if not (callable(getattr(prior, "weight", None)) and callable(getattr(prior, "scales", None))):
        raise TypeError(f"prior: expected a GaussianPrior or HierarchicalPrior, got {prior!r}.")
    if not isinstance(conv_noise, str) or conv_noise not in ("out", "in"):
        raise ValueError(f"conv_noise: expected 'out' or 'in', got {conv_noise!r}.")


def _check_layer(candidate: Candidate) -> None:
    layer, site = candidate.layer, candidate.site
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(
            f"{site}: expected a weight with a shape, got a lazy module that has not seen data. Call the network on "
            "a batch first."
        )
    if parametrize.is_parametrized(layer, "weight") or "weight" not in layer._parameters:
        raise ValueError(
            f"{site}: expected a plain parameter, got a weight that is computed (by a parametrization such as "
            "weight_norm or spectral_norm, or by pruning). Remove that first, or leave the layer out: "
            f"exclude={candidate.paths[0]!r}."
        )
