"""Elsewhere examples broke with each release of Pyro, since private helpers had moved (karalets/TyXe#2, TyXe#18), a pin
dragged torch below 2 (lightning-uq-box#35, backpack#310), and a keyword was missing in an older torch
(bayesian-torch#6). Here no dependency is bounded from above, and every private name that the package imports is known
and looked for.

More of it: ``tests/test_imports.py`` (no heavy extra is imported).
"""

import ast
import configparser
import importlib
import re
from pathlib import Path

import pytest
import torch
from pyro.infer import ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule

import pyro_vsd

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyro_vsd.__file__).parent

# What has no public name. A release that moves one of them fails here, by name, and not in a user's training.
PRIVATE = {
    "pyro.optim.optim._load_state_dict",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
}


def requirements():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    text = [parser["options"]["install_requires"], parser["options"]["python_requires"]]
    text += parser["options.extras_require"].values()
    return [line.strip() for part in text for line in part.splitlines() if line.strip()]


@pytest.mark.parametrize("line", requirements())
def test_dependencies_are_not_bounded_from_above(line):
    assert not re.search(r"[<~!]|==|===", line), line


def test_torch_pyro_and_numpy_have_a_lower_bound():
    bounds = dict(re.match(r"([\w-]+)(?:\[.*\])?>=(.*)", line).groups() for line in requirements() if ">=" in line[1:])
    assert {"torch", "pyro-ppl", "numpy"} <= set(bounds)


def private_names():
    """Names of torch and Pyro with a leading underscore that the package imports or reaches as attributes."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "pyro"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.split(".")[0] in ("torch", "pyro")}
            elif isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                if re.fullmatch(r"(torch|pyro)(\.\w+)+", dotted):
                    found.add(dotted)
    private = {name for name in found if any(re.match("_(?!_)", part) for part in name.split("."))}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def test_private_names_are_known():
    assert private_names() - PRIVATE == set()


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_a_private_name_is_where_it_was(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


# What Pyro leaves to subclasses without a public name: the guide and the objective override or call these.
OVERRIDDEN = [
    (AutoGuide, "_setup_prototype"),
    (AutoGuide, "_create_plates"),
    (ELBO, "_get_trace"),
    (ELBO, "_get_traces"),
    (ELBO, "_get_vectorized_trace"),
    (ELBO, "_guess_max_plate_nesting"),
]


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=lambda v: getattr(v, "__name__", v))
def test_an_overridden_method_is_where_it_was(owner, name):
    assert callable(getattr(owner, name))


@pytest.mark.parametrize("name", ["_pyro_context", "_pyro_samples", "_pyro_name"])
def test_an_attribute_of_pyros_modules_is_where_it_was(name):
    module = PyroModule[torch.nn.Linear](2, 2)
    assert hasattr(module, name)
    assert hasattr(module._pyro_context, "used")
    assert hasattr(module._pyro_context, "active")
