"""Settings of the documentation site. Build: ``python -m sphinx -W --keep-going -b html docs docs/_build/html``."""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
# The package's plots are imported for their docstrings; nothing is drawn.
os.environ.setdefault("MPLBACKEND", "Agg")

import pyro_vsd  # noqa: E402

project = "pyro_vsd"
author = "The pyro_vsd authors"
project_copyright = author
version = release = pyro_vsd.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

# Every name of ours that a docstring refers to must exist; those of torch, Pyro and Python are not looked up, since the
# build needs no network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|pyro|numpy|pandas|sklearn|lightning|matplotlib|np|nn|optim|dist)\..*"),
    (r"py:.*", r"(collections|contextlib|os|pathlib)\..*"),
    # types in signatures: of others, and of ours that are not public
    (r"py:class", r"Tensor|NDArray|pyro_vsd\.\w+\.\w+\.\w+|.*\._\w+"),
    # attributes and methods without a text of their own, named inside their class
    (r"py:(attr|meth)", r"(?!pyro_vsd\.).*"),
]

# Notebooks come with their outputs.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Methods that only repeat those of torch, Pyro or Lightning have their documentation there.
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

html_theme = "furo"
html_title = "pyro_vsd"
html_static_path = ["_static"]
html_css_files = ["wide.css"]


def copy_tutorials() -> None:
    """Brings ``../tutorials/*.ipynb`` below this folder, where Sphinx looks; unchanged ones keep their time."""
    source, target = HERE.parent / "tutorials", HERE / "tutorials"
    target.mkdir(exist_ok=True)
    notebooks = {path.name: path.read_bytes() for path in source.glob("*.ipynb")}
    for path in target.glob("*.ipynb"):
        if path.name not in notebooks:
            path.unlink()
    for name, content in notebooks.items():
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def resolve_short_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A reference to ``pyro_vsd.predict`` leads to ``pyro_vsd.infer.predict``, where it is documented."""
    package, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or package != "pyro_vsd" or name not in pyro_vsd.__all__:
        return None
    thing, domain = getattr(pyro_vsd, name), env.domains["py"]
    for home in list(vars(pyro_vsd).values()):
        target = f"{getattr(home, '__name__', '')}.{name}"
        if getattr(home, name, None) is thing and target in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, contnode)
    return None


def setup(app: Any) -> None:
    copy_tutorials()
    app.connect("missing-reference", resolve_short_name)
