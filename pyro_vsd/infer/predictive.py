"""The predictive distribution, averaged over draws from a guide."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from pyro_vsd._utils import (
    Watch,
    base_distribution,
    call_arguments,
    check_integer,
    evaluation_mode,
    map_tensors,
    mix_seed,
    num_rows,
    split_target,
    take_rows,
    tensors_in,
    to_device,
)
from pyro_vsd.distributions import LazyWeight
from pyro_vsd.distributions import coherent as coherent_context
from pyro_vsd.distributions.lazy_weight import NoiseMismatchError, NoiseSource
from pyro_vsd.ops.noise import rotated_noise_
from pyro_vsd.prediction import Calibration, ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.prediction.collect import Collector, make_collector, row_distribution

__all__ = ["predict"]

# Where the caller names no batch size, a pass takes about a million numbers of input: enough to make its fixed cost
# small, little enough for the activations of a ResNet; and between 64 and 4096 rows.
_NUMBERS, _FEWEST, _MOST = 2**20, 64, 4096
# An integer is mostly the number of a word: the network makes a row of an embedding of it.
_PER_WORD = 64
# Where the inputs have at most so many numbers, several samples go through the network in one pass, which saves its
# fixed cost. With more, the copies cost more than that: each has its noise applied to activations, and not once to the
# weights. Such a pass has at most so many rows that activations stay in the cache.
_FEW_NUMBERS, _COPIES = 2**14, 1024
# The noise of this many samples is drawn at once, less where they take more than a million numbers.
_CHUNK = 256
# A progress bar appears after this many seconds.
_PATIENCE = 5.0


def predict(
    model: Any,
    guide: Any,
    *inputs: Any,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
    coherent: bool = True,
    keep_samples: bool = True,
    progress: bool | None = None,
    site: str | None = None,
    target: str | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    r"""The predictive distribution :math:`\frac1S \sum_s p(y \mid x, W_s)` of every row of the inputs.

    A sample is one draw of all weights, which all rows share: ``samples[s]`` is one sampled function. Its noise depends
    on the seed and on s alone, so that the prediction of a row depends neither on the other rows nor on ``batch_size``
    (up to rounding; amortised guides aside). A sample costs one pass of the network over the rows; if there are few of
    them, several samples share a pass. Small passes find out whether that is possible; what they found is kept with the
    guide.

    The model runs in evaluation mode and is put back. Working memory does not grow with ``num_samples``; what is kept
    for ``samples``, ``log_prob`` and ``quantile`` does (samples × rows × outputs) and can be turned off.

    :param model: a Pyro model, called as ``model(*inputs)``, without targets.
    :param guide: its guide, set up (trained or loaded).
    :param inputs: what the model takes: tensors whose first dimension counts the rows, several or a dict of them for
        networks of several inputs; other arguments are passed on. Or a ``DataLoader``: of each batch the last part is
        the target and left out, of a dict ``"labels"`` or ``"y"``; a batch of one part is the input.
    :param num_samples: draws per row.
    :param batch_size: rows of the network's input per pass, copies counted.
    :param seed: makes the prediction reproducible; by default a number from torch's global generator.
    :param coherent: ``False`` draws noise for each row of a sample anew. The Monte Carlo errors of the rows are then
        independent, and a prediction takes up to twice as long.
    :param keep_samples: whether to keep each sample's prediction.
    :param progress: a progress bar; by default one appears in a terminal after some seconds.
    :param site: the observed site, where the model has several.
    :param target: the key of the targets in a loader's dicts.
    :param calibration: what :func:`pyro_vsd.calibrate` found on held-out rows.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> vsd.predict(model, vsd.VSDGuide(model), torch.randn(5, 4), num_samples=10).probs.shape
    torch.Size([5, 3])
    """
    for name, value in (("model", model), ("guide", guide)):
        if not callable(value):
            advice = " An ensemble has a method of its own: ensemble.predict(x)." if hasattr(value, "members") else ""
            raise TypeError(f"{name} must be a function or a module, not {type(value).__name__}.{advice}")
    if hasattr(model, "prototype_trace"):
        raise TypeError("model is a guide. The model comes first: predict(model, guide, x).")
    check_integer("num_samples", num_samples, 1)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise TypeError(f"calibration must be what vsd.calibrate returns, or None, not {type(calibration).__name__}.")
    noise = 1.0 if calibration is None else calibration.noise
    if noise != 1 and not hasattr(guide, "noise_times"):
        raise ValueError(f"calibration has noise={noise:.3g}, and guide, a {type(guide).__name__}, has no such noise.")
    if hasattr(guide, "sites") and not guide.sites:
        raise ValueError(
            "guide: it has no parameters, since it has not seen its model's sites. Train it, call guide.setup(x, y), "
            "or load a state first."
        )
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    check_integer("seed", seed)
    seed = int(seed)  # NumPy's integers overflow
    if len(inputs) == 1 and _is_loader(inputs[0]):
        options: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size, "coherent": coherent}
        options |= {"keep_samples": keep_samples, "site": site, "calibration": calibration}
        return _of_loader(model, guide, inputs[0], target, seed, progress, options)
    arguments = call_arguments(model, inputs)
    rows = num_rows(arguments, "inputs")
    if not rows:
        raise ValueError("inputs must have at least one row.")
    devices = {p.device for p in guide.parameters() if p.is_cuda} if isinstance(guide, nn.Module) else set()
    with (
        torch.no_grad(),
        evaluation_mode(model),
        torch.random.fork_rng(devices=sorted(d.index for d in devices)),
        coherent_context() if coherent else contextlib.nullcontext(),
        guide.noise_times(noise) if noise != 1 else contextlib.nullcontext(),
    ):
        run = _Run(model, guide, arguments, rows, site, seed)
        size = batch_size or _default_size(arguments, rows)

        def collected(plan: _Plan) -> Prediction:
            collector: Collector | None = None
            _seed_generators(seed)
            with tqdm(
                total=num_samples * rows, desc="predict", unit="row", leave=False,
                disable=None if progress is None else not progress, delay=0 if progress else _PATIENCE,
            ) as bar:  # fmt: skip
                for start, count, observed in run.passes(plan, num_samples, min(size, plan.limit), coherent):
                    observed = row_distribution(observed, count)
                    if _row_shape(observed) != plan.shape:
                        raise _ChangedError
                    if calibration is not None:
                        observed = calibration.distribution(observed)
                    if collector is None:
                        collector = make_collector(observed, num_samples, rows, keep_samples)
                    collector.add(start, observed)
                    bar.update(count)
            assert collector is not None
            return collector.finish()

        try:
            prediction = collected(run.plan(coherent))
        except NoiseMismatchError:  # the model is not what it was when the plan was made
            run.forget()
            prediction = collected(replace(run.plan(coherent), repeats=False, direct=False))
            run.forget()
        _check_finite(prediction, arguments)
        return prediction


def _is_loader(inputs: Any) -> bool:
    if isinstance(inputs, (Tensor, tuple, list, Mapping, str, np.ndarray)):
        return False
    return isinstance(inputs, Dataset) or hasattr(inputs, "__iter__")


def _of_loader(
    model: Any, guide: Any, loader: Any, target: str | None, seed: int, progress: bool | None, options: dict[str, Any]
) -> Prediction:
    """The predictions for all batches of a loader, as one."""
    if isinstance(loader, Dataset):
        loader = DataLoader(loader, batch_size=options["batch_size"] or _COPIES)
    parameters = guide.parameters() if isinstance(guide, nn.Module) else iter(())
    device, parts = next((p.device for p in parameters), None), []
    for number, batch in enumerate(
        tqdm(loader, "predict", leave=False, disable=None if progress is None else not progress)
    ):
        inputs, _ = split_target(to_device(dict(batch) if isinstance(batch, Mapping) else batch, device), target)
        # noise of each row's own must not come back in each batch
        options |= {"seed": seed if options["coherent"] else mix_seed(seed, number), "progress": False}
        parts.append(predict(model, guide, *inputs, **options))
    if not parts:
        raise ValueError("inputs has no batch: is the DataLoader empty?")
    return Prediction.concat(parts)


def _seed_generators(seed: int) -> None:
    """As ``torch.manual_seed``, which without a GPU takes half a millisecond to note that one is to be seeded."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _default_size(inputs: Any, rows: int) -> int:
    return max(_FEWEST, min(_MOST, _NUMBERS * rows // max(_numbers(inputs), 1)))


def _numbers(inputs: Any) -> int:
    """Numbers of input; each integer counts as an embedding."""
    sizes = ((leaf.numel(), leaf.dtype) for leaf in tensors_in(inputs) if leaf.dim())
    return sum(size * (_PER_WORD if dtype in (torch.int32, torch.int64) else 1) for size, dtype in sizes)


@dataclass(frozen=True)
class _Plan:
    """How a model can be run.

    :ivar limit: how many rows the model's plates admit at once.
    :ivar shape: of the observed site, for one row.
    :ivar by_rows: whether all noise is per row, if it is not coherent.
    :ivar fixed: weights whose examples are not the rows: one draw for all batches of a sample.
    :ivar repeats: whether several samples can go through the network at once, each with copies of the rows.
    :ivar direct: whether the model gives the likelihood without Pyro's handlers.
    """

    limit: int
    shape: torch.Size
    by_rows: bool
    fixed: frozenset[str]
    repeats: bool = False
    direct: bool = False


class _ChangedError(NoiseMismatchError):
    """The model does something that the plan does not know."""


# The plans of each guide by the kind of inputs, with what they were made for. A plan takes a few small passes.
_PLANS: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Watch | None, _Plan]]] = weakref.WeakKeyDictionary()
_MOST_PLANS = 8


class _Run:
    """One prediction: draws from the guide, the model on chosen rows.

    :param inputs: positional and keyword arguments of the model.
    """

    def __init__(self, model: Any, guide: Any, inputs: Any, rows: int, site: str | None, seed: int):
        self.model, self.guide, self.inputs, self.rows, self.site, self.seed = model, guide, inputs, rows, site, seed
        find = getattr(guide, "draw_posteriors", None)
        self.posteriors: dict[str, Any] | None = find() if find is not None else None

    @cached_property
    def first(self) -> dict[str, Any]:
        return self.draw(self.seed)

    @cached_property
    def sources(self) -> dict[str, NoiseSource]:
        return {name: self._source(i, v) for i, (name, v) in enumerate(_weights(self.first).items())}

    def draw(self, seed: int) -> dict[str, Any]:
        """All latent sites from the guide; mean-field ones by ``seed`` alone, however rows are cut into batches."""
        _seed_generators(seed)
        args, kwargs = self.inputs
        trace = poutine.trace(self.guide).get_trace(*args, **kwargs)
        return {
            name: node["value"]
            for name, node in trace.nodes.items()
            if node["type"] == "sample"
            and not node["infer"].get("is_auxiliary")
            and not poutine.util.site_is_subsample(node)
        }

    def _source(self, number: int, weight: LazyWeight) -> NoiseSource:
        source = weight.draw.source
        device = weight.device if weight.device.type == "cuda" else torch.device("cpu")
        rows, dense = (
            torch.Generator(device).manual_seed(mix_seed(self.seed ^ 0x5DEECE66D, 2 * number + i)) for i in (0, 1)
        )
        return NoiseSource(source.name, source.example_dim, rows, dense, workspace={})

    def distribution(self, values: dict[str, Any], chosen: Any) -> Any:
        """The node of the observed site for these inputs."""
        try:
            with _Fitting(values):
                args, kwargs = chosen
                trace = poutine.trace(poutine.condition(self.model, data=values)).get_trace(*args, **kwargs)
        except RuntimeError as error:
            # a likelihood that cannot draw: torch's multinomial, for instance
            blamed = any(word in str(error) for word in ("nan", "p_in"))
            if not blamed and next(_odd_rows(chosen), None) is None:
                raise
            raise ValueError(_not_finite(chosen, 0, str(error))) from error
        nodes = {
            name: node
            for name, node in trace.nodes.items()
            if node["type"] == "sample" and name not in values and not poutine.util.site_is_subsample(node)
        }
        if self.site is not None and self.site not in nodes:
            raise ValueError(f"site: {self.site!r} is no observed site of the model; these are {sorted(nodes)}.")
        if not nodes:
            raise ValueError(
                f"the model has no observed site: the guide has posteriors for all of {sorted(values)}. Was it set up "
                "without targets? Call guide.setup(x, y). A bare network goes into vsd.nn.Classifier or Regressor."
            )
        # where the model knows the value of some (poutine.condition), the one to predict is the one it lacks
        free = {name: node for name, node in nodes.items() if not node["is_observed"]}
        if len(free) > 1 and hasattr(self.model, "latent_sites"):
            latent = sorted(set(self.model.latent_sites()) & set(free))
            if latent:
                raise ValueError(f"guide: it has no posterior for {latent}. Is it the guide of a different model?")
        choice = free if len(free) == 1 else nodes
        if self.site is None and len(choice) != 1:
            raise ValueError(f"the model has several observed sites, {sorted(nodes)}. Name the one to predict: site=…")
        return nodes[self.site or next(iter(choice))]

    def plan(self, coherent: bool) -> _Plan:
        """A plan; one of the guide's where it has one for this model and such inputs."""
        if not coherent or self.posteriors is None:
            return self._new_plan()
        key, made_for = self._key(), self._made_for()
        plans = _PLANS.setdefault(self.guide, {})
        known = plans.get(key)
        if known is not None and known[0] == made_for and (known[1] is None or known[1].fits()):
            return known[2]
        with poutine.block():  # handlers around the prediction see its own passes alone
            plan = self._new_plan()
            plan = replace(plan, repeats=plan.repeats and self._repeats(), direct=self._direct())
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        if key is not None:
            plans[key] = made_for, Watch(self.model) if isinstance(self.model, nn.Module) else None, plan
        return plan

    def forget(self) -> None:
        _PLANS.pop(self.guide, None)

    def _key(self) -> Any:
        """What the inputs are, beyond their rows and values; ``None`` if something in them has no such description."""
        leaves, structure = tree_flatten(self.inputs)
        described: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                described.append((leaf.dim(), leaf.shape[1:], leaf.dtype, leaf.device, type(leaf)))
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                described.append((type(leaf), leaf))
            else:
                return None
        device = tensors_in(self.inputs)[0].device.type
        return (*described, str(structure), self.site, torch.is_autocast_enabled(device))

    def _made_for(self) -> Any:
        """What a plan depends on besides: the guide's sites, and the model if it is no module."""
        return dict(self.guide.sites), self.guide.example_dim, None if isinstance(self.model, nn.Module) else self.model

    def _new_plan(self) -> _Plan:
        logs, shapes = [], set()
        for size in (1, 2):
            log = {n: NoiseSource(s.name, s.example_dim) for n, s in self.sources.items()}
            chosen = take_rows(self.inputs, torch.zeros(size, dtype=torch.long))
            node = self.distribution(_with_sources(self.first, log), chosen)
            logs.append(log)
            shapes.add(_row_shape(row_distribution(node["fn"], size)))
        if len(shapes) > 1:
            raise ValueError(
                f"the observed site has shapes {sorted(map(tuple, shapes))} for one row and for two. Is a dimension "
                "broadcast against the rows? A plate at -1 goes with shapes (..., rows)."
            )
        plates = [frame.full_size for frame in node["cond_indep_stack"] if frame.full_size not in (None, frame.size)]
        one, two = logs
        fixed = {n for n, source in two.items() if source.examples and source.examples == one[n].examples}
        scales = {n for n, s in getattr(self.guide, "sites", {}).items() if s.kind == "scale"}
        only_weights = bool(self.first) and {n for n in self.first if n not in scales} == set(two)
        # The examples that a weight is applied to must be the rows: twice the rows, twice the examples.
        per_row = only_weights and all(
            not source.used_dense and source.examples == {2 * n for n in one[name].examples}
            for name, source in two.items()
        )
        one_each = all(source.examples <= {1} for source in one.values())
        return _Plan(min([*plates, 2**31]), shapes.pop(), per_row, frozenset(fixed), repeats=per_row and one_each)

    def _repeats(self) -> bool:
        """Whether two samples in one pass give what they give in two."""
        count = min(self.rows, 3)
        draws, rows = self._draws(), take_rows(self.inputs, slice(0, count))
        if draws.fill(2) < 2:  # too many units for that
            return False
        try:
            both = self.distribution(draws.several(0, 2, count), _copies(rows, 2))["fn"]
        except NoiseMismatchError:
            return False
        each = [row_distribution(self.distribution(draws.one(i, count), rows)["fn"], count) for i in (0, 1)]
        found, expected = _sampled([row_distribution(both, 2 * count)], count), _sampled(each, count)
        tolerance = 1e-4 * float(expected.abs().max())
        return bool(expected.isfinite().all()) and torch.allclose(found, expected, rtol=1e-4, atol=tolerance)

    def _direct(self) -> bool:
        """Whether the model's likelihood, given all sites, is what its sample statement has."""
        given = getattr(self.model, "likelihood_given", None)
        if given is None or len(self.inputs[0]) != 1 or self.inputs[1] or self.site not in (None, "y"):
            return False
        draws, row = self._draws(), take_rows(self.inputs, slice(0, 1))
        draws.fill(1)
        values = draws.one(0, 1)
        if set(values) != set(self.model.latent_sites()):
            return False
        expected = _sampled([row_distribution(self.distribution(values, row)["fn"], 1)])
        try:
            with _NoSamples():
                found = _sampled([row_distribution(given(values, *row[0]), 1)])
        except NoiseMismatchError:
            return False
        return torch.equal(found, expected)

    def _draws(self) -> "_Draws":
        assert self.posteriors is not None
        return _Draws(self.posteriors, self.guide.sites, self.seed)

    def passes(self, plan: _Plan, num_samples: int, size: int, coherent: bool) -> Iterator[tuple[int, int, Any]]:
        """First position in the sequence (sample 0: all rows, sample 1: all rows, …), number of positions, and the
        distribution of the observed site there."""
        if coherent and self.posteriors is not None:
            return self.shared(plan, num_samples, size)
        return (self.by_rows if plan.by_rows and not coherent else self.by_samples)(plan, num_samples, size)

    def shared(self, plan: _Plan, num_samples: int, size: int) -> Iterator[tuple[int, int, Any]]:
        """All rows of a sample share its draw; several samples in a pass where they fit."""
        hooks = isinstance(self.model, nn.Module) and (self.model._forward_hooks or self.model._forward_pre_hooks)
        direct = plan.direct and not am_i_wrapped() and not hooks
        draws, rows = self._draws(), self.rows
        few = plan.repeats and _numbers(self.inputs) <= _FEW_NUMBERS
        at_once = max(1, min(size, _COPIES) // rows) if few else 1
        copies: dict[int, Any] = {}
        no_samples = _NoSamples()

        def observed(values: dict[str, Any], chosen: Any) -> Any:
            if not direct:
                return self.distribution(values, chosen)["fn"]
            with no_samples:
                return self.model.likelihood_given(values, *chosen[0])

        for start in range(0, num_samples, draws.size):
            drawn = draws.fill(num_samples - start)
            for i in range(0, drawn, at_once):
                n, position = min(at_once, drawn - i), (start + i) * rows
                if n > 1:
                    if n not in copies:
                        copies = {n: _copies(self.inputs, n)}
                    yield position, n * rows, observed(draws.several(i, n, rows), copies[n])
                    continue
                values = draws.one(i, min(size, rows))
                for first in range(0, rows, size):
                    count = min(size, rows - first)
                    chosen = self.inputs if count == rows else take_rows(self.inputs, slice(first, first + count))
                    yield position + first, count, observed(values, chosen)

    def by_rows(self, plan: _Plan, num_samples: int, size: int) -> Iterator[tuple[int, int, Any]]:
        """Each row of each sample has its own noise: passes over the sequence, cut anywhere."""
        for name, value in _weights(self.first).items():
            if value.draw.scale is not None:
                self.sources[name].scale_posterior = self.guide.scale_posterior(name).base_dist
        values = _with_sources(self.first, self.sources)
        for start in range(0, num_samples * self.rows, size):
            flat = torch.arange(start, min(start + size, num_samples * self.rows))
            chosen = take_rows(self.inputs, flat % self.rows)
            yield start, len(flat), self.distribution(self._again(plan, values), chosen)["fn"]

    def by_samples(self, plan: _Plan, num_samples: int, size: int) -> Iterator[tuple[int, int, Any]]:
        """The guide runs once for each sample, its rows in batches."""
        for sample in range(num_samples):
            values = _with_sources(self.draw(mix_seed(self.seed, sample)), self.sources)
            for start in range(0, self.rows, size):
                count = min(size, self.rows - start)
                chosen = take_rows(self.inputs, slice(start, start + count))
                node = self.distribution(self._again(plan, values), chosen)
                yield sample * self.rows + start, count, node["fn"]

    def _again(self, plan: _Plan, values: dict[str, Any]) -> dict[str, Any]:
        """The draws for a further pass, in which noise per example is drawn anew, except for weights in ``fixed``."""
        fresh = {n: LazyWeight(w.draw.again()) for n, w in _weights(values).items() if n not in plan.fixed}
        return {**values, **fresh}


class _Draws:
    """Draws of all sites from their posteriors, many samples at once. Each site has a generator of its own, so that its
    noise depends on the seed and the number of the sample alone.

    :param posteriors: of all sites, a weight's without its z.
    :param sites: the guide's records of them.
    :ivar size: how many samples are drawn at once.
    """

    def __init__(self, posteriors: dict[str, Any], sites: dict[str, Any], seed: int):
        self.sites, self.values = sites, dict[str, Tensor]()
        # of each weight a draw without noise; of each other site its base distribution
        self.weights = {n: p.rsample().draw for n, p in posteriors.items() if sites[n].kind == "weight"}
        self.others = {n: base_distribution(p) for n, p in posteriors.items() if n not in self.weights}
        self.generators = {}
        numbers = 0
        for i, name in enumerate(posteriors):
            like = self.weights[name].std if name in self.weights else _normal(self.others[name]).loc
            device = like.device if like.device.type == "cuda" else torch.device("cpu")
            self.generators[name] = torch.Generator(device).manual_seed(mix_seed(seed ^ 0x5DEECE66D, i))
            numbers += like.numel()
        for draw in self.weights.values():
            draw.source.workspace = {}
        self.size = max(1, min(_CHUNK, 2**20 // max(numbers, 1)))

    def fill(self, wanted: int) -> int:
        """Draws the next samples; returns how many, at most :attr:`size`."""
        drawn = min(wanted, self.size)
        for name, posterior in self.others.items():
            normal = _normal(posterior)
            eps = self._normals(name, drawn, normal.loc).reshape(-1, *normal.loc.shape)
            value = normal.loc + normal.scale * eps
            for transform in getattr(posterior, "transforms", ()):
                value = transform(value)
            self.values[name] = value
        for name, draw in self.weights.items():
            noise = rotated_noise_(self._normals(name, drawn, draw.std), draw.std, draw.N, draw.W)
            z = self.values.get(self.sites[name].partner)
            self.values[name] = noise if z is None else noise * z
        return drawn

    def _normals(self, name: str, drawn: int, like: Tensor) -> Tensor:
        """``(drawn, numbers of the site)``. On the CPU torch fills normals in blocks of 16: whole blocks per sample
        make them independent of how many samples there are. A GPU draws all samples of a chunk."""
        generator, K = self.generators[name], like.numel()
        samples = drawn if generator.device.type == "cpu" else self.size
        size = (samples, -(-K // 16) * 16)
        full = torch.randn(size, dtype=like.dtype, device=generator.device, generator=generator)
        return full[:drawn, :K].to(like.device)

    def one(self, sample: int, rows: int) -> dict[str, Any]:
        """The values of all sites in one sample, for a pass of so many rows."""
        values: dict[str, Any] = {name: self.values[name][sample] for name in self.others}
        for name, draw in self.weights.items():
            # multiplications: one for each entry of the weight, or for each unit and row; of a convolution many a row
            dense = len(draw.event_shape) > 2 or rows * draw.num_units >= draw.theta.numel()
            noise, z = self.values[name][sample : sample + 1], values.get(self.sites[name].partner)
            values[name] = LazyWeight(draw.given(noise, z, apply_dense=dense))
        return values

    def several(self, sample: int, samples: int, rows: int) -> dict[str, Any]:
        """The values for a pass in which each of several samples has a copy of the rows; of other sites than weights
        the first sample's, which is not to be used."""
        values: dict[str, Any] = {name: self.values[name][sample] for name in self.others}
        for name, draw in self.weights.items():
            noise, z = self.values[name][sample : sample + samples], values.get(self.sites[name].partner)
            noise = noise.repeat_interleave(rows, 0) if rows > 1 else noise
            values[name] = LazyWeight(draw.given(noise, z))
        return values


def _normal(posterior: Any) -> Any:
    """The Normal that a mean-field posterior is, or is a transform of."""
    return base_distribution(posterior.base_dist) if hasattr(posterior, "transforms") else posterior


def _copies(inputs: Any, n: int) -> Any:
    """All rows n times."""
    return map_tensors(lambda t: t.repeat(n, *(1,) * (t.dim() - 1)) if t.dim() else t, inputs)


def _row_shape(observed: Any) -> torch.Size:
    shape: torch.Size = observed.batch_shape[1:] + observed.event_shape
    return shape


def _sampled(parts: Iterable[Any], rows: int = 1) -> Tensor:
    """Each sample's prediction for some rows, from distributions of one or more samples."""
    parts = list(parts)
    samples = sum(part.batch_shape[0] for part in parts) // rows
    collector, start = make_collector(parts[0], samples, rows, keep=True), 0
    for part in parts:
        collector.add(start, part)
        start += part.batch_shape[0]
    found = collector.finish().samples
    assert found is not None
    return found


class _NoSamples(Messenger):
    """No sample statement is expected."""

    def _pyro_sample(self, msg: Any) -> None:
        raise _ChangedError


def _weights(values: dict[str, Any]) -> dict[str, LazyWeight]:
    return {name: value for name, value in values.items() if isinstance(value, LazyWeight)}


def _with_sources(values: dict[str, Any], sources: dict[str, NoiseSource]) -> dict[str, Any]:
    """The same posteriors, drawn from these sources."""
    return {**values, **{n: LazyWeight(w.draw.with_source(sources[n])) for n, w in _weights(values).items()}}


class _Fitting(Messenger):
    """Checks that the guide's draws have the event shapes of the model's sites."""

    def __init__(self, values: dict[str, Any]):
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        value, event_shape = self.values.get(msg["name"]), getattr(msg["fn"], "event_shape", ())
        if isinstance(value, Tensor) and value.shape[value.dim() - len(event_shape) :] != event_shape:
            raise ValueError(
                f"guide: its draw of {msg['name']!r} has shape {tuple(value.shape)}, and the model's site has event "
                f"shape {tuple(event_shape)}. Is it the guide of a different model?"
            )


def _check_finite(prediction: Prediction, inputs: Any) -> None:
    """Raises on NaN. Other likelihoods may have no mean or variance (a Cauchy): they are blamed only where the inputs
    are not finite either."""
    known = isinstance(prediction, (ClassificationPrediction, RegressionPrediction))
    if not known and next(_odd_rows(inputs), None) is None:
        return
    sound = prediction.mean.isfinite() & prediction.variance.isfinite()
    bad = (~sound).reshape(len(prediction), -1).any(-1).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(_not_finite(inputs, row, f"the mean is {prediction.mean[row].tolist()}"))


def _odd_rows(inputs: Any) -> Iterator[int]:
    """The first row of each input that is not finite."""
    for leaf in tensors_in(inputs):
        if leaf.dim() and not bool(leaf.isfinite().all()):
            yield int((~leaf.isfinite()).reshape(len(leaf), -1).any(-1).nonzero()[0])


def _not_finite(inputs: Any, row: int, found: str) -> str:
    for odd in _odd_rows(inputs):
        return f"inputs: row {odd} holds NaN or infinity: {found}."
    return f"the prediction for row {row} is not finite: {found}. Are the parameters finite? Standardise large inputs."
