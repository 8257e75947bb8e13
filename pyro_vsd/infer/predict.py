"""The predictive distribution, averaged over draws from a guide."""

import contextlib
from collections.abc import Iterator, Set
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from tqdm import tqdm

from pyro_vsd.distributions import LazyWeight
from pyro_vsd.distributions import coherent as coherent_context
from pyro_vsd.infer.modes import evaluation_mode
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

    Where every latent site takes the per-row path (each row has its own noise, and its own z under a hierarchy),
    samples are made by repeating rows; where some do not (the weights of an LSTM, a sampled bias, a latent σ), copies
    of a row would share a draw, so there is one pass per sample. Which it is, is found by two small passes.

    The model runs in evaluation mode and is put back. Working memory does not grow with ``num_samples``; what is kept
    for ``samples``, ``log_prob`` and ``quantile`` does (samples × rows × outputs) and can be turned off. Under the same
    seed the result does not depend on ``batch_size`` (on the CPU, but for rounding).

    :param model: a Pyro model, called as ``model(*inputs)``, without targets.
    :param guide: its guide, set up (trained or loaded).
    :param inputs: tensors whose first dimension counts the rows; other arguments are passed on.
    :param num_samples: draws per row.
    :param batch_size: rows of the network's input per pass, copies counted.
    :param seed: makes the prediction reproducible; by default a number from torch's global generator.
    :param coherent: one noise vector for all rows of a sample: ``samples[s]`` is then one sampled function.
    :param keep_samples: whether to keep each sample's prediction.
    :param progress: a progress bar; by default one when it takes long and somebody watches.
    :param site: the observed site, where the model has several.

    >>> import pyro_vsd as vsd
    >>> model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([4, 8, 3])), num_data=100)
    >>> predict(model, vsd.VSDGuide(model), torch.randn(5, 4), num_samples=10).probs.shape
    torch.Size([5, 3])
    """
    for name, value in (("model", model), ("guide", guide)):
        if not callable(value):
            raise TypeError(f"{name}: expected a function or a module, got {type(value).__name__}.")
    for name, value in (("num_samples", num_samples), ("batch_size", 1 if batch_size is None else batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {value!r}.")
    if seed is not None and (not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ValueError(f"seed: expected an integer of 64 bits or None, got {seed!r}.")
    if site is not None and not isinstance(site, str):
        raise TypeError(f"site: expected the name of an observed site, got {site!r}.")
    if hasattr(guide, "sites") and not guide.sites:
        raise ValueError(
            "guide: expected one with parameters, got one that has not seen its model's sites. Train it, call "
            "guide.setup(x, y), or load a state first."
        )
    rows = _num_rows(inputs)
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
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
            for flat, law in passes:
                law = row_distribution(law, len(flat))
                if collector is None:
                    collector = make_collector(law, num_samples, rows, keep_samples)
                collector.add(flat, law)
                bar.update(len(flat))
        assert collector is not None
        prediction = collector.finish()
        _check_finite(prediction, inputs)
        return prediction


def _num_rows(inputs: Any) -> int:
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        raise ValueError("inputs: expected at least one tensor whose first dimension counts the rows, got none.")
    sizes = {len(leaf) for leaf in leaves}
    if len(sizes) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(f"inputs: expected the same number of rows in each tensor, got shapes {shapes}.")
    if sizes == {0}:
        raise ValueError(f"inputs: expected at least one row, got shapes {[tuple(leaf.shape) for leaf in leaves]}.")
    return sizes.pop()


def _default_size(inputs: Any, rows: int) -> int:
    numbers = sum(leaf.numel() for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0)
    return max(_FEWEST, min(_MOST, _NUMBERS * rows // max(numbers, 1)))


class _Run:
    """One prediction: draws from the guide, the model on chosen rows."""

    def __init__(self, model: Any, guide: Any, inputs: Any, rows: int, site: str | None, seed: int):
        self.model, self.guide, self.inputs, self.rows, self.site, self.seed = model, guide, inputs, rows, site, seed
        self.workspaces: dict[str, dict[Any, Tensor]] = {}
        self.generators: dict[str, tuple[torch.Generator, torch.Generator]] = {}
        self.fixed: set[str] = set()  # weights whose examples are not the rows: one draw for all batches of a sample

    def draw(self, seed: int) -> dict[str, Any]:
        """All latent sites from the guide; mean-field ones by ``seed`` alone, however rows are cut into batches."""
        torch.manual_seed(seed)
        trace = poutine.trace(self.guide).get_trace(*self.inputs)
        values = {}
        for name, node in trace.nodes.items():
            if node["type"] != "sample" or node["infer"].get("is_auxiliary") or poutine.util.site_is_subsample(node):
                continue
            values[name] = node["value"]
            if isinstance(node["value"], LazyWeight):
                draw = node["value"].draw
                draw.generator, draw.dense_generator = self._generators(name, node["value"].device)
                draw.workspace = self.workspaces.setdefault(name, {})
        return values

    def _generators(self, name: str, device: torch.device) -> tuple[torch.Generator, torch.Generator]:
        if name not in self.generators:
            number = 2 * len(self.generators)
            self.generators[name] = (_generator(self.seed, number, device), _generator(self.seed, number + 1, device))
        return self.generators[name]

    def law(self, values: dict[str, Any], index: Tensor) -> Any:
        """The observed site's distribution for the rows of ``index``, and the node it came from."""
        chosen = tree_map(lambda v: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() > 0 else v, self.inputs)
        try:
            with _Fitting(values):
                trace = poutine.trace(poutine.condition(self.model, data=values)).get_trace(*chosen)
        except RuntimeError as error:
            # what a likelihood says that is asked for a draw: torch's multinomial, for instance
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
            raise ValueError(f"site: expected one of the model's observed sites {sorted(nodes)}, got {self.site!r}.")
        if not nodes:
            raise ValueError(
                f"expected a model with an observed site, got a guide that has posteriors for all of {sorted(values)}. "
                "Was it set up without targets? guide.setup(x, y)"
            )
        # where the model knows the value of some (poutine.condition), the one to predict is the one it lacks
        free = {name: node for name, node in nodes.items() if not node["is_observed"]}
        choice = free if len(free) == 1 else nodes
        if self.site is None and len(choice) != 1:
            raise ValueError(
                f"expected a model with one observed site, got {sorted(nodes)}. Name the one to predict: site=…"
            )
        return nodes[self.site or next(iter(choice))]

    def plan(self, coherent: bool) -> tuple[bool, int]:
        """Whether samples can be made by repeating rows, and how many rows the model's plates admit at once."""
        met, shapes = [], set()
        for size in (1, 2):
            values = self.draw(self.seed)
            fresh = _again(values)
            node = self.law(fresh, torch.zeros(size, dtype=torch.long))
            met.append(fresh)
            law = row_distribution(node["fn"], size)
            shapes.add(law.batch_shape[1:] + law.event_shape)
        if len(shapes) > 1:
            raise ValueError(
                f"expected an observed site of the same shape for each row, got {sorted(map(tuple, shapes))} with one "
                "and two rows. Is a dimension broadcast against the rows? A plate at -1 goes with shapes (..., rows)."
            )
        self.generators.clear()
        plates = [frame.full_size for frame in node["cond_indep_stack"] if frame.full_size not in (None, frame.size)]
        limit = min([*plates, 2**31])
        weights = {n: v.draw.met for n, v in met[1].items() if isinstance(v, LazyWeight)}
        self.fixed = {n for n, numbers in weights.items() if numbers and numbers == met[0][n].draw.met}
        if coherent:
            return False, limit
        scales = {n for n, s in getattr(self.guide, "sites", {}).items() if s.kind == "scale"}
        for name, value in met[1].items():
            if name in scales:
                continue
            if not isinstance(value, LazyWeight) or value.draw.used_dense:
                return False, limit
            # The examples a weight meets must be the rows: twice the rows, twice the examples.
            if value.draw.met != {2 * n for n in met[0][name].draw.met}:
                return False, limit
        return bool(met[1]), limit

    def by_rows(self, num_samples: int, size: int) -> Iterator[tuple[Tensor, Any]]:
        """Passes over the sequence (sample 0: all rows, sample 1: all rows, …), cut anywhere."""
        values = self.draw(self.seed)
        for name, value in values.items():
            if isinstance(value, LazyWeight) and value.draw.law.scale is not None:
                value.draw.scale_law = self.guide.scale_posterior(name).base_dist
        for start in range(0, num_samples * self.rows, size):
            flat = torch.arange(start, min(start + size, num_samples * self.rows))
            yield flat, self.law(_again(values), flat % self.rows)["fn"]

    def by_samples(self, num_samples: int, size: int) -> Iterator[tuple[Tensor, Any]]:
        """One draw per sample, its rows in batches."""
        for sample in range(num_samples):
            values = self.draw(_mix(self.seed, sample))
            for start in range(0, self.rows, size):
                index = torch.arange(start, min(start + size, self.rows))
                yield sample * self.rows + index, self.law(_again(values, self.fixed), index)["fn"]


class _Fitting(Messenger):
    """Looks whether draws from a guide fit the sites of the model that they are for."""

    def __init__(self, values: dict[str, Any]):
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        value, law = self.values.get(msg["name"]), msg["fn"]
        event_shape = getattr(law, "event_shape", ())
        if isinstance(value, Tensor) and value.shape[value.dim() - len(event_shape) :] != event_shape:
            raise ValueError(
                f"guide: expected a posterior of {msg['name']!r} of event shape {tuple(event_shape)}, got a draw of "
                f"shape {tuple(value.shape)}. Is it the guide of another model?"
            )


def _check_finite(prediction: Prediction, inputs: Any) -> None:
    """Never a silent NaN. A likelihood of another kind may have no mean or variance (a Cauchy): it is blamed only where
    the inputs are not finite either."""
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
    for leaf in tree_flatten(inputs)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and not bool(leaf.isfinite().all()):
            yield int((~leaf.isfinite()).reshape(len(leaf), -1).any(-1).nonzero()[0])


def _not_finite(inputs: Any, row: int, found: str) -> str:
    for odd in _odd_rows(inputs):
        return f"inputs: expected finite numbers, got NaN or infinity in row {odd}: {found}."
    return (
        f"expected a finite prediction, got another for row {row}: {found}. Are the parameters finite? Large inputs "
        "overflow: standardise them."
    )


def _again(values: dict[str, Any], fixed: Set[str] = frozenset()) -> dict[str, Any]:
    """The draws for another pass, in which noise per example is drawn anew, but for weights in ``fixed``."""
    return {
        n: LazyWeight(v.draw.again()) if isinstance(v, LazyWeight) and n not in fixed else v for n, v in values.items()
    }


def _mix(seed: int, number: int) -> int:
    """A seed for stream ``number``: far apart for neighbours (constants of the golden ratio, as in splitmix)."""
    return (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63


def _generator(seed: int, number: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
    return generator.manual_seed(_mix(seed ^ 0x5DEECE66D, number))
