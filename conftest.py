"""Settings for all tests, the doctests of the package included: this file stands above both."""

import importlib.util
import os
from collections.abc import Iterator

# Before anything imports matplotlib: figures are drawn without a screen.
os.environ["MPLBACKEND"] = "Agg"

import hypothesis
import pyro
import pytest
import torch

import pyro_vsd

# At import, so that tables of cases made while collecting have the same dtype as the tests.
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

hypothesis.settings.register_profile("pyro_vsd", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pyro_vsd")

# An adapter's doctests run where its extra is installed.
collect_ignore = [
    f"pyro_vsd/{name}.py" for name in ("lightning", "sklearn", "transformers") if not importlib.util.find_spec(name)
]


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Each test starts in float64, with seed 0, an empty param store and Pyro's default settings with validation on."""
    settings = pyro.settings.get()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(True):
        yield
    pyro.clear_param_store()
    pyro.settings.set(**settings)
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def names_in_doctests(doctest_namespace: dict[str, object]) -> None:
    """Doctests need no imports."""
    doctest_namespace |= {"pyro": pyro, "torch": torch, "nn": torch.nn, "vsd": pyro_vsd}
