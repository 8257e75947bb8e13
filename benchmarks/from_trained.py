"""A trained network made Bayesian: ``vsd.from_trained`` beside Laplace approximations and a temperature.

    python benchmarks/from_trained.py --data FOLDER   # FOLDER/MNIST/raw and FOLDER/FashionMNIST/raw; about 40 minutes
    python benchmarks/from_trained.py --table         # from the stored results
    python benchmarks/from_trained.py --data FOLDER --linear   # Fashion-MNIST: the network and its linearisation
    python benchmarks/from_trained.py --write PAGE    # the tables of what is there, between a page's marks

MLP 784-200-200-10, tanh, dropout 0.1 in training, trained until the accuracy and the negative log-likelihood are those
of the published row (MAP). 55,000 rows are trained on, 5,000 choose strengths and temperatures. Laplace rows need
``pip install laplace-torch==0.3`` and are left out without it; their prior precision maximises the marginal likelihood.

*Rotated*: mean NLL of the first 1,000 test images rotated by 10°, 20°, … 180°. *OOD-AUC*: by the entropy of the
prediction, as in the published rows; *by MI*: by the mutual information. *Seconds*: process time on one thread.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import rotate

import pyro_vsd as vsd

RESULTS = Path(__file__).parent / "results" / "from_trained"
SETS = {"mnist": vsd.datasets.mnist, "fashion": vsd.datasets.fashion_mnist}
TITLES = {"mnist": "MNIST", "fashion": "Fashion-MNIST"}
SEEDS = range(5)
# Options of from_trained, and for how many seeds they are tried.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "from_trained": ({}, 5),
    "from_trained, T = 0": ({"num_reflections": 0}, 2),
}
ANGLES = range(10, 190, 10)
ROTATED = 1000
SAMPLES = 100
# Columns of the table and their formats.
FORMS = {"accuracy": ".4f", "nll": ".4f", "ece": ".4f", "rotated": ".2f", "auc": ".3f", "auc_mi": ".3f"}
FORMS |= {"seconds": ".0f"}
Predict = Callable[[Tensor], vsd.ClassificationPrediction]


def train_network(name: str, x: Tensor, y: Tensor) -> nn.Module:
    """The network of the published rows; how long it is trained was chosen to match their MAP row."""
    units = [nn.Linear(784, 200), nn.Tanh(), nn.Dropout(0.1), nn.Linear(200, 200), nn.Tanh(), nn.Dropout(0.1)]
    net = nn.Sequential(*units, nn.Linear(200, 10))
    epochs, batch = (12, 100) if name == "mnist" else (4, 100)
    steps = len(x) // batch
    if name == "mnist":
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def scores(predict: Predict, test: Any, outside: Any, seconds: float) -> dict[str, float]:
    inside, elsewhere = predict(test.x), predict(outside.x)
    few = test.x[:ROTATED].view(-1, 1, 28, 28)
    rotated = [vsd.metrics.nll(predict(rotate(few, angle).flatten(1)), test.y[:ROTATED]) for angle in ANGLES]
    found = {
        "accuracy": vsd.metrics.accuracy(inside, test.y),
        "nll": vsd.metrics.nll(inside, test.y),
        "ece": vsd.metrics.ece(inside, test.y),
        "rotated": statistics.mean(rotated),
        "auc": vsd.metrics.auroc(-inside.entropy, -elsewhere.entropy),
    }
    if inside.num_samples > 1:
        found["auc_mi"] = vsd.metrics.auroc(-inside.mutual_information, -elsewhere.mutual_information)
    return found | {"seconds": seconds}


def labels(seed: int) -> list[str]:
    """The rows of a seed, in the order of the table."""
    ours = [label for label, (_, seeds) in VARIANTS.items() if seed < seeds]
    return ["MAP", "temperature", *ours, *LAPLACE]


def prepared(name: str, seed: int, folder: str) -> tuple[nn.Module, Any, Any, Any, Any]:
    """A trained network; training and validation rows; test rows of this set and of the other."""
    (data, test), (_, outside) = (SETS[n](folder, flatten=True) for n in (name, *(set(SETS) - {name})))
    torch.manual_seed(seed)
    order = torch.randperm(len(data.x))
    train, validation = ((data.x[rows], data.y[rows]) for rows in (order[:55_000], order[55_000:]))
    return train_network(name, *train), train, validation, test, outside


def run(name: str, seed: int, folder: str, missing: set[str]) -> dict[str, dict[str, float]]:
    net, train, validation, test, outside = prepared(name, seed, folder)

    @torch.no_grad()
    def plain(x: Tensor) -> vsd.ClassificationPrediction:
        return vsd.ClassificationPrediction.from_samples(net(x).softmax(-1).unsqueeze(0))

    result = {"MAP": scores(plain, test, outside, 0.0)} if "MAP" in missing else {}
    for label, (options, _) in VARIANTS.items():
        if label not in missing:
            continue
        start = time.process_time()
        model, guide = vsd.from_trained(net, train, validation, seed=seed, **options)
        seconds = time.process_time() - start

        def noisy(x: Tensor, model: Any = model, guide: Any = guide) -> Any:
            return vsd.predict(model, guide, x, num_samples=SAMPLES, seed=seed)

        result[label] = scores(noisy, test, outside, seconds)
    if "temperature" in missing:
        model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(train[0]))
        guide = vsd.VSDGuide(model)
        with guide.noise_times(0.0):
            start = time.process_time()
            calibration = vsd.calibrate(model, guide, validation, num_samples=1, noise=False)
            seconds = time.process_time() - start
        result["temperature"] = scores(lambda x: calibration.apply(plain(x)), test, outside, seconds)
    for label, subset in LAPLACE.items():
        found = laplace_scores(net, subset, train, test, outside) if label in missing else None
        if found is not None:
            result[label] = found
    return result


# ---- Laplace

LAPLACE = {"Laplace, last layer, Kronecker": "last_layer", "Laplace, all, Kronecker": "all"}


def laplace_scores(net: Any, subset: str, train: Any, test: Any, outside: Any) -> dict[str, float] | None:
    try:
        from laplace import Laplace
    except ImportError:
        return None
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=500)
    start = time.process_time()
    fitted = Laplace(net, "classification", subset_of_weights=subset, hessian_structure="kron")
    fitted.fit(loader)
    fitted.optimize_prior_precision(method="marglik")
    seconds = time.process_time() - start
    own = fitted(test.x[:20], pred_type="glm", link_approx="probit")
    torch.testing.assert_close(probit(*linearised(fitted, net, test.x[:20])), own, rtol=1e-4, atol=1e-5)
    found = scores(lambda x: prediction_of(fitted, net, x, draws=0), test, outside, seconds)
    drawn = [prediction_of(fitted, net, data.x, draws=SAMPLES).mutual_information for data in (test, outside)]
    return found | {"auc_mi": vsd.metrics.auroc(-drawn[0], -drawn[1])}


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    return (mean / (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()).softmax(-1)


@torch.no_grad()
def prediction_of(fitted: Any, net: Any, x: Tensor, draws: int) -> vsd.ClassificationPrediction:
    """By the probit formula, laplace-torch's default, or from draws of the outputs."""
    parts = []
    for rows in x.split(1000):
        mean, covariance = linearised(fitted, net, rows)
        if draws:
            root = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(10))
            outputs = mean + torch.einsum("snk,nck->snc", torch.randn(draws, *mean.shape), root)
            parts.append(outputs.softmax(-1))
        else:
            parts.append(probit(mean, covariance).unsqueeze(0))
    return vsd.ClassificationPrediction.from_samples(torch.cat(parts, 1))


@torch.no_grad()
def linearised(fitted: Any, net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs under the linearised network: what laplace-torch computes from Jacobians of
    all weights, at over 40 ms a row; here by layers, since the Jacobian of a weight is a product of two vectors."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    hidden = [x]
    for layer in layers[:-1]:
        hidden.append(layer(hidden[-1]).tanh())
    mean = layers[-1](hidden[-1])
    precision = fitted.posterior_precision
    blocks = list(zip(precision.eigenvalues, precision.eigenvectors, precision.deltas, strict=True))
    slopes = torch.eye(10).expand(len(x), 10, 10)  # of the outputs, in those of the layer
    covariance = torch.zeros(len(x), 10, 10)
    for layer, h in zip(reversed(layers), reversed(hidden), strict=True):
        if not blocks:
            break
        (bias_values,), (bias_vectors,), bias_delta = blocks.pop()
        (out_values, in_values), (out_vectors, in_vectors), delta = blocks.pop()
        variance = (h @ in_vectors).square() @ (1 / (torch.outer(out_values, in_values) + delta)).mT
        for vectors, spread in ((out_vectors, variance), (bias_vectors, 1 / (bias_values + bias_delta))):
            turned = slopes @ vectors
            covariance += (turned * spread.reshape(-1, 1, turned.shape[-1])) @ turned.mT
        slopes = (slopes @ layer.weight) * (1 - h.square()).unsqueeze(1)
    return mean, covariance


# ---- our noise in the linearised network

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
FEW_ROWS, FEW_SAMPLES = 3000, 60


@torch.no_grad()
def linear(folder: str) -> dict[str, Any]:
    """One Fashion-MNIST network: the noise of ``from_trained`` times some factors, in the network as it is and in its
    first-order expansion in the noise, with the same draws."""
    with torch.enable_grad():
        net, train, validation, test, outside = prepared("fashion", 0, folder)
        _, guide = vsd.from_trained(net, train, validation, seed=0)
    noises = [guide.noise(site) for site in guide.sites]
    inside, elsewhere, y = test.x[:FEW_ROWS], outside.x[:FEW_ROWS], test.y[:FEW_ROWS]

    def outputs(x: Tensor, xi: tuple[Tensor, ...]) -> Tensor:
        own = iter(xi)
        for layer in net:  # type: ignore[attr-defined]
            x = layer(x * next(own) if isinstance(layer, nn.Linear) else x)
        return x

    def sampled(x: Tensor, factor: float, expanded: bool) -> vsd.ClassificationPrediction:
        torch.manual_seed(1)
        ones, samples = tuple(torch.ones(noise.event_shape) for noise in noises), []
        for _ in range(FEW_SAMPLES):
            eta = tuple(math.sqrt(factor) * (noise.sample() - 1) for noise in noises)
            if expanded:
                value, slope = torch.func.jvp(lambda *xi: outputs(x, xi), ones, eta)
            else:
                value, slope = outputs(x, tuple(1 + e for e in eta)), 0.0
            samples.append((value + slope).softmax(-1))
        return vsd.ClassificationPrediction.from_samples(torch.stack(samples))

    found: dict[str, Any] = {"MAP": float(F.cross_entropy(net(inside), y))}
    for factor in FACTORS:
        for expanded in (False, True):
            here, there = sampled(inside, factor, expanded), sampled(elsewhere, factor, expanded)
            found[f"{factor:g}, {'linearised' if expanded else 'as it is'}"] = {
                "nll": vsd.metrics.nll(here, y),
                "auc": vsd.metrics.auroc(-here.entropy, -there.entropy),
                "auc_mi": vsd.metrics.auroc(-here.mutual_information, -there.mutual_information),
            }
    return found


def linear_table() -> str:
    """NLL in per cent above the network without noise."""
    found = json.loads((RESULTS / "linear.json").read_text())
    lines = ["| noise variances times | NLL | OOD-AUC | by MI | linearised: NLL | OOD-AUC | by MI |", "|---" * 7 + "|"]
    for factor in FACTORS:
        cells = []
        for how in ("as it is", "linearised"):
            own = found[f"{factor:g}, {how}"]
            cells += [f"+{100 * (own['nll'] / found['MAP'] - 1):.1f} %", f"{own['auc']:.3f}", f"{own['auc_mi']:.3f}"]
        lines.append(f"| {factor:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- results


def table() -> str:
    lines = []
    for name in SETS:
        stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}_*.json"))]
        if not stored:
            continue
        lines += [*[""] * bool(lines), f"{TITLES[name]}, {len(stored)} seeds:", ""]
        lines += ["| | accuracy | NLL | ECE | rotated | OOD-AUC | by MI | seconds |", "|---" * 8 + "|"]
        for label in labels(0):
            cells = []
            for key, form in FORMS.items():
                values = [found[label][key] for found in stored if key in found.get(label, {})]
                error = f" ± {statistics.stdev(values) / len(values) ** 0.5:{form}}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):{form}}{error if key != 'seconds' else ''}" if values else "–")
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    """Replaces the tables between the page's marks."""
    text = page.read_text(encoding="utf-8")
    for mark, made in (("table", table()), ("linear", linear_table())):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{made}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with MNIST and FashionMNIST")
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--linear", action="store_true", help="measure our noise in the linearised network")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    if arguments.write:
        return write(arguments.write)
    if arguments.linear:
        torch.set_num_threads(1)
        (RESULTS / "linear.json").write_text(json.dumps(linear(arguments.data), indent=1) + "\n")
        return print(linear_table())
    if arguments.data:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", module="laplace|curvlinops|torch.jit")
        RESULTS.mkdir(parents=True, exist_ok=True)
        for seed in SEEDS:
            for name in SETS:
                path = RESULTS / f"{name}_{seed}.json"
                known = json.loads(path.read_text()) if path.exists() else {}
                missing = set(labels(seed)) - set(known)
                if missing:
                    path.write_text(json.dumps(known | run(name, seed, arguments.data, missing), indent=1))
                    print(path.name, flush=True)
    return print(table(), linear_table(), sep="\n\n")


if __name__ == "__main__":
    main()
