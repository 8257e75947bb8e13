"""Who may import whom: the table of rules, read from the sources with ``ast``, imports inside functions included."""

import ast
import configparser
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_vsd"

BELOW_BASELINES = {"ops", "distributions", "prediction", "infer", "nn", "metrics", "datasets"}
EVERYTHING = BELOW_BASELINES | {"plots", "baselines", "training", "diagnosis", "ensemble", "export", "posthoc"}

# A room of the package (a folder or a file) and the other rooms it may import; all may import the basement.
BASEMENT = "_utils"
MAY_IMPORT: dict[str, set[str]] = {
    BASEMENT: set(),
    "ops": set(),
    "distributions": {"ops"},
    "prediction": set(),
    "infer": {"ops", "distributions", "prediction"},
    "nn": {"ops", "distributions"},
    "metrics": {"prediction"},
    "plots": {"prediction", "metrics"},
    "datasets": set(),
    "baselines": BELOW_BASELINES,
    "training": {"infer", "prediction", "metrics"},
    "diagnosis": {"ops", "distributions", "prediction", "infer", "metrics", "plots", "training"},
    "ensemble": {"infer", "prediction", "training"},
    "export": {"distributions", "infer", "nn", "ensemble", "prediction"},
    "posthoc": {"ops", "distributions", "prediction", "infer", "nn", "training", "diagnosis"},
    "sklearn": EVERYTHING,
    "lightning": EVERYTHING,
    "transformers": EVERYTHING,
    "__init__": EVERYTHING,
}

# What every room may import from outside, beside the standard library; and what only some may.
DEPENDENCIES = {"torch", "torchvision", "pyro", "numpy", "tqdm"}
ONLY_IN = {
    "matplotlib": {"plots"},
    "sklearn": {"datasets", "sklearn"},
    "lightning": {"lightning"},
    "transformers": {"transformers"},
    "pandas": {"metrics", "prediction", "training", "diagnosis"},
}
MAY_NOT = {"ops": {"pyro", "torchvision", "tqdm"}, "__init__": {"torchvision", "numpy", "tqdm"}}

NEVER_EAGER = [
    "matplotlib",
    "sklearn",
    "lightning",
    "optuna",
    "pandas",
    "torchmetrics",
    "transformers",
    "pyro_vsd.baselines",
]


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST, rooms: set[str]) -> list[str]:
    """Dotted names of what a source imports; a relative import starts with a dot."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from pyro_vsd import ops` imports pyro_vsd.ops; `from pyro_vsd import VSDGuide` only pyro_vsd.
            found += [f"{module}.{a.name}" if module == "pyro_vsd" and a.name in rooms else module for a in node.names]
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                found.append(str(node.args[0].value))
    return found


def violations(source: str, room: str) -> list[str]:
    """What a source in this room imports and may not, in words."""
    wrong = []
    for module in imported_modules(ast.parse(source), set(MAY_IMPORT)):
        top, *rest = module.split(".")
        if not top:
            wrong.append(f"relative import of {module}")
        elif top == "pyro_vsd":
            target = rest[0] if rest else "__init__"
            if target not in {room, BASEMENT, *MAY_IMPORT[room]}:
                wrong.append(f"{room} may not import {module}")
        elif top in sys.stdlib_module_names:
            continue
        elif room not in ONLY_IN.get(top, {room} if top in DEPENDENCIES else set()) or top in MAY_NOT.get(room, set()):
            wrong.append(f"{room} may not import {module}")
    return wrong


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_import_rules(path):
    assert room_of(path) in MAY_IMPORT, f"a new room, {room_of(path)}: give it a line in MAY_IMPORT"
    assert violations(path.read_text(encoding="utf-8"), room_of(path)) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("ops", "import pyro_vsd.distributions"),
        ("_utils", "from pyro_vsd.ops import householder"),
        ("ops", "from pyro_vsd.infer.guide import VSDGuide"),
        ("ops", "import pyro"),
        ("nn", "def f():\n    from pyro_vsd import infer"),
        ("nn", "from pyro_vsd import VSDGuide"),
        ("infer", "import pyro_vsd.nn as nn"),
        ("infer", "if TYPE_CHECKING:\n    from pyro_vsd.metrics import report"),
        ("datasets", "from .data import Data"),
        ("datasets", "from . import data"),
        ("metrics", "import matplotlib.pyplot as plt"),
        ("metrics", "import importlib\nimportlib.import_module('pyro_vsd.plots')"),
        ("metrics", "from sklearn.metrics import roc_auc_score"),
        ("nn", "import pandas"),
        ("baselines", "from pyro_vsd import plots"),
        ("training", "from pyro_vsd import nn"),
        ("__init__", "from pyro_vsd import sklearn"),
    ],
)
def test_the_check_sees_a_broken_rule(room, source):
    assert len(violations(source, room)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("ops", "import math\nimport torch\nfrom pyro_vsd.ops.householder import rotate"),
        ("ops", "from pyro_vsd._utils import check_integer"),
        ("distributions", "from pyro_vsd import ops\nimport pyro.distributions as dist"),
        ("plots", "import matplotlib.pyplot as plt\nfrom pyro_vsd.metrics import ece"),
        ("datasets", "def f():\n    import sklearn.datasets"),
        ("baselines", "from pyro_vsd.infer import VSDGuide\nfrom pyro_vsd.nn import mlp"),
        ("__init__", "from pyro_vsd import infer, nn"),
    ],
)
def test_the_check_accepts_what_is_allowed(room, source):
    assert violations(source, room) == []


def test_top_level_imports_nothing_of_what_is_imported_on_request():
    """At the top of ``pyro_vsd/__init__.py``; inside ``__getattr__`` or for type checkers it may."""
    statements = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    eager = ast.Module([s for s in statements if isinstance(s, (ast.Import, ast.ImportFrom))], type_ignores=[])
    assert {f"pyro_vsd.{room}" for room in ON_REQUEST}.isdisjoint(imported_modules(eager, set(MAY_IMPORT)))


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if (PACKAGE / room / "__init__.py").exists()])
def test_no_module_is_hidden_by_a_name_of_its_package(room):
    """``pyro_vsd.infer.predict`` cannot be both a module and a function."""
    package = importlib.import_module(f"pyro_vsd.{room}")
    modules = {path.stem for path in (PACKAGE / room).glob("*.py")}
    assert [name for name in package.__all__ if name in modules and not inspect.ismodule(getattr(package, name))] == []


USERS_OF_THE_LIBRARY = [path for folder in ("benchmarks", "examples", "tutorials") for path in sources(ROOT / folder)]


@pytest.mark.parametrize("path", USERS_OF_THE_LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_users_of_the_library_take_public_names_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    taken = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyro_vsd":
            taken += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            taken += [alias.name for alias in node.names if alias.name.split(".")[0] == "pyro_vsd"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("vsd."):
            taken.append(ast.unparse(node))
    public = {"vsd.__version__"}
    assert [name for name in taken if name not in public and any(p.startswith("_") for p in name.split("."))] == []


# Run with warnings as errors, in a process of its own.
FRESH_IMPORT = f"""
import random, sys
import numpy, torch, pyro

def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().tolist(), torch.is_grad_enabled(),
        torch.distributions.Distribution._validate_args, random.getstate(), numpy.random.get_state()[1].tolist(),
        pyro.settings.get(), dict(pyro.get_param_store()), torch.get_printoptions()
        if hasattr(torch, "get_printoptions") else None,
    )

before = state()
import pyro_vsd
assert state() == before, "import pyro_vsd changed global state"
from pyro_vsd import *
eager = [name for name in {NEVER_EAGER} if name in sys.modules]
assert not eager, f"import pyro_vsd imported {{eager}}"
"""


def test_import_is_light_and_changes_no_global_state():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# Rooms that are imported on request, and what they need.
ON_REQUEST = {
    "baselines": [],
    "plots": ["matplotlib"],
    "sklearn": ["sklearn"],
    "lightning": ["lightning"],
    "transformers": ["transformers"],
}


@pytest.fixture(scope="module")
def reached() -> set[str]:
    """What is imported by the package and by what it imports on request, in a fresh process."""
    rooms = [room for room, needs in ON_REQUEST.items() if all(map(importlib.util.find_spec, needs))]
    requests = [f"import pyro_vsd.{room}" for room in rooms if room in map(room_of, sources(PACKAGE))]
    program = "\n".join(["import sys, pyro_vsd", *requests, "print(*sys.modules, sep='\\n')"])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n"))


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_is_reached(path, reached):
    """No file is left over that nothing imports."""
    for needed in ON_REQUEST.get(room_of(path), []):
        pytest.importorskip(needed)
    parts = path.relative_to(ROOT).with_suffix("").parts
    assert ".".join(parts[:-1] if parts[-1] == "__init__" else parts) in reached


# ---- versions: a pin elsewhere dragged torch below 2 (lightning-uq-box#35, backpack#310), a keyword was missing in an
# older torch (bayesian-torch#6)


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
