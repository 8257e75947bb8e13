"""How well other libraries predict, each used as its documentation says, beside ours: one scorer for all.

    make peers-quality DATA=FOLDER                             # all of these, in .venv-peers; resumes
    python -m benchmarks.peers.quality --task digits           # from the root of the clone
    python -m benchmarks.peers.quality --task uci --data FOLDER    # FOLDER/UCI_Datasets
    python -m benchmarks.peers.quality --task mnist --data FOLDER  # or cifar: what shift.py reads
    python -m benchmarks.peers.quality --cost                  # a step and a prediction, of the plain network's
    python -m benchmarks.peers.quality --write                 # the tables of what is stored into README.md

Digits, MNIST and CIFAR-10: the splits, networks, batches, numbers of steps and samples, and the scorer of
``benchmarks/shift.py``. Its stored results are the rows of our methods and of the baselines. UCI: published splits, one
hidden layer of 50, 3,000 steps. A package gets the learning rate, loss and prior of its own documentation. Rows with
"our rate" have the rule that shift.py has for its methods instead: Adam from 0.01 (MNIST and CIFAR-10: 0.001) to zero
along a cosine. Where the documentation states no rate, they have this rule too. What it leaves to the user is chosen on
15 % of the training rows. Each (task, method, split) leaves a small JSON file in ``results/peers_quality``. A package
that is missing or fails is named and skipped.

Each function of a method holds what a user writes, from the network to a step and a prediction.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyro_vsd as vsd
from benchmarks import ensembles, shift
from benchmarks.peers import steps
from benchmarks.peers.steps import mlp

RESULTS = Path(__file__).resolve().parents[1] / "results" / "peers_quality"
PAGE = Path(__file__).resolve().parent / "README.md"
SAMPLES = shift.TASKS["digits"].samples
UCI = ("yacht", "boston", "energy", "concrete", "wine", "kin8nm", "power", "naval")
LARGER = ("mnist", "cifar")
HIDDEN, UCI_STEPS = 50, 3000
#: splits of a task, and the fewest of a row in the table of digits
SPLITS, FEWEST = 5, 3
Step = Callable[[Tensor, Tensor], float]
#: an optimiser, a step, and a prediction: probabilities (S, N, C), or means and standard deviations (S, N, 1)
Parts = tuple[Any, Step, Callable[[Tensor], Any]]
Network = Callable[[], nn.Sequential]
Make = Callable[[Any, int], Parts]  # from a function that makes a network, or from sizes of a perceptron


# ---- classification: what a user writes


def plain(network: Network, num_data: int) -> Parts:
    """A network without uncertainty, with the optimiser of shift.py: what a step and a prediction are compared with."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            probs = net(x).softmax(-1)
        return probs.unsqueeze(0)

    return optimizer, step, predict


def bayesian_torch(network: Network, num_data: int, kind: str, by_rows: bool = False, samples: int = SAMPLES) -> Parts:
    """bayesian-torch: its README, which divides the KL by the rows of a batch; here also by all rows."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = network()
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
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y) + get_kl_loss(net) / (num_data if by_rows else len(x))
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> Tensor:
        net.eval()
        with torch.no_grad():
            probs = [net(x).softmax(-1) for _ in range(samples)]
        return torch.stack(probs)

    return optimizer, step, predict


def ivon(network: Network, num_data: int, lr: float = 0.1, hess_init: float = 1.0, samples: int = SAMPLES) -> Parts:
    """IVON: its README, one sample in training."""
    from ivon import IVON

    net = network()
    optimizer = IVON(net.parameters(), lr=lr, ess=num_data, hess_init=hess_init)

    def step(x: Tensor, y: Tensor) -> float:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> Tensor:
        probs = []
        for _ in range(samples):
            with optimizer.sampled_params(), torch.no_grad():
                probs.append(net(x).softmax(-1))
        return torch.stack(probs)

    return optimizer, step, predict


def vbll(network: Network, num_data: int) -> Parts:
    """vbll: its tutorial on classification, with the clipping that its tutorials recommend."""
    from vbll import DiscClassification

    *layers, linear = network()
    features, last = (
        nn.Sequential(*layers),
        DiscClassification(
            linear.in_features, linear.out_features, regularization_weight=1 / num_data, parameterization="diagonal"
        ),
    )
    groups = [{"params": features.parameters()}, {"params": last.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=1e-4)
    parameters = [*features.parameters(), *last.parameters()]

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = last(features(x)).train_loss_fn(y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            probs = last(features(x)).predictive.probs
        return probs.unsqueeze(0)

    return optimizer, step, predict


def torch_uncertainty(sizes: tuple[int, ...], num_data: int, samples: int = SAMPLES) -> Parts:
    """torch-uncertainty: its tutorial on Bayesian networks, with its loss and without its Lightning trainer."""
    from torch_uncertainty.losses import ELBOLoss
    from torch_uncertainty.models.mlp import bayesian_mlp

    a, b, c, d = sizes
    net = bayesian_mlp(in_features=a, num_outputs=d, hidden_dims=[b, c], num_samples=samples)
    elbo = ELBOLoss(model=net, inner_loss=nn.CrossEntropyLoss(), kl_weight=1 / 10000, num_samples=3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = elbo(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> Tensor:
        net.eval()
        with torch.no_grad():
            probs = net(x).softmax(-1)
        return probs.reshape(samples, len(x), -1)

    return optimizer, step, predict


def blitz(sizes: tuple[int, ...], num_data: int, samples: int = SAMPLES) -> Parts:
    """blitz: its README and its example on MNIST, with three samples in a step."""
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
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = net.sample_elbo(x, y, criterion, sample_nbr=3, complexity_cost_weight=1 / num_data)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            probs = [net(x).softmax(-1) for _ in range(samples)]
        return torch.stack(probs)

    return optimizer, step, predict


def auto_normal(network: Network, num_data: int, samples: int = SAMPLES, shape: tuple[int, ...] = (64,)) -> Parts:
    """Pyro: the priors of its tutorial on modules, AutoNormal and the ELBO with KLs in closed form."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Predictive, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample
    from pyro.nn.module import to_pyro_module_

    class Classifier(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            to_pyro_module_(self.net)
            for layer in self.net:
                for name, value in list(layer.named_parameters(recurse=False)):
                    prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                    setattr(layer, name, PyroSample(prior))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            logits = pyro.deterministic("logits", self.net(x), event_dim=2)
            with pyro.plate("data", num_data, subsample=x):
                pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    model = Classifier()
    guide = AutoNormal(model)
    guide(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    elbo = TraceMeanField_ELBO()(model, guide)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = elbo(x, y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def predict(x: Tensor) -> Tensor:
        predictive = Predictive(model, guide=guide, num_samples=samples, return_sites=("logits",))
        with torch.no_grad():
            logits = predictive(x)["logits"]
        return logits.reshape(samples, len(x), -1).softmax(-1)

    return optimizer, step, predict


def structured_dropout(network: Network, num_data: int) -> Parts:
    """pyro_vsd: its README, with steps of SVI; here to count its lines. The results are those of ``vsd.fit``."""
    from pyro.infer import SVI
    from pyro.optim import Adam

    import pyro_vsd as vsd

    net = network()
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=num_data)
    guide = vsd.VSDGuide(model)
    optimizer = Adam({"lr": 1e-2})
    svi = SVI(model, guide, optimizer, vsd.VSD_ELBO())

    def step(x: Tensor, y: Tensor) -> float:
        loss = svi.step(x, y)
        return float(loss)

    def predict(x: Tensor) -> Tensor:
        prediction = vsd.predict(model, guide, x, num_samples=SAMPLES)
        return prediction.require_samples("quality")

    return optimizer, step, predict


def laplace_example(net: nn.Module, rows: Any) -> Any:
    """laplace-torch: its example on calibration. Last layer, Kronecker factors, precision by marginal likelihood."""
    from laplace import Laplace

    la = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(torch.utils.data.DataLoader(rows, batch_size=100))
    la.optimize_prior_precision(method="marglik")

    def predict(x: Tensor) -> Tensor:
        probs = torch.cat([la(part) for part in x.split(100)]).detach()
        return probs.unsqueeze(0)

    return float(la.prior_precision.mean()), predict


# ---- regression: what a user writes


def plain_regression(sizes: tuple[int, ...], num_data: int, p: float = 0.0, decay: float = 0.0) -> Parts:
    """A network with one learned σ, and MC dropout where p is above zero."""
    net = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Dropout(p), nn.Linear(sizes[1], 1))
    log_sigma = nn.Parameter(torch.zeros(1))
    groups = [{"params": net.parameters(), "weight_decay": decay}, {"params": [log_sigma]}]
    optimizer = torch.optim.Adam(groups, lr=1e-2, fused=True)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = 0.5 * ((net(x) - y) / log_sigma.exp()).square().mean() + log_sigma.sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        net.train(p > 0)
        with torch.no_grad():
            means = torch.stack([net(x) for _ in range(SAMPLES if p else 1)])
        return means, log_sigma.exp().detach()

    return optimizer, step, predict


def ivon_regression(sizes: tuple[int, ...], num_data: int, lr: float = 0.1, hess_init: float = 1.0) -> Parts:
    """IVON: its README, with a Gaussian likelihood whose σ is one more weight."""
    from ivon import IVON

    net = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], 1))
    log_sigma = nn.Parameter(torch.zeros(1))
    optimizer = IVON([*net.parameters(), log_sigma], lr=lr, ess=num_data, hess_init=hess_init)

    def step(x: Tensor, y: Tensor) -> float:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = 0.5 * ((net(x) - y) / log_sigma.exp()).square().mean() + log_sigma.sum()
            loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        means, scales = [], []
        for _ in range(SAMPLES):
            with optimizer.sampled_params(), torch.no_grad():
                means.append(net(x))
                scales.append(log_sigma.exp().expand_as(means[-1]))
        return torch.stack(means), torch.stack(scales)

    return optimizer, step, predict


def vbll_regression(sizes: tuple[int, ...], num_data: int) -> Parts:
    """vbll: its tutorial on regression."""
    from vbll import Regression

    features = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU())
    last = Regression(sizes[1], 1, 1 / num_data, prior_scale=1.0, wishart_scale=0.1)
    groups = [{"params": features.parameters()}, {"params": last.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-4)
    parameters = [*features.parameters(), *last.parameters()]

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = last(features(x)).train_loss_fn(y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = last(features(x)).predictive
        return found.mean.reshape(1, -1, 1), found.covariance.reshape(1, -1, 1).sqrt()

    return optimizer, step, predict


def torch_uncertainty_regression(sizes: tuple[int, ...], num_data: int) -> Parts:
    """torch-uncertainty: the setting of its experiments on Boston, in which σ depends on the input."""
    from torch_uncertainty.losses import DistributionNLLLoss, ELBOLoss
    from torch_uncertainty.models.mlp import bayesian_mlp

    net = bayesian_mlp(
        in_features=sizes[0], num_outputs=1, hidden_dims=[sizes[1]], dist_family="normal", num_samples=SAMPLES
    )
    elbo = ELBOLoss(model=net, inner_loss=DistributionNLLLoss(), kl_weight=2e-5, num_samples=3, dist_family="normal")
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = elbo(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        net.eval()
        with torch.no_grad():
            found = net(x)
        return found["loc"].reshape(SAMPLES, -1, 1), found["scale"].reshape(SAMPLES, -1, 1)

    return optimizer, step, predict


def blitz_regression(sizes: tuple[int, ...], num_data: int) -> Parts:
    """blitz: its example on Boston. Its intervals are those of the samples; it has no noise variance."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class BayesianRegressor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(BayesianLinear(sizes[0], sizes[1]), nn.ReLU(), BayesianLinear(sizes[1], 1))

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

    net: Any = BayesianRegressor()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    criterion = nn.MSELoss()

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = net.sample_elbo(x, y, criterion, sample_nbr=3, complexity_cost_weight=1 / num_data)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            samples = torch.stack([net(x) for _ in range(SAMPLES)])
        return samples.mean(0, keepdim=True), samples.std(0, keepdim=True)

    return optimizer, step, predict


def auto_normal_regression(sizes: tuple[int, ...], num_data: int) -> Parts:
    """Pyro: the priors of its tutorials on modules and on regression, AutoNormal."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Predictive, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample
    from pyro.nn.module import to_pyro_module_

    class Regressor(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], 1))
            to_pyro_module_(self.net)
            for layer in self.net:
                for name, value in list(layer.named_parameters(recurse=False)):
                    prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                    setattr(layer, name, PyroSample(prior))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
            mean = pyro.deterministic("mean", self.net(x), event_dim=2)
            with pyro.plate("data", num_data, subsample=x):
                pyro.sample("y", dist.Normal(mean.squeeze(-1), sigma), obs=None if y is None else y.squeeze(-1))

    model = Regressor()
    guide = AutoNormal(model)
    guide(torch.zeros(1, sizes[0]), torch.zeros(1, 1))
    elbo = TraceMeanField_ELBO()(model, guide)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = elbo(x, y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        predictive = Predictive(model, guide=guide, num_samples=SAMPLES, return_sites=("mean", "sigma"))
        with torch.no_grad():
            found = predictive(x)
        return found["mean"].reshape(SAMPLES, -1, 1), found["sigma"].reshape(SAMPLES, 1, 1)

    return optimizer, step, predict


def laplace_regression(net: nn.Module, rows: Any) -> Any:
    """laplace-torch: its example on regression. All weights, no factors; precision and σ by marginal likelihood."""
    from laplace import Laplace

    la = Laplace(net, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(torch.utils.data.DataLoader(rows, batch_size=100))
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(1000):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = la(x)
        scale = (variance.reshape(-1, 1) + la.sigma_noise.square()).sqrt()
        return mean.detach().unsqueeze(0), scale.detach().unsqueeze(0)

    return {"prior precision": float(log_prior.exp()), "sigma": float(log_sigma.exp())}, predict


# ---- training: the same for all


def train(
    make: Callable[[int], Parts], rows: Any, epochs: int, batch: int, seed: int, rate: float | None = None
) -> Callable[[Tensor], Any]:
    """Takes the steps, and returns what predicts. With a rate: from it down to zero along a cosine.

    :param make: from the number of rows to what it takes.
    """
    import pyro

    pyro.clear_param_store()
    torch.manual_seed(seed)
    optimizer, step, predict = make(len(rows))
    schedule = None
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = epochs * sum(1 for _ in rows.batches(batch))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    column = rows.y.is_floating_point()
    for _ in range(epochs):
        for x, y in rows.batches(batch):
            loss = step(x, y.unsqueeze(-1) if column else y)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss}")
            if schedule:
                schedule.step()
    return predict


def seeded(predict: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return predict(x)


# ---- images: methods from a split of shift.py to a prediction


def made_for(make: Make, split: shift.Split) -> Callable[[int], Parts]:
    """The function with the network of a task, its number of samples, and the shape of an input where it asks."""
    task = split.task
    layers = [layer for layer in task.network() if isinstance(layer, nn.Linear)]
    sizes = [layers[0].in_features, *(layer.out_features for layer in layers)]
    own = {"samples": task.samples, "shape": split.train.x.shape[1:]}
    own = {name: value for name, value in own.items() if name in inspect.signature(make).parameters}
    if make in PERCEPTRONS:
        return functools.partial(make, sizes, **own)
    # with torch's own weights, but for convolutions, where the paper's network comes with weights of its own
    return functools.partial(make, functools.partial(mlp, sizes) if is_perceptron(task) else task.network, **own)


def is_perceptron(task: shift.Task) -> bool:
    return not any(isinstance(layer, nn.Conv2d) for layer in task.network())


def classes(predict: Callable[[Tensor], Tensor]) -> shift.Predict:
    def made(x: Tensor) -> vsd.ClassificationPrediction:
        parts = [seeded(predict, part) for part in x.split(2000)]
        return vsd.ClassificationPrediction.from_samples(torch.cat(parts, 1).detach())

    return made


def images(make: Make, our_rate: bool = False) -> shift.Method:
    """A method that is trained."""

    def method(split: shift.Split) -> tuple[shift.Predict, dict[str, Any]]:
        rate = split.task.rate if our_rate else None
        found = train(made_for(make, split), split.data, split.epochs, shift.BATCH, split.seed, rate)
        return classes(found), {}

    return method


def ivon_tuned(split: shift.Split) -> tuple[shift.Predict, dict[str, Any]]:
    """Rate and initial curvature, for which the paper of IVON has guidelines and no value, and a cosine."""

    def fitted(rows: Any, chosen: tuple[float, float]) -> shift.Predict:
        lr, hess_init = chosen
        make = made_for(functools.partial(ivon, lr=lr, hess_init=hess_init), split)
        return classes(train(make, rows, split.epochs, shift.BATCH, split.seed, lr))

    def score(chosen: tuple[float, float]) -> float:
        return vsd.metrics.nll(fitted(split.rest, chosen)(split.held_out.x), split.held_out.y)

    lr, hess_init = min(IVON_GRID, key=score)
    return fitted(split.data, (lr, hess_init)), {"lr": lr, "hess_init": hess_init}


def laplace_of_plain(split: shift.Split) -> tuple[shift.Predict, dict[str, Any]]:
    """For the plain network of shift.py, whose weight decay held-out rows have chosen."""
    import laplace as _  # noqa: F401 (before the networks are trained)

    net = shift.contiguous(split.fitted(split.data, split.without_held_out[0]))
    precision, predict = laplace_example(net, split.data)
    return classes(predict), {"prior precision": precision}


#: what is written for perceptrons alone, since the package has layers of its own
PERCEPTRONS = (torch_uncertainty, blitz)
IVON_GRID = list(itertools.product((0.03, 0.1, 0.3), (0.1, 1.0)))
FLIPOUT = functools.partial(bayesian_torch, kind="Flipout")
REPARAMETERIZATION = functools.partial(bayesian_torch, kind="Reparameterization")
#: name of a row: its method, the function with what a user writes, and its package
IMAGES: dict[str, tuple[shift.Method, Callable[..., Any], str]] = {
    "laplace-torch, its example": (laplace_of_plain, laplace_example, "laplace-torch"),
    "IVON": (images(ivon), ivon, "ivon-opt"),
    "IVON, tuned": (ivon_tuned, ivon, "ivon-opt"),
    "vbll": (images(vbll), vbll, "vbll"),
    "bayesian-torch, Flipout": (images(FLIPOUT, our_rate=True), FLIPOUT, "bayesian-torch"),
    "bayesian-torch, Reparameterization": (
        images(REPARAMETERIZATION, our_rate=True), REPARAMETERIZATION, "bayesian-torch",
    ),
    "bayesian-torch, Flipout, KL / all rows": (
        images(functools.partial(FLIPOUT, by_rows=True), our_rate=True), FLIPOUT, "bayesian-torch",
    ),
    "Pyro AutoNormal": (images(auto_normal, our_rate=True), auto_normal, "pyro-ppl"),
    "torch-uncertainty": (images(torch_uncertainty), torch_uncertainty, "torch-uncertainty"),
    "blitz": (images(blitz), blitz, "blitz-bayesian-pytorch"),
    "vbll, our rate": (images(vbll, our_rate=True), vbll, "vbll"),
    "torch-uncertainty, our rate": (images(torch_uncertainty, our_rate=True), torch_uncertainty, "torch-uncertainty"),
    "blitz, our rate": (images(blitz, our_rate=True), blitz, "blitz-bayesian-pytorch"),
}  # fmt: skip
#: what a user writes for rows of shift.py
WRITTEN = {"plain": plain, "VSD": structured_dropout}
#: rows of shift.py in the tables: baselines above the packages, ours below them
ABOVE = ("plain", "temperature", "MC dropout", "deep ensemble of 5", "Laplace, last layer", "Laplace, all layers")
OURS = ("VD", "VSD", "from_trained", "VSD ensemble")
COSTS = ("step", "prediction")
#: names in the tables, where they are not the names of the results
TITLES = {
    "plain": "plain network",
    "temperature": "plain, temperature",
    "MC dropout": "MC dropout, tuned",
    "Laplace, last layer": "laplace-torch, last layer, tuned",
    "Laplace, all layers": "laplace-torch, all layers, tuned",
    "VD": "**VD**",
    "VSD": "**VSD**",
    "from_trained": "**from_trained**",
    "VSD ensemble": "**VSD ensemble**",
}


# ---- UCI: methods from a split to a prediction


@dataclass
class Table:
    """A split of a UCI set, and the plain networks that several methods share."""

    name: str
    seed: int
    folder: str
    steps: int = UCI_STEPS

    def __post_init__(self) -> None:
        self.train, self.test = vsd.datasets.uci(self.name, self.folder, self.seed, dtype=torch.float32)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1000 + self.seed))
        held = round(shift.HELD_OUT * len(self.train))
        self.held_out, self.rest = self.train[order[:held]], self.train[order[held:]]
        self.sizes = (self.train.x.shape[1], HIDDEN, 1)

    def fitted(self, make: Make, rows: Any, rate: float | None = 1e-2, number: int = 0) -> Callable[[Tensor], Any]:
        """Batches of a fifth of the rows, as in ``vsd.fit``."""
        batch = min(200, max(8, len(rows) // 5))
        epochs = math.ceil(self.steps / math.ceil(len(rows) / batch))
        return train(functools.partial(make, self.sizes), rows, epochs, batch, 100 * self.seed + number, rate)

    def tuned(self, makes: dict[Any, Make]) -> Any:
        """What the held-out rows choose among several ways to train."""

        def score(chosen: Any) -> float:
            prediction = normals(self.fitted(makes[chosen], self.rest), self.held_out.x)
            return -vsd.metrics.log_likelihood(prediction, self.held_out.y)

        return min(makes, key=score)

    @cached_property
    def decay(self) -> float:
        return self.tuned({d: functools.partial(plain_regression, decay=d) for d in shift.TASKS["digits"].decays})

    @cached_property
    def plain(self) -> list[Callable[[Tensor], Any]]:
        """Networks from different starts."""
        make = functools.partial(plain_regression, decay=self.decay)
        return [self.fitted(make, self.train, number=number) for number in range(shift.ENSEMBLE)]


Normals = Callable[[Tensor], vsd.RegressionPrediction]
Regression = Callable[[Table], tuple[Normals, dict[str, Any]]]


def normals(predict: Callable[[Tensor], Any], x: Tensor) -> vsd.RegressionPrediction:
    means, scales = seeded(predict, x)
    means = means.squeeze(-1)
    scales = scales.squeeze(-1) if scales.dim() == 3 else scales
    return vsd.RegressionPrediction.from_samples(means, scales.expand_as(means).clone())


def regression(make: Make, our_rate: bool = False) -> Regression:
    def method(table: Table) -> tuple[Normals, dict[str, Any]]:
        found = table.fitted(make, table.train, 1e-2 if our_rate else None)
        return lambda x: normals(found, x), {}

    return method


def plain_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    return lambda x: normals(table.plain[0], x), {"weight decay": table.decay}


def sigma_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    """The plain network with σ from held-out rows, which is what a temperature is to classes."""
    held_out = table.held_out
    before = normals(table.fitted(functools.partial(plain_regression, decay=table.decay), table.rest), held_out.x)
    sigma = (before.mean - held_out.y).square().mean().sqrt()
    return lambda x: normals(lambda rows: (table.plain[0](rows)[0], sigma), x), {"sigma": float(sigma)}


def dropout_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    makes = {p: functools.partial(plain_regression, p=p) for p in (0.01, 0.05, 0.1, 0.2)}
    p = table.tuned(makes)
    found = table.fitted(makes[p], table.train)
    return lambda x: normals(found, x), {"p": p}


def ensemble_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    return lambda x: vsd.ensemble.mixture([normals(one, x) for one in table.plain]), {"weight decay": table.decay}


def laplace_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    import laplace as _  # noqa: F401 (before the network is trained)

    nets = []

    def make(sizes: tuple[int, ...], num_data: int) -> Parts:
        net = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        nets.append(net)

        def step(x: Tensor, y: Tensor) -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return optimizer, step, net

    table.fitted(make, table.train)
    rows = torch.utils.data.TensorDataset(table.train.x, table.train.y.unsqueeze(-1))
    chosen, predict = laplace_regression(nets[0], rows)
    return lambda x: normals(predict, x), chosen


def ivon_table(table: Table) -> tuple[Normals, dict[str, Any]]:
    """As for images: rate and initial curvature chosen, and a cosine."""

    def fitted(rows: Any, chosen: tuple[float, float]) -> Normals:
        make = functools.partial(ivon_regression, lr=chosen[0], hess_init=chosen[1])
        found = table.fitted(make, rows, chosen[0])
        return lambda x: normals(found, x)

    def score(chosen: tuple[float, float]) -> float:
        with contextlib.suppress(FloatingPointError, ValueError):  # a rate that is too large
            value = vsd.metrics.log_likelihood(fitted(table.rest, chosen)(table.held_out.x), table.held_out.y)
            return -value if math.isfinite(value) else math.inf
        return math.inf

    chosen = min(IVON_GRID, key=score)
    return fitted(table.train, chosen), {"lr": chosen[0], "hess_init": chosen[1]}


def ours(**options: Any) -> Regression:
    def method(table: Table) -> tuple[Normals, dict[str, Any]]:
        torch.manual_seed(table.seed)
        net = vsd.nn.bayesianize(vsd.nn.mlp(list(table.sizes)))
        model = vsd.nn.Regressor(net, num_data=len(table.train), noise="learned")
        guide = vsd.VSDGuide(model, **options)
        vsd.fit(model, guide, table.train, seed=table.seed, progress=False)
        return lambda x: vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0), {}

    return method


def ensemble_of_ours(table: Table) -> tuple[Normals, dict[str, Any]]:
    def make() -> vsd.nn.Regressor:
        net = vsd.nn.bayesianize(vsd.nn.mlp(list(table.sizes)))
        return vsd.nn.Regressor(net, num_data=len(table.train), noise="learned")

    ensemble = vsd.Ensemble(make, seed=table.seed)
    ensemble.fit(table.train, progress=False)
    return lambda x: ensemble.predict(x, num_samples=SAMPLES, seed=0), {"weights": ensemble.weights.tolist()}


#: rows of the tables of the UCI sets; bayesian-torch documents no regression
TABLES: dict[str, tuple[Regression, Callable[..., Any] | None, str]] = {
    "plain network": (plain_table, plain_regression, "torch"),
    "plain, noise from held-out rows": (sigma_table, None, "torch"),
    "MC dropout, tuned": (dropout_table, plain_regression, "torch"),
    "deep ensemble of 5": (ensemble_table, None, "torch"),
    "laplace-torch": (laplace_table, laplace_regression, "laplace-torch"),
    "IVON": (regression(ivon_regression), ivon_regression, "ivon-opt"),
    "IVON, tuned": (ivon_table, ivon_regression, "ivon-opt"),
    "vbll": (regression(vbll_regression), vbll_regression, "vbll"),
    "vbll, our rate": (regression(vbll_regression, our_rate=True), vbll_regression, "vbll"),
    "Pyro AutoNormal": (regression(auto_normal_regression, our_rate=True), auto_normal_regression, "pyro-ppl"),
    "torch-uncertainty": (
        regression(torch_uncertainty_regression), torch_uncertainty_regression, "torch-uncertainty",
    ),
    "blitz": (regression(blitz_regression), blitz_regression, "blitz-bayesian-pytorch"),
    "**VD**": (ours(num_reflections=0), None, "pyro_vsd"),
    "**VSD**": (ours(), None, "pyro_vsd"),
    "**VSD ensemble**": (ensemble_of_ours, None, "pyro_vsd"),
}  # fmt: skip


# ---- measuring


def scores_of_table(predict: Normals, table: Table) -> dict[str, float]:
    """In the targets' units."""
    prediction = predict(table.test.x).to(torch.float64).rescaled(table.test.y_std, table.test.y_mean)
    y = table.test.y.double() * table.test.y_std + table.test.y_mean
    functions = {"log_likelihood": vsd.metrics.log_likelihood, "rmse": vsd.metrics.rmse, "crps": vsd.metrics.crps}
    functions |= {"coverage": vsd.metrics.coverage, "calibration_error": vsd.metrics.calibration_error}
    return {name: shift.rounded(function(prediction, y)) for name, function in functions.items()}


def rows_of_images(task: str) -> dict[str, tuple[shift.Method, Callable[..., Any], str]]:
    """The packages' rows of a task."""
    return {n: row for n, row in IMAGES.items() if is_perceptron(shift.TASKS[task]) or row[1] not in PERCEPTRONS}


def path_of(task: str, method: str, split: int) -> Path:
    return RESULTS / shift.path_of(task, method.strip("*"), split).name


def version(package: str) -> str:
    return vsd.__version__ if package == "pyro_vsd" else importlib.metadata.version(package)


def run(task: str, methods: list[str], seed: int, folder: str | None, short: bool = False) -> None:
    """Measures what is not stored of a split. A short run takes few steps and stores nothing."""
    rows: dict[str, Any] = TABLES if task in UCI else rows_of_images(task)
    elsewhere = from_ensembles(task) if task in UCI and not short else {}
    split: Any = None
    for method in [name for name in rows if not methods or name.strip("*") in methods]:
        path = path_of(task, method, seed)
        if (path.exists() and not short) or seed in elsewhere.get(method, {}):
            continue
        if split is None and task in UCI:
            split = Table(task, seed, str(folder), steps=20 if short else UCI_STEPS)
        elif split is None:
            split = shift.Split(shift.TASKS[task], seed, folder, epochs=1 if short else None)
        start = time.process_time()
        # A package may fail in any way; the others are measured all the same.
        try:
            used = version(rows[method][2])
            predict, chosen = rows[method][0](split)
            found = scores_of_table(predict, split) if task in UCI else shift.quality(predict, split)
        except Exception as error:
            print(f"{task} {method}: skipped, {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        seconds = round(time.process_time() - start, 1)
        result = {"method": method.strip("*"), "seed": seed, "version": used, "chosen": chosen}
        if not short:
            text = json.dumps(result | {"cpu_seconds": seconds} | found, indent=1, allow_nan=False)
            path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name:60s} {seconds:6.0f} s  {found.get('clean', found)}", flush=True)


def cost(task: str, folder: str | None, rounds: int = 5, number: int = 20) -> dict[str, dict[str, float]]:
    """A step, and a prediction of up to 1,000 test rows, in multiples of the plain network's, as in shift.py."""
    split = shift.Split(shift.TASKS[task], 0, folder, epochs=10 if task == "digits" else 1)
    batches = list(split.train.batches(shift.BATCH))[:10]
    found: dict[str, Callable[..., Parts]] = {"plain": plain} | {
        name: function for name, (_, function, _) in rows_of_images(task).items()
        if not name.startswith("laplace") and not name.endswith(("our rate", "tuned", "all rows"))
    }  # fmt: skip
    parts: dict[str, Parts] = {}
    for name, make in found.items():
        try:
            parts[name] = made_for(make, split)(len(split.train))
        except ImportError as error:
            print(f"{name}: left out, {error}")

    def some_steps(step: Step) -> None:
        for i in range(number):
            step(*batches[i % len(batches)])

    for _, step, _ in parts.values():
        some_steps(step)
    takes = shift.medians(
        {name: step for name, (_, step, _) in parts.items()}, lambda s: shift.seconds(some_steps, s), rounds
    )
    predictors: dict[str, Any] = {name: predict for name, (_, _, predict) in parts.items()}
    for name, (method, _, _) in IMAGES.items():
        if name.startswith("laplace"):
            with contextlib.suppress(ImportError):
                predictors[name], takes[name] = method(split)[0], 1.0
    costs = shift.medians(predictors, lambda predict: shift.seconds(predict, split.test.x[:1000], 0.1), rounds)
    return {n: {"step": shift.rounded(takes[n]), "prediction": shift.rounded(costs[n])} for n in predictors}


# ---- tables


def lines(function: Callable[..., Any] | None) -> str:
    return "" if function is None else str(steps.num_lines(function))


def from_ensembles(task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Stored results of benchmarks/ensembles.py and of the paper's experiments on the same splits."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for seed in range(SPLITS):
        path = RESULTS.parent / "ensembles" / f"{task}-{seed:02d}-seed0.json"
        methods = json.loads(path.read_text(encoding="utf-8"))["methods"]
        found.setdefault("**VSD**", {})[seed] = methods["single"]
        found.setdefault("**VSD ensemble**", {})[seed] = methods[ensembles.OURS]
        path = RESULTS.parent / f"uci_{task}" / "mc_dropout-seed0.json"
        every = json.loads(path.read_text(encoding="utf-8"))["groups"]["tuned"]
        scores = {metric: every[metric][seed] for metric in ("log_likelihood", "rmse", "coverage")}
        found.setdefault("MC dropout, tuned", {})[seed] = scores
    return found


def stored(task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Results by name and split, also of shift.py and ensembles.py. Of a UCI set: the splits that all rows have."""
    elsewhere = from_ensembles(task) if task in UCI else shift.stored(task)
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method in TABLES if task in UCI else (*ABOVE, *IMAGES, *OURS):
        paths = {seed: path_of(task, method, seed) for seed in range(SPLITS)}
        results = {seed: json.loads(path.read_text(encoding="utf-8")) for seed, path in paths.items() if path.exists()}
        results = results or elsewhere.get(method, {})
        if len(results) >= (FEWEST if task == "digits" else 1):
            found[method] = results
    if found.keys() <= elsewhere.keys():
        return {}
    if task not in UCI:
        return found
    shared = set.intersection(*(set(own) for own in found.values()))
    return {method: {seed: own[seed] for seed in sorted(shared)} for method, own in found.items()} if shared else {}


def titled(method: str, results: dict[int, Any], most: int, runs: str = "split") -> str:
    """The name in a table, with the number of runs where a row has fewer than others."""
    number = f" ({len(results)} {runs}{'s' * (len(results) > 1)})" if len(results) < most else ""
    return TITLES.get(method, method) + number


def image_columns(task: str) -> list[shift.Column]:
    columns = [*shift.CLEAN[:3], *shift.shifted(task), *shift.detected(task)[::2]]
    return [(title.replace("AUROC, ", "AUROC: "), read, form) for title, read, form in columns]


def image_table(task: str) -> str:
    results, path = stored(task), RESULTS / f"{task}-cost.json"
    price = shift.costs(task) | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    columns, rows, number = image_columns(task), {}, shift.equivalents(task, results)
    for method, cells in shift.rows_of(columns, results).items():
        about = price.get(method.removesuffix(", our rate").removesuffix(", tuned").removesuffix(", KL / all rows"), {})
        function = IMAGES[method][1] if method in IMAGES else WRITTEN.get(method)
        cells += [number[method], lines(function)]
        cells += [shift.times(about[key]) if key in about else "" for key in COSTS if price]
        runs = "split" if task == "digits" else "seed"
        rows[titled(method, results[method], len(results["VSD"]), runs)] = cells
    return shift.markdown(
        "", [title for title, _, _ in columns] + ["equivalent", "lines", *(COSTS if price else ())], rows
    )


def image_differences(task: str) -> str:
    """VSD minus each other method, on the same splits."""
    results, columns, rows = stored(task), image_columns(task), {}
    for method, own in results.items():
        seeds = sorted(set(own) & set(results["VSD"]))
        if method != "VSD" and len(seeds) > 2:
            rows[titled(method, own, len(results["VSD"]))] = [
                shift.interval([read(results["VSD"][s]) - read(own[s]) for s in seeds], form)  # type: ignore[operator]
                for _, read, form in columns
            ]
    return shift.markdown("VSD minus", [title for title, _, _ in columns], rows)


def uci_table(metric: str, sign: float, form: str) -> str:
    results = {task: found for task in UCI if (found := stored(task))}
    titles = [f"{task.capitalize()} ({len(found['**VSD**'])})" for task, found in results.items()]
    rows = {}
    for method in TABLES:
        values = [[sign * r[metric] for r in own.get(method, {}).values() if metric in r] for own in results.values()]
        if any(values):
            rows[method] = [shift.estimate(own, form) for own in values]
    return shift.markdown("", titles, rows)


def mean_ranks() -> str:
    """How the methods rank on average over sets and splits."""
    places: dict[str, dict[str, list[int]]] = {}
    for found in map(stored, UCI):
        for seed in found.get("**VSD**", {}):
            for metric, sign in (("log_likelihood", -1), ("rmse", 1)):
                values = {method: sign * own[seed][metric] for method, own in found.items()}
                for method, value in values.items():
                    place = 1 + sum(other < value for other in values.values())
                    places.setdefault(method, {}).setdefault(metric, []).append(place)
    rows = {m: [f"{statistics.fmean(p):.1f}" for p in places[m].values()] for m in TABLES if m in places}
    return shift.markdown("", ["rank by NLL", "rank by RMSE"], rows)


def heading(task: str) -> str:
    seeds = max(len(own) for own in stored(task).values())
    about = shift.TASKS[task]
    return f"{about.title}, {about.epochs} epochs, {seeds} seed{'s' * (seeds > 1)}"


#: what is in a figure, of each package the first row that there is; with its colour, line and marker
LOOKS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("plain",): ("#555555", "-", "."),
    ("MC dropout",): ("#999999", "--", "s"),
    ("deep ensemble of 5",): ("#999999", "-", "^"),
    ("Laplace, last layer", "laplace-torch, its example"): ("#CC79A7", "-", "v"),
    ("IVON, tuned", "IVON"): ("#009E73", "-", "<"),
    ("vbll", "vbll, our rate"): ("#E69F00", "-", ">"),
    ("bayesian-torch, Reparameterization", "bayesian-torch, Flipout"): ("#56B4E9", "-", "D"),
    ("Pyro AutoNormal",): ("#8C564B", "-", "p"),
    ("torch-uncertainty, our rate", "torch-uncertainty"): ("#BCBD22", "--", "x"),
    ("blitz, our rate", "blitz"): ("#9467BD", ":", "+"),
    ("VSD",): ("#0072B2", "-", "o"),
    ("VSD ensemble",): ("#D55E00", "-", "o"),
}


def figures(folder: Path = shift.FIGURES) -> list[Path]:
    """NLL and ECE under shift of the packages, ours and the baselines."""
    made = []
    for task in ("digits", *LARGER):
        if found := stored(task):
            looks = {next((name for name in names if name in found), names[0]): look for names, look in LOOKS.items()}
            made += shift.draw_shifts(task, found, looks, "peers", folder)
    return made


def pictures(task: str) -> list[str]:
    """The figures of a task, as the page shows them."""
    return shift.pictures(task, "libraries", "peers", "../../docs/figures")


def tables() -> str:
    """The second part of README.md."""
    parts = []
    if stored("digits"):
        parts += [f"**Digits, {SPLITS} splits**", *pictures("digits"), image_table("digits")]
        parts += ["**Digits: paired differences**", image_differences("digits")]
    if any(stored(task) for task in UCI):
        parts += ["**UCI: NLL** (number of splits)", uci_table("log_likelihood", -1, ".3f")]
        parts += ["**UCI: RMSE**", uci_table("rmse", 1, ".3f")]
        parts += ["**UCI: share of targets in the 95 % interval**", uci_table("coverage", 1, ".2f")]
        parts += ["**UCI: mean rank**", mean_ranks()]
    for task in [task for task in LARGER if stored(task)]:
        parts += [f"**{heading(task)}**", *pictures(task), image_table(task)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["digits", "uci", *LARGER, *UCI], default="digits")
    parser.add_argument("--data", help="the folder with UCI_Datasets, MNIST and FashionMNIST")
    parser.add_argument("--splits", type=int, help="five, and one of MNIST, if not given")
    parser.add_argument("--methods", nargs="*", default=[], help="rows of the tables; all if not given")
    parser.add_argument("--short", action="store_true", help="a few steps of each method, nothing stored")
    parser.add_argument("--cost", action="store_true", help="measure what steps and predictions cost")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the packages, which are many
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.cost:
        text = json.dumps(cost(options.task, options.data), indent=1) + "\n"
        (RESULTS / f"{options.task}-cost.json").write_text(text, encoding="utf-8")
        print(text)
    elif not options.write:
        for split in range(options.splits or (1 if options.task in LARGER else SPLITS)):
            for task in UCI if options.task == "uci" else (options.task,):
                run(task, options.methods, split, options.data, options.short)
    if options.write:
        figures()
        PAGE.write_text(shift.page(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
