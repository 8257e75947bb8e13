"""Pictures that the site draws itself: one of every plot in ``pyro_vsd.plots``, and that of the landing page.

``PYTHONPATH=. python docs/_ext/pictures.py FOLDER`` draws them all in about a minute. A build draws them when they are
missing or older than this file or a file of ``pyro_vsd.plots``.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyro
import torch
from torch import nn

import pyro_vsd as vsd

HERE = Path(__file__)
ROOT = HERE.parents[2]
FOLDER = ROOT / "docs" / "pictures"


@cache
def digits() -> Any:
    """Digits below 8 to train and to test, and test digits 8 and 9: the two unknown classes."""
    train, test = vsd.datasets.digits()
    return train[train.y < 8], test[test.y < 8], test[test.y >= 8]


@cache
def trained() -> Any:
    """A plain network with weight decay and a VSD network, both by 100 epochs of Adam, a cosine from 1e-2."""
    train, epochs = digits()[0], 100
    pyro.set_rng_seed(0)
    net = vsd.nn.mlp([64, 100, 100, 8])
    # of 0, 1e-4, 3e-4 and 1e-3 the decay with the lowest NLL on held-out training rows
    adam = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=3e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        for x, y in train.batches(100):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            adam.step()
        cosine.step()
    pyro.set_rng_seed(0)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 100, 8])), num_data=len(train))
    guide = vsd.VSDGuide(model)
    history = vsd.fit(model, guide, train, epochs, lr=1e-2, batch_size=100, progress=False)
    return net, model, guide, history


def predictions(x: torch.Tensor) -> dict[str, Any]:
    net, model, guide, _ = trained()
    with torch.no_grad():
        return {"plain": net(x).softmax(-1), "VSD": vsd.predict(model, guide, x, num_samples=100, seed=0)}


def noisy(level: float) -> torch.Tensor:
    """The test digits with Gaussian noise on their pixels, which lie between 0 and 1."""
    x = digits()[1].x
    return x + level * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def reliability() -> None:
    axes, y = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")[1], digits()[1].y
    both = predictions(noisy(0.4))
    vsd.plots.reliability(both["plain"], y, num_bins=10, ax=axes[0]).set_title("one prediction", fontsize="medium")
    vsd.plots.reliability(both, y, num_bins=10, ax=axes[1]).set_title("several", fontsize="medium")


def entropy_histogram(ax: Any = None) -> None:
    _, known, unknown = digits()
    inside, outside = (predictions(data.x)["VSD"] for data in (known, unknown))
    vsd.plots.entropy_histogram({"known classes": inside, "unknown classes": outside}, ax=ax)


def entropy_cdf() -> None:
    vsd.plots.entropy_cdf({f"{name}, unknown classes": p for name, p in predictions(digits()[2].x).items()})


def ood_roc() -> None:
    vsd.plots.ood_roc(predictions(digits()[1].x), predictions(digits()[2].x))


def risk_coverage() -> None:
    vsd.plots.risk_coverage(predictions(noisy(0.4)), digits()[1].y)


def noise_covariance(ax: Any = None) -> None:
    vsd.plots.noise_covariance(trained()[2], "net.2.weight", correlation=True, ax=ax)


def noise_variances() -> None:
    vsd.plots.noise_variances(trained()[2])


def elbo_terms() -> None:
    vsd.plots.elbo_terms(trained()[3]).set_xlabel("epoch")


def diagnosis() -> None:
    train, known, _ = digits()
    _, model, guide, _ = trained()
    vsd.plots.diagnosis(vsd.diagnose(model, guide, train, known))


def members() -> None:
    train, _ = vsd.datasets.diabetes()
    pyro.set_rng_seed(0)
    net = vsd.nn.bayesianize(vsd.nn.mlp([train.x.shape[1], 20, 1]))
    ensemble = vsd.Ensemble(vsd.nn.Regressor(net, num_data=len(train), noise="learned"), members=5)
    ensemble.fit(train, epochs=60, refit=False, progress=False)
    vsd.plots.members(ensemble)


def band(ax: Any = None) -> None:
    pyro.set_rng_seed(0)
    train, test = vsd.datasets.cubic()
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([1, 50, 1])), num_data=len(train), noise="learned")
    guide = vsd.VSDGuide(model, num_reflections=5)
    vsd.fit(model, guide, train, 3000, lr=1e-2, progress=False)
    vsd.plots.band(test.x, vsd.predict(model, guide, test.x, num_samples=500, seed=0), data=(train.x, train.y), ax=ax)


PLOTS = (
    band, diagnosis, elbo_terms, entropy_cdf, entropy_histogram, members, noise_covariance, noise_variances, ood_roc,
    reliability, risk_coverage,
)  # fmt: skip


def landing() -> None:
    """A regression with its uncertainty, entropies of known and unknown digits, and the noise that was learned."""
    _, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained", width_ratios=(1.25, 1, 1.05))
    band(axes[0])
    entropy_histogram(axes[1])
    noise_covariance(axes[2])
    titles = ("a regression and its uncertainty", "a classifier's uncertainty", "learned correlations of the noise")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize="medium")


def draw(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for picture in (*PLOTS, landing):
        picture()
        plt.savefig(folder / f"{picture.__name__}.png", dpi=130)
        plt.close("all")


def draw_if_old(app: Any) -> None:
    made = [FOLDER / f"{picture.__name__}.png" for picture in (*PLOTS, landing)]
    newest = max(path.stat().st_mtime for path in [HERE, *(ROOT / "pyro_vsd" / "plots").glob("*.py")])
    if all(path.exists() and path.stat().st_mtime > newest for path in made):
        return
    # a process of its own: seeds and torch's threads stay as they are in this one
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(HERE), str(FOLDER)], check=True, env=environment)


def add_picture(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Puts the picture of a plot below its first paragraph."""
    module, _, function = name.rpartition(".")
    if module == "pyro_vsd.plots" and function in {picture.__name__ for picture in PLOTS}:
        end = lines.index("") if "" in lines else len(lines)
        width = {"reliability": 640, "diagnosis": 640}.get(function, 420)
        lines[end:end] = ["", f".. image:: /pictures/{function}.png", f"   :width: {width}", "   :alt: an example", ""]


def setup(app: Any) -> dict[str, bool]:
    draw_if_old(app)
    app.connect("autodoc-process-docstring", add_picture)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
