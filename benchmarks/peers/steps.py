"""What a training step of other libraries costs, as a ratio to a plain PyTorch step, each written as its documentation
says.

    make peers                                             # in an environment of its own, .venv-peers
    python benchmarks/peers/steps.py --steps 50 --network 64-100-100-10

Two multilayer perceptrons, batch 100, float32, one thread. The methods take turns, in a new order in each round and
with a new batch for each step; medians of the processor time are compared. A turn is five steps, of which the first is
not timed: it brings the weights of this method back into the cache, where they are in a training run. Every step ends
with the loss as a number, as Pyro's ``SVI.step`` does. MAP with torch's default Adam is 1. A package that is missing or
fails is named and skipped.

Each function below holds what a user writes, from the network to a training step. *Lines* counts its statements,
imports of the package included; the lines of this harness (sizes, ``def step``, ``return``) do not count.
"""

import argparse
import ast
import contextlib
import functools
import importlib.metadata
import inspect
import json
import platform
import random
import re
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], float]

NETWORKS = {"784-400-400-10": [784, 400, 400, 10], "64-100-100-10": [64, 100, 100, 10]}
BATCH = 100
NUM_DATA = 60_000
# Steps in a turn, and turns before the clock counts.
TURN = 5
WARM_UP = 4
RESULTS = Path(__file__).resolve().parent.parent / "results" / "peers"
PACKAGES = ("torch", "numpy", "bayesian-torch", "ivon-opt", "pyro-ppl", "blitz-bayesian-pytorch", "vbll")


def mlp(sizes: list[int]) -> nn.Sequential:
    """The plain network."""
    a, b, c, d = sizes
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def plain(sizes: list[int], fused: bool) -> Step:
    """MAP."""
    net = mlp(sizes)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def mc_dropout(sizes: list[int], fused: bool) -> Step:
    """MC dropout in plain PyTorch."""
    a, b, c, d = sizes
    net = nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(a, b),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(b, c),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(c, d),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def bayesian_torch(sizes: list[int], fused: bool, kind: str) -> Step:
    """bayesian-torch: its README, with Flipout or Reparameterization."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = mlp(sizes)
    prior = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": kind,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(net, prior)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y) + get_kl_loss(net) / len(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ivon(sizes: list[int]) -> Step:
    """IVON: its README, one sample."""
    from ivon import IVON

    net = mlp(sizes)
    optimizer = IVON(net.parameters(), lr=0.1, ess=NUM_DATA)

    def step(x: Tensor, y: Tensor) -> float:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        optimizer.step()
        return loss.item()

    return step


def vbll(sizes: list[int], fused: bool) -> Step:
    """vbll: its tutorial on classification. The last layer is Bayesian, with no weight decay there."""
    from vbll import DiscClassification

    a, b, c, d = sizes
    features = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU())
    last = DiscClassification(c, d, regularization_weight=1 / NUM_DATA, parameterization="diagonal")
    groups = [{"params": features.parameters()}, {"params": last.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=1e-4, fused=fused)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = last(features(x)).train_loss_fn(y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def blitz(sizes: list[int], fused: bool, num_samples: int) -> Step:
    """blitz: its README and its example on MNIST."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class BayesianMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            a, b, c, d = sizes
            self.layers = nn.Sequential(
                BayesianLinear(a, b), nn.ReLU(), BayesianLinear(b, c), nn.ReLU(), BayesianLinear(c, d)
            )

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

    net: Any = BayesianMLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)
    criterion = nn.CrossEntropyLoss()

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = net.sample_elbo(x, y, criterion, sample_nbr=num_samples, complexity_cost_weight=1 / NUM_DATA)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def pyro_auto_normal(sizes: list[int], fused: bool) -> Step:
    """Pyro: the priors of its tutorial on modules, AutoNormal and the ELBO with KLs in closed form."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample
    from pyro.nn.module import to_pyro_module_
    from pyro.optim import Adam

    class Classifier(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(sizes)
            to_pyro_module_(self.net)
            for layer in self.net:
                for name, value in list(layer.named_parameters(recurse=False)):
                    prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                    setattr(layer, name, PyroSample(prior))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            logits = self.net(x)
            with pyro.plate("data", NUM_DATA, subsample=x):
                return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    model = Classifier()
    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 1e-3, "fused": fused}), TraceMeanField_ELBO())

    def step(x: Tensor, y: Tensor) -> float:
        loss = svi.step(x, y)
        return float(loss)

    return step


def vsd_svi(sizes: list[int], fused: bool) -> Step:
    """pyro_vsd: its README."""
    from pyro.infer import SVI
    from pyro.optim import Adam

    import pyro_vsd as vsd

    net = mlp(sizes)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=NUM_DATA)
    guide = vsd.VSDGuide(model)
    svi = SVI(model, guide, Adam({"lr": 1e-3, "fused": fused}), vsd.VSD_ELBO())

    def step(x: Tensor, y: Tensor) -> float:
        loss = svi.step(x, y)
        return float(loss)

    return step


def vsd_compiled(sizes: list[int], fused: bool) -> Step:
    """pyro_vsd: the compiled step."""
    import pyro_vsd as vsd

    net = mlp(sizes)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=NUM_DATA)
    guide = vsd.VSDGuide(model)
    objective = vsd.VSD_ELBO()(model, guide)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-3, fused=fused)
    compiled = vsd.compile_step(objective, optimizer)

    def step(x: Tensor, y: Tensor) -> float:
        loss = compiled(x, y)
        return float(loss)

    return step


def without_validation(sizes: list[int], fused: bool, method: Callable[[list[int], bool], Step]) -> Step:
    """Pyro's checks of shapes and values turned off, which a user does with one line at the start of the program."""
    import pyro

    with pyro.validation_enabled(False):
        inner = method(sizes, fused)

    def step(x: Tensor, y: Tensor) -> float:
        with pyro.validation_enabled(False):
            return inner(x, y)

    return step


#: A name, what makes the step, and the package it needs.
METHODS: dict[str, tuple[Callable[..., Step], str]] = {
    "MAP": (plain, "torch"),
    "MC dropout": (mc_dropout, "torch"),
    "vbll, last layer only": (vbll, "vbll"),
    "IVON": (ivon, "ivon-opt"),
    "bayesian-torch, Flipout": (functools.partial(bayesian_torch, kind="Flipout"), "bayesian-torch"),
    "bayesian-torch, Reparameterization": (
        functools.partial(bayesian_torch, kind="Reparameterization"),
        "bayesian-torch",
    ),
    "blitz, 1 sample": (functools.partial(blitz, num_samples=1), "blitz-bayesian-pytorch"),
    "blitz, 3 samples as in its README": (functools.partial(blitz, num_samples=3), "blitz-bayesian-pytorch"),
    "Pyro AutoNormal": (pyro_auto_normal, "pyro-ppl"),
    "Pyro AutoNormal, no validation": (functools.partial(without_validation, method=pyro_auto_normal), "pyro-ppl"),
    "VSD, SVI.step": (vsd_svi, "pyro_vsd"),
    "VSD, SVI.step, no validation": (functools.partial(without_validation, method=vsd_svi), "pyro_vsd"),
    "VSD, compiled step": (vsd_compiled, "pyro_vsd"),
}


def num_lines(method: Callable[..., Step]) -> int:
    """Statements of a method without its docstring and what belongs to this harness; the head of a block counts."""
    if isinstance(method, functools.partial):
        if method.func is without_validation:
            return num_lines(method.keywords["method"]) + 1
        method = method.func
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    assert isinstance(function, ast.FunctionDef)
    inner = [node for node in function.body if isinstance(node, ast.FunctionDef) and node.name in ("step", "predict")]
    harness = [function, function.body[0], function.body[-1], *inner, *(node.body[-1] for node in inner)]
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node not in harness]
    return sum(ast.unparse(statement) != "a, b, c, d = sizes" for statement in statements)


class Contestant:
    """One method with its optimiser: its step, and a param store of its own, since Pyro's names would clash."""

    def __init__(self, make: Callable[[], Step], seed: int) -> None:
        self.store: dict[str, Any] = {"params": {}, "constraints": {}}
        self.seconds: list[float] = []
        torch.manual_seed(seed)
        with self.scope():
            self.step = make()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        try:
            import pyro
        except ImportError:
            return contextlib.nullcontext()
        return pyro.get_param_store().scope(self.store)

    def run(self, x: Tensor, y: Tensor) -> float:
        """Takes a step and returns its seconds of processor time."""
        with self.scope():
            start = time.process_time()
            loss = self.step(x, y)
            seconds = time.process_time() - start
        if loss != loss or abs(loss) == float("inf"):
            raise FloatingPointError(f"the loss is {loss}")
        return seconds


def contestants(sizes: list[int], seed: int) -> tuple[dict[tuple[str, bool], Contestant], dict[str, str]]:
    """Every method with the default Adam and, where it uses Adam, the fused one; and why a method is missing."""
    found: dict[tuple[str, bool], Contestant] = {}
    skipped: dict[str, str] = {}
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(sizes[-1], (BATCH,))
    for name, (method, _) in METHODS.items():
        adam = "fused" in inspect.signature(method).parameters
        for fused in (False, True) if adam else (False,):
            make = functools.partial(method, sizes, fused) if adam else functools.partial(method, sizes)
            # A package may fail in any way, here or in its first step; the others are measured all the same.
            try:
                one = Contestant(make, seed)
                one.run(x, y)
            except Exception as error:
                text = re.sub(r" \(/.*?\)", "", str(error))  # Python adds the file that an import failed in
                skipped[name] = f"{type(error).__name__}: {text.partition(chr(10))[0]}"
                break
            found[name, fused] = one
    return {key: one for key, one in found.items() if key[0] not in skipped}, skipped


def measure(sizes: list[int], steps: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each method: its lines, and milliseconds and ratios to MAP with the default and the fused Adam."""
    found, skipped = contestants(sizes, seed)
    order = list(found.values())
    rounds = -(-steps // (TURN - 1))
    shuffle = random.Random(seed).shuffle
    # Labels that can be learned, and new rows each time: on one batch the gradients would soon be nearly zero.
    teacher = torch.randn(sizes[0], sizes[-1])
    for number in range(WARM_UP + rounds):
        shuffle(order)
        for one in order:
            for i in range(TURN):
                x = torch.randn(BATCH, sizes[0])
                seconds = one.run(x, (x @ teacher).argmax(-1))
                if number >= WARM_UP and i > 0:
                    one.seconds.append(seconds)
    medians = {key: statistics.median(one.seconds) for key, one in found.items()}
    rows = []
    for name, (method, package) in METHODS.items():
        if name in skipped:
            continue
        row: dict[str, Any] = {"method": name, "package": package, "lines": num_lines(method)}
        for fused, suffix in ((False, ""), (True, "_fused")):
            median = medians.get((name, fused))
            row["ms" + suffix] = median and round(1e3 * median, 3)
            row["ratio" + suffix] = median and round(median / medians["MAP", False], 3)
        rows.append(row)
    return rows, skipped


def show(network: str, rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    print(f"\nMLP {network}, batch {BATCH}\n")
    print("| method | lines | ms | × MAP | fused Adam: ms | × MAP |\n|---|---|---|---|---|---|")
    for row in rows:
        times = ("–" if row[key] is None else f"{row[key]:.2f}" for key in ("ms", "ratio", "ms_fused", "ratio_fused"))
        print(f"| {row['method']} | {row['lines']} | {' | '.join(times)} |")
    for name, reason in skipped.items():
        print(f"skipped: {name} ({reason})")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(ImportError):
        import pyro_vsd as vsd

        found["pyro_vsd"] = vsd.__version__
    return found | {"machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each method")
    parser.add_argument("--network", choices=sorted(NETWORKS), action="append", help="both if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="store the rows in benchmarks/results/peers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{name} {version}" for name, version in versions().items()), sep=", ")
    for network in args.network or NETWORKS:
        rows, skipped = measure(NETWORKS[network], args.steps, args.seed)
        show(network, rows, skipped)
        if args.write:
            variant = "mlp_" + network.replace("-", "_")
            result = {
                "task": "peers",
                "variant": variant,
                "seed": args.seed,
                "setting": {"sizes": NETWORKS[network], "batch_size": BATCH, "steps": args.steps, "threads": 1},
                "versions": versions(),
                "skipped": skipped,
                "rows": rows,
            }
            RESULTS.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
            (RESULTS / f"{variant}-seed{args.seed}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
