"""The predictive distribution, averaged over draws from a guide."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from tqdm import tqdm

from pyro_vsd._utils import check_integer, evaluation_mode, mix_seed, num_rows, take_rows, tensors_in
from pyro_vsd.distributions import LazyWeight
from pyro_vsd.distributions import coherent as coherent_context
from pyro_vsd.distributions.lazy_weight import NoiseSource
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.prediction.collect import Collector, make_collector, row_distribution

__all__ = ["predict"]

# Where the caller names no batch size, a pass takes about a million numbers of input: enough to make its fixed cost
# small, little enough for the activations of a ResNet; and between 64 and 4096 rows.
_NUMBERS, _FEWEST, _MOST = 2**20, 64, 4096
# A progress bar appears after this many seconds.
_PATIENCE = 5.0


def predict(
    model: Any,
    guide: Any,
    *inputs: Any,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
    coherent: bool = False,
    keep_samples: bool = True,
    progress: bool | None = None,
    site: str | None = None,
) -> Prediction:
    r"""The predictive distribution :math:`\frac1S \sum_s p(y \mid x, W_s)` of every row of the inputs.

    Where every latent site has noise per row (and its own z under a hierarchy), samples are made by repeating rows.
    Where some do not (the weights of an LSTM, a sampled bias, a latent σ), copies of a row would share a draw, so there
    is one pass per sample. Two small passes find out which is the case.

    The model runs in evaluation mode and is put back. Working memory does not grow with ``num_samples``; what is kept
    for ``samples``, ``log_prob`` and ``quantile`` does (samples × rows × outputs) and can be turned off. Under the same
    seed the result does not depend on ``batch_size`` (on the CPU, up to rounding).

    :param model: a Pyro model, called as ``model(*inputs)``, without targets.
    :param guide: its guide, set up (trained or loaded).
    :param inputs: tensors whose first dimension counts the rows; other arguments are passed on.
    :param num_samples: draws per row.
    :param batch_size: rows of the network's input per pass, copies counted.
    :param seed: makes the prediction reproducible; by default a number from torch's global generator.
    :param coherent: one noise vector for all rows of a sample: ``samples[s]`` is then one sampled function.
    :param keep_samples: whether to keep each sample's prediction.
    :param progress: a progress bar; by default one appears in a terminal after some seconds.
    :param site: the observed site, where the model has several.

    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> vsd.predict(model, vsd.VSDGuide(model), torch.randn(5, 4), num_samples=10).probs.shape
    torch.Size([5, 3])
    """
    for name, value in (("model", model), ("guide", guide)):
        if not callable(value):
            raise TypeError(f"{name} must be a function or a module, not {type(value).__name__}.")
    check_integer("num_samples", num_samples, 1)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    if hasattr(guide, "sites") and not guide.sites:
        raise ValueError(
            "guide: it has no parameters, since it has not seen its model's sites. Train it, call guide.setup(x, y), "
            "or load a state first."
        )
    rows = num_rows(inputs, "inputs")
    if not rows:
        raise ValueError("inputs must have at least one row.")
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    check_integer("seed", seed)
    seed = int(seed)  # NumPy's integers overflow
    devices = {p.device for p in guide.parameters() if p.is_cuda} if isinstance(guide, nn.Module) else set()
    with (
        torch.no_grad(),
        evaluation_mode(model),
        torch.random.fork_rng(devices=sorted(d.index for d in devices)),
        coherent_context() if coherent else contextlib.nullcontext(),
    ):
        torch.manual_seed(seed)
        run = _Run(model, guide, inputs, rows, site, seed)
        by_rows, limit = run.plan(coherent)
        size = min(batch_size or _default_size(inputs, rows), limit)
        passes = run.by_rows(num_samples, size) if by_rows else run.by_samples(num_samples, size)
        collector: Collector | None = None
        with tqdm(
            total=num_samples * rows, desc="predict", unit="row", leave=False,
            disable=None if progress is None else not progress, delay=0 if progress else _PATIENCE,
        ) as bar:  # fmt: skip
            for flat, observed in passes:
                observed = row_distribution(observed, len(flat))
                if collector is None:
                    collector = make_collector(observed, num_samples, rows, keep_samples)
                collector.add(flat, observed)
                bar.update(len(flat))
        assert collector is not None
        prediction = collector.finish()
        _check_finite(prediction, inputs)
        return prediction


def _default_size(inputs: Any, rows: int) -> int:
    numbers = sum(leaf.numel() for leaf in tensors_in(inputs) if leaf.dim())
    return max(_FEWEST, min(_MOST, _NUMBERS * rows // max(numbers, 1)))


class _Run:
    """One prediction: draws from the guide, the model on chosen rows."""

    def __init__(self, model: Any, guide: Any, inputs: Any, rows: int, site: str | None, seed: int):
        self.model, self.guide, self.inputs, self.rows, self.site, self.seed = model, guide, inputs, rows, site, seed
        self.first = self.draw(seed)
        self.sources = {name: self._source(i, v) for i, (name, v) in enumerate(_weights(self.first).items())}
        self.fixed: set[str] = set()  # weights whose examples are not the rows: one draw for all batches of a sample

    def draw(self, seed: int) -> dict[str, Any]:
        """All latent sites from the guide; mean-field ones by ``seed`` alone, however rows are cut into batches."""
        torch.manual_seed(seed)
        trace = poutine.trace(self.guide).get_trace(*self.inputs)
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

    def distribution(self, values: dict[str, Any], index: Tensor) -> Any:
        """The node of the observed site for the rows of ``index``."""
        chosen = take_rows(self.inputs, index)
        try:
            with _Fitting(values):
                trace = poutine.trace(poutine.condition(self.model, data=values)).get_trace(*chosen)
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

    def plan(self, coherent: bool) -> tuple[bool, int]:
        """Whether samples can be made by repeating rows, and how many rows the model's plates admit at once."""
        logs, shapes = [], set()
        for size in (1, 2):
            log = {n: NoiseSource(s.name, s.example_dim) for n, s in self.sources.items()}
            node = self.distribution(_with_sources(self.first, log), torch.zeros(size, dtype=torch.long))
            logs.append(log)
            observed = row_distribution(node["fn"], size)
            shapes.add(observed.batch_shape[1:] + observed.event_shape)
        if len(shapes) > 1:
            raise ValueError(
                f"the observed site has shapes {sorted(map(tuple, shapes))} for one row and for two. Is a dimension "
                "broadcast against the rows? A plate at -1 goes with shapes (..., rows)."
            )
        plates = [frame.full_size for frame in node["cond_indep_stack"] if frame.full_size not in (None, frame.size)]
        limit = min([*plates, 2**31])
        one, two = logs
        self.fixed = {n for n, source in two.items() if source.examples and source.examples == one[n].examples}
        scales = {n for n, s in getattr(self.guide, "sites", {}).items() if s.kind == "scale"}
        only_weights = {n for n in self.first if n not in scales} == set(two)
        # The examples that a weight is applied to must be the rows: twice the rows, twice the examples.
        per_row = all(
            not source.used_dense and source.examples == {2 * n for n in one[name].examples}
            for name, source in two.items()
        )
        return bool(self.first) and only_weights and per_row and not coherent, limit

    def by_rows(self, num_samples: int, size: int) -> Iterator[tuple[Tensor, Any]]:
        """Passes over the sequence (sample 0: all rows, sample 1: all rows, …), cut anywhere."""
        for name, value in _weights(self.first).items():
            if value.draw.scale is not None:
                self.sources[name].scale_posterior = self.guide.scale_posterior(name).base_dist
        values = _with_sources(self.first, self.sources)
        for start in range(0, num_samples * self.rows, size):
            flat = torch.arange(start, min(start + size, num_samples * self.rows))
            yield flat, self.distribution(self._again(values), flat % self.rows)["fn"]

    def by_samples(self, num_samples: int, size: int) -> Iterator[tuple[Tensor, Any]]:
        """One draw per sample, its rows in batches."""
        for sample in range(num_samples):
            values = _with_sources(self.draw(mix_seed(self.seed, sample)), self.sources)
            for start in range(0, self.rows, size):
                index = torch.arange(start, min(start + size, self.rows))
                yield sample * self.rows + index, self.distribution(self._again(values), index)["fn"]

    def _again(self, values: dict[str, Any]) -> dict[str, Any]:
        """The draws for a further pass, in which noise per example is drawn anew, except for weights in ``fixed``."""
        fresh = {n: LazyWeight(w.draw.again()) for n, w in _weights(values).items() if n not in self.fixed}
        return {**values, **fresh}


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
