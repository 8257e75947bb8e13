"""A first use of an installed package, without a clone, a test runner or an extra: train, predict, save, load."""

import importlib.metadata
import importlib.resources
import pkgutil
import sys
import tempfile
from pathlib import Path

import torch

import pyro_vsd as vsd

EXTRAS = {"export", "lightning", "plots", "sklearn"}


def main() -> None:
    assert vsd.__version__ == importlib.metadata.version("pyro_vsd")
    assert (importlib.resources.files("pyro_vsd") / "py.typed").is_file()
    for module in pkgutil.walk_packages(vsd.__path__, "pyro_vsd."):
        if module.name.split(".")[1] not in EXTRAS:
            importlib.import_module(module.name)

    torch.manual_seed(0)
    train, test = vsd.datasets.cubic()
    model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([1, 20, 1])), num_data=len(train), noise="learned")
    guide = vsd.VSDGuide(model)
    history = vsd.fit(model, guide, train, epochs=100, progress=False, seed=0)
    assert history[-1]["loss"] < history[0]["loss"]

    prediction = vsd.predict(model, guide, test.x, num_samples=20, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        vsd.save_checkpoint(path, model=model, guide=guide)
        vsd.load_checkpoint(path, model=model, guide=guide)
    again = vsd.predict(model, guide, test.x, num_samples=20, seed=0)
    assert torch.equal(prediction.mean, again.mean)
    sys.stdout.write(f"pyro_vsd {vsd.__version__} in {Path(vsd.__file__).parent}\n")


if __name__ == "__main__":
    main()
