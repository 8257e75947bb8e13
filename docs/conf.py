"""Settings of the documentation site. Build: ``python -m sphinx -W --keep-going -b html docs docs/_build/html``."""

import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]
os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn without a screen

import pyro_vsd  # noqa: E402

project = "pyro_vsd"
author = "The pyro_vsd authors"
project_copyright = author
version = release = pyro_vsd.__version__

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode", "sphinx_design",
    "gallery", "pictures", "repository_pages",  # ours, in _ext
]  # fmt: skip
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

# Formulas without the internet: the package carries MathJax. This file of it holds its glyphs too, and no other is
# loaded, so pages also work when they are opened from a folder, where browsers refuse fonts.
mathjax = files("sphinx-mathjax-offline") / "static" / "mathjax"
mathjax_path = "tex-svg.js"

html_theme = "furo"
html_title = f"pyro_vsd {release}"
html_static_path = ["_static", str(mathjax / mathjax_path)]
html_css_files = ["site.css"]


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
    app.connect("missing-reference", resolve_short_name)
