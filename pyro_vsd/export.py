"""A trained model as a plain module with its draws inside, for ``torch.export`` and ONNX.

A draw of the noise is K numbers a layer. So S draws are constants beside the weights, which are stored once.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_vsd._utils import check_choice, check_integer, map_tensors, mix_seed, num_rows, take_rows, tensors_in
from pyro_vsd.distributions.checks import unit_shaped
from pyro_vsd.distributions.lazy_weight import Draw, LazyWeight, NoiseMismatchError, NoiseSource
from pyro_vsd.ensemble import Ensemble
from pyro_vsd.infer.predictive import _Draws
from pyro_vsd.nn import BayesianNetwork, BinaryClassifier, Classifier, Regressor
from pyro_vsd.nn.export import network_of, plain_copy, site_name
from pyro_vsd.nn.likelihoods import network_output, split_moments
from pyro_vsd.prediction import Calibration

__all__ = ["DrawnNetwork", "Sampler", "onnx", "sampler"]

_NOISES = ("matched", "mirrored", "random")
# A protocol buffer holds at most two gigabytes; larger weights go to a file beside it.
_MOST_BYTES = 2**31 - 2**24


def sampler(
    model: nn.Module | Ensemble,
    guide: Any = None,
    draws: int = 32,
    seed: int = 0,
    noise: str = "matched",
    calibration: Calibration | None = None,
) -> "Sampler":
    r"""The predictive distribution as a plain module: no Pyro in its call, nothing random, ready for ``torch.export``
    and ONNX.

    The draws are made here and kept as constants, ``(draws, K)`` numbers for each weight. A call gives

    ==============================  ==============================================================================
    model                           a dict with
    ==============================  ==============================================================================
    ``Classifier``                  ``probs (B, C)``, ``samples (draws, B, C)``
    ``BinaryClassifier``            ``probs (B, 2)``, ``samples (draws, B, 2)``; ``(…, L, 2)`` for L labels
    ``Regressor``                   ``mean`` and ``stddev`` ``(B,)`` or ``(B, D)``, ``samples``: each draw's mean
    other likelihoods, a network    ``samples (draws, B, …)``: each draw's output of the network
    ==============================  ==============================================================================

    ======================  ======================================================================================
    ``noise``               the draws
    ======================  ======================================================================================
    ``"matched"``           shifted and rotated so that their mean and covariance are those of the noise, as far as
                            so many draws can have them; about half the error of as many random ones
    ``"mirrored"``          pairs ``1 + e`` and ``1 - e``
    ``"random"``            those of ``vsd.predict(model, guide, x, num_samples=draws, seed=seed)``
    ======================  ======================================================================================

    All draws pass through the network at once, each with a copy of the rows. The first call finds out whether that is
    possible. It is not where the examples that a weight is applied to are not the rows, where a weight is used in other
    ways than in a layer (a tied embedding), or where rows depend on each other. Then draws pass one by one, and an
    exported program has a copy of the network for each draw. A call holds the activations of draws × rows.

    :param model: an observation model of ``vsd.nn``, or a network from :func:`~pyro_vsd.nn.bayesianize`; or a
        :class:`~pyro_vsd.Ensemble` of them, with its weights and factors.
    :param guide: its :class:`~pyro_vsd.VSDGuide`, trained; an ensemble has its own.
    :param draws: the number of draws; those of an ensemble are spread over its members.
    :param seed: of the draws.
    :param noise: see the table.
    :param calibration: what :func:`pyro_vsd.calibrate` found, as in ``vsd.predict``.
    :returns: a module that is called as ``module(x)``, with a tuple or a dict for networks of several inputs. It is
        always in evaluation mode; weights are copies.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> module = vsd.export.sampler(model, vsd.VSDGuide(model))
    >>> {name: tuple(value.shape) for name, value in module(torch.randn(5, 4)).items()}
    {'probs': (5, 3), 'samples': (32, 5, 3)}
    """
    check_integer("draws", draws, 1)
    check_integer("seed", seed)
    check_choice("noise", noise, _NOISES)
    if isinstance(model, Ensemble):
        return _of_ensemble(model, guide, int(draws), int(seed), noise, calibration)
    if guide is None:
        raise TypeError("guide must be the model's VSDGuide; only an Ensemble goes without.")
    if not isinstance(calibration, Calibration | None):
        raise TypeError(f"calibration must be what vsd.calibrate returns, not {calibration!r}.")
    if calibration is None:
        return Sampler([_drawn_network(model, guide, int(draws), int(seed), noise)], _kind(model))
    with guide.noise_times(calibration.noise):
        drawn = _drawn_network(model, guide, int(draws), int(seed), noise)
    return Sampler([drawn], _kind(model), factors=[_factor(calibration, _kind(model))])


def _of_ensemble(
    ensemble: Ensemble, guide: Any, draws: int, seed: int, noise: str, calibration: Calibration | None
) -> "Sampler":
    if guide is not None or calibration is not None:
        raise ValueError("guide and calibration do not go with an Ensemble, which has its own.")
    check_integer("draws", draws, len(ensemble))
    kind = _kind(ensemble.members[0][0])
    counts = ensemble.shares(draws)
    members = [
        _drawn_network(model, own, count, mix_seed(seed, m), noise)
        for m, ((model, own), count) in enumerate(zip(ensemble.members, counts, strict=True))
    ]
    factors = None if kind == "outputs" else ensemble.stacking.factors.tolist()
    return Sampler(members, kind, weights=ensemble.weights.tolist(), factors=factors)


def _factor(calibration: Calibration, kind: str) -> float:
    """Of the logits or of σ; raises where the other one is not 1."""
    used, other = ("scale", "temperature") if kind == "numbers" else ("temperature", "scale")
    if getattr(calibration, other) != 1 or (kind == "outputs" and calibration.temperature != 1):
        raise ValueError(f"calibration {calibration} does not go with this model.")
    return float(getattr(calibration, used))


def onnx(
    model: nn.Module | Ensemble,
    guide: Any,
    path: str | PathLike[str],
    example: Any,
    draws: int = 32,
    seed: int = 0,
    noise: str = "matched",
    calibration: Calibration | None = None,
) -> None:
    """Writes :func:`sampler` to an ONNX file: a fixed program without random numbers, whose outputs are named as the
    sampler's. Its input is ``x``; of a tuple ``x_0``, ``x_1`` and so on, of a dict ``x_`` and the key. The first
    dimension is free.

    Needs the extra ``export``. One file, or two above two gigabytes.

    :param guide: the model's; ``None`` for an ensemble.
    :param path: of the file.
    :param example: an input of the model, of one or more rows: its first row shows shapes and dtypes.

    The other parameters are those of :func:`sampler`.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ImportError("vsd.export.onnx needs onnxscript: pip install 'pyro_vsd[export]'.")
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path must be the name of a file, not {path!r}.")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder {Path(path).parent}.")
    if not num_rows(example, "example"):
        raise ValueError("example has no rows.")
    _write_onnx(sampler(model, guide, draws, seed, noise, calibration), path, example)


def _write_onnx(module: "Sampler", path: str | PathLike[str], example: Any) -> None:
    # Two rows: torch.export takes a dimension of size 1 for a constant.
    example = take_rows(example, torch.zeros(2, dtype=torch.long))
    with torch.no_grad():
        names = list(module(example))
    batch = torch.export.Dim("batch", min=1)
    shapes = map_tensors(lambda t: {0: batch} if t.dim() else None, example)  # type: ignore[arg-type, return-value]
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    options: Any = {"output_names": names, "dynamic_shapes": (shapes,), "external_data": size > _MOST_BYTES}
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=(shapes,), strict=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "# The axis name")  # all inputs share theirs
            torch.onnx.export(program, f=path, dynamo=True, verbose=False, **options)
    except OSError:  # of the file
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"model: torch cannot turn its network into an ONNX program: {reason}") from error


# ---- draws


def _drawn_network(model: nn.Module, guide: Any, draws: int, seed: int, noise: str) -> "DrawnNetwork":
    """The network of a model with draws from its guide, and σ where the model has one for all rows."""
    if not hasattr(guide, "draw_posteriors"):
        raise TypeError(f"guide must be a vsd.VSDGuide, whose draws are few numbers, not {type(guide).__name__}.")
    net = network_of(model)
    if not guide.sites:
        raise ValueError("guide: it has no parameters yet. Train it or load a state first.")
    with torch.no_grad():
        posteriors = guide.draw_posteriors()
        if posteriors is None:
            raise ValueError("guide: hooks, plates, and a forward of your own do not export.")
        found = [
            (site_name(part, site.name), [f"{path}.{key}" if path else key for key in site.keys], part, site)
            for path, part in net.named_modules()
            if isinstance(part, BayesianNetwork)
            for site in part.weight_sites
        ]
        names = [name for name, *_ in found]
        for name, _, part, site in found:
            shape = part.network.get_buffer(site.keys[0]).shape
            if name not in posteriors or posteriors[name].theta.shape != shape:
                wanted = f"{name!r} of shape {tuple(shape)}"
                raise ValueError(f"guide: it has no weight {wanted}. Is it the guide of a different model?")
        others = set(posteriors) - {*names, *(f"{name}_z" for name in names), "sigma"}
        if others:
            raise ValueError(f"model: {sorted(others)} are no weights from vsd.nn.bayesianize.")
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if any(isinstance(part, norms) and part.running_mean is None for part in net.modules()):
            raise ValueError("model: it has batch norm without running statistics, so that rows depend on each other.")
        drawn = _ChosenDraws(posteriors, guide.sites, seed, draws, noise)
        drawn.fill(draws)
        network = plain_copy(net, {name: posteriors[name].theta for name in names})
        weights = [_Weight(name, keys, guide.noise_dim(name), guide.example_dim) for name, keys, *_ in found]
        return DrawnNetwork(network, weights, [drawn.values[name] for name in names], _sigma(model, drawn, draws))


def _sigma(model: nn.Module, drawn: "_ChosenDraws", draws: int) -> Tensor | None:
    """σ of every draw, ``(draws, 1, 1 or D)``, of a regressor whose rows share it."""
    if not isinstance(model, Regressor) or model.noise == "heteroscedastic":
        return None
    if model.noise == "latent":
        sigma = drawn.values["sigma"]
    else:
        like = next(iter(drawn.values.values()))
        number = model.log_sigma.exp() if model.noise == "learned" else like.new_tensor(model.noise)
        sigma = number.expand(draws, *number.shape)
    return sigma.reshape(draws, 1, -1)


class _ChosenDraws(_Draws):
    """Draws that are chosen well, all at once."""

    def __init__(self, posteriors: dict[str, Any], sites: dict[str, Any], seed: int, draws: int, noise: str):
        super().__init__(posteriors, sites, seed)
        self.size, self.noise = draws, noise

    def _normals(self, name: str, drawn: int, like: Tensor) -> Tensor:
        if self.noise == "mirrored":
            half = super()._normals(name, -(-drawn // 2), like)
            return torch.cat([half, -half])[:drawn]
        normals = super()._normals(name, drawn, like)
        return matched(normals) if self.noise == "matched" else normals


def matched(normals: Tensor) -> Tensor:
    r"""The points ``(S, K)`` nearest to these whose mean is zero and whose covariance is the identity; where K is
    S or more, the identity's multiple on the S - 1 dimensions that they span, with trace K.

    >>> points = matched(torch.randn(8, 3))
    >>> torch.allclose(points.mT @ points / 8, torch.eye(3), atol=1e-6)
    True
    """
    S, K = normals.shape
    rank = min(S - 1, K)  # of a single point 0: it is the mean
    U, _, V = torch.linalg.svd(normals - normals.mean(0), full_matrices=False)
    return U[:, :rank] @ V[:rank] * (S * K / max(rank, 1)) ** 0.5


# ---- the modules


class _Weight(NamedTuple):
    """A random weight: its site, its paths in the plain network, and where its noise acts."""

    site: str
    keys: list[str]
    noise_dim: int
    example_dim: int


class DrawnNetwork(nn.Module):
    """A plain network and draws of its weights: outputs ``(draws, B, …)``.

    :param network: the network at Θ.
    :param weights: its random weights.
    :param noise: of each weight ``z ⊙ ξ``, ``(draws, K)``.
    :param sigma: ``(draws, 1, 1 or D)``, or ``None``.
    """

    sigma: Tensor | None

    def __init__(self, network: nn.Module, weights: list[_Weight], noise: list[Tensor], sigma: Tensor | None = None):
        super().__init__()
        self.network, self.weights, self.draws = network.requires_grad_(False), weights, len(noise[0])
        for i, values in enumerate(noise):
            self.register_buffer(f"noise_{i}", values.clone())
        self.register_buffer("sigma", sigma)
        self.batched: bool | None = None  # found in the first call
        self.eval()

    def train(self, mode: bool = True) -> "DrawnNetwork":
        """Stays in evaluation mode."""
        return super().train(False)

    def forward(self, x: Any) -> Tensor:
        noise = [self.get_buffer(f"noise_{i}") for i in range(len(self.weights))]
        if self.batched is None and all(t.shape[0] for t in tensors_in(x) if t.dim()):
            self.batched = self._can_batch(x, noise)
        S = self.draws
        if not self.batched:
            return torch.stack([self._run(x, [n[s : s + 1] for n in noise]) for s in range(S)])
        out = self._run(_copies(x, S), noise)
        return out.reshape(S, out.shape[0] // S, *out.shape[1:])

    def _run(self, x: Any, noise: list[Tensor], uses: "list[_Uses] | None" = None) -> Tensor:
        values: dict[str, Tensor] = {}
        for i, (weight, given) in enumerate(zip(self.weights, noise, strict=True)):
            theta = self.network.get_parameter(weight.keys[0])
            drawn = _DrawnWeight(_FixedDraw(theta, given, weight, uses[i] if uses else _Uses([], [])))
            values.update(dict.fromkeys(weight.keys, drawn))

        def network(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.network, values, args, kwargs, tie_weights=False)

        out = network_output(network, x)
        return out.float() if out.dtype in (torch.bfloat16, torch.float16) else out

    def _can_batch(self, x: Any, noise: list[Tensor]) -> bool:
        """Whether the examples that each weight is applied to are the rows, and two draws at once give what they give
        one by one."""
        if self.draws == 1:
            return True
        one = take_rows(x, torch.zeros(1, dtype=torch.long))
        for rows in (1, 2):
            uses = [_Uses([], []) for _ in self.weights]
            self._run(_copies(one, rows), [n[:1] for n in noise], uses)
            if any(use.dense or any(n != rows for n in use.examples) for use in uses):
                return False
        if torch.compiler.is_compiling():  # there are no values to compare
            return True
        with torch.no_grad():
            both = self._run(_copies(one, 2), [n[:2] for n in noise])
            each = torch.cat([self._run(one, [n[i : i + 1] for n in noise]) for i in (0, 1)])
        return torch.allclose(both, each, rtol=1e-4, atol=1e-4 * float(each.abs().max()))


def _copies(x: Any, n: int) -> Any:
    """All rows n times."""
    return map_tensors(lambda t: t.unsqueeze(0).expand(n, *t.shape).flatten(0, 1) if t.dim() else t, x)


class Sampler(nn.Module):
    """The predictive distribution of :class:`DrawnNetwork`\\ s, a mixture: what :func:`sampler` returns.

    :param members: networks with their draws.
    :param kind: of the likelihood: ``"classes"``, ``"binary"``, ``"numbers"`` or ``"outputs"``.
    :param weights: of the members, with sum 1; equal by default.
    :param factors: for each member the temperature of its logits, or a factor of its σ; 1 by default.
    """

    weights: Tensor
    factors: Tensor | None

    def __init__(
        self,
        members: Sequence[DrawnNetwork],
        kind: str,
        weights: Sequence[float] | None = None,
        factors: Sequence[float] | None = None,
    ):
        super().__init__()
        self.members, self.kind = nn.ModuleList(members), kind
        weights = weights or [1 / len(members)] * len(members)
        like, draws = next(members[0].buffers()), torch.tensor([member.draws for member in members])
        shares = torch.tensor(weights, dtype=like.dtype) / draws
        self.register_buffer("weights", shares.repeat_interleave(draws).to(like))  # (draws,)
        each = None if factors is None else torch.tensor(factors).repeat_interleave(draws)
        self.register_buffer("factors", None if each is None else each.to(like))  # (draws,)

    def forward(self, x: Any) -> dict[str, Tensor]:
        outputs = torch.cat([member(x) for member in self.members])  # (draws, B, ...)
        if self.kind == "outputs":
            return {"samples": outputs}
        if outputs.dim() == 2:
            outputs = outputs.unsqueeze(-1)
        if self.kind == "numbers":
            return self._numbers(outputs)
        logits = outputs if self.factors is None else outputs / _each(self.factors, outputs)
        if self.kind == "classes":
            samples = logits.softmax(-1)
        else:
            if logits.shape[-1] > 1:  # several labels
                logits = logits.unsqueeze(-1)
            yes = logits.sigmoid()
            samples = torch.cat([1 - yes, yes], -1)
        return {"probs": self._average(samples), "samples": samples}

    def _numbers(self, outputs: Tensor) -> dict[str, Tensor]:
        sigmas: Any = [member.sigma for member in self.members]
        samples, sigma = split_moments(outputs) if sigmas[0] is None else (outputs, torch.cat(sigmas))
        if self.factors is not None:
            sigma = sigma * _each(self.factors, sigma)
        if samples.shape[-1] == 1:
            samples, sigma = samples.squeeze(-1), sigma.squeeze(-1)
        mean = self._average(samples)
        variance = self._average(sigma.square() + (samples - mean).square())
        return {"mean": mean, "stddev": variance.sqrt(), "samples": samples}

    def _average(self, values: Tensor) -> Tensor:
        """Over the draws."""
        return (values * _each(self.weights, values)).sum(0)


def _each(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each draw, beside values ``(draws, …)``."""
    return numbers.reshape(-1, *(1,) * (like.dim() - 1))


def _kind(model: nn.Module) -> str:
    for cls, kind in ((Classifier, "classes"), (BinaryClassifier, "binary"), (Regressor, "numbers")):
        if isinstance(model, cls) and type(model).likelihood is cls.likelihood:
            return kind
    return "outputs"


# ---- weights with known noise


class _Uses(NamedTuple):
    """How a weight was used: the numbers of examples that it was applied to, and dense uses."""

    examples: list[Any]
    dense: list[bool]


class _FixedDraw(Draw):
    """A draw whose noise is known, for as many copies of the rows as there are draws; it has no posterior.

    :param theta: Θ.
    :param noise: ``z ⊙ ξ``, ``(draws, K)``.
    """

    def __init__(self, theta: Tensor, noise: Tensor, weight: _Weight, uses: _Uses):
        self.theta, self.noise, self.noise_dim, self.uses = theta, noise, weight.noise_dim, uses
        self.source = NoiseSource(weight.site, weight.example_dim)
        self.scale, self.requires_grad, self.apply_dense = None, False, False
        self.event_shape, self.batch_shape, self.particles = theta.shape, torch.Size(), torch.Size()

    def rows(self, n: Any) -> Tensor:
        self.uses.examples.append(n)
        S, K = self.noise.shape
        return self.noise if S == 1 else self.noise.unsqueeze(1).expand(S, n // S, K).reshape(n, K)

    def dense(self) -> Tensor:
        self.uses.dense.append(True)
        if len(self.noise) > 1:
            raise NoiseMismatchError
        return self.theta * unit_shaped(self.noise[0], self.noise_dim, self.theta.dim())


class _DrawnWeight(LazyWeight):
    """A weight with known noise. In attention's output projection it has noise for each row."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward and isinstance(args[11], cls) and args[11].draw.noise_dim == -1:
            *before, weight, bias = args[:13]
            draw = weight.draw
            identity = torch.eye(*draw.theta.shape, dtype=draw.theta.dtype, device=draw.theta.device)
            # the attended values themselves, (positions, rows, E) or (positions, E)
            attended, scores = func(*[*before, identity, None, *args[13:]], **kwargs)
            noise = draw.rows(attended.shape[1] if attended.dim() == 3 else 1)
            return F.linear(attended * noise, draw.theta, bias), scores
        return super().__torch_function__(func, types, args, kwargs)
