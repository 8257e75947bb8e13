"""The tutorials: each script runs in the short mode, has an up-to-date notebook, and shows public names only."""

import ast
import importlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tutorials import build

ROOT = Path(__file__).parents[1]
SCRIPTS = build.scripts()
# The demo, too, is code to start from.
READ = [*SCRIPTS, build.FOLDER / "demo.py"]
MAX_LINES = 150


def by_name(paths):
    return [pytest.param(path, id=path.stem) for path in paths]


def python(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_there_are_tutorials():
    assert [path.stem[:2] for path in SCRIPTS] == [f"{number:02}" for number in range(1, len(SCRIPTS) + 1)]
    assert len(SCRIPTS) >= 6


# ---- each tutorial


@pytest.mark.slow
@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_script_runs_in_smoke_mode(script, tmp_path):
    done = python("-W", "error", script, cwd=tmp_path, PYRO_VSD_SMOKE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir()), "a tutorial leaves no files behind"


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_notebook_is_what_the_script_says(script):
    assert build.problems(script) == []


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_script_has_at_most_so_many_lines_of_code(script):
    cells = [cell.source for cell in build.read(script).cells if cell.cell_type == "code"]
    lines = [line.strip() for line in "\n".join(cells).splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MAX_LINES


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_script_explains_itself(script):
    first = build.read(script).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {int(script.stem[:2])}. ")


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_script_says_what_comes_of_it_and_what_is_next(script):
    """The first cell names what one has at the end, the last one what one can do now in 2 to 4 points, and the next."""
    cells = build.read(script).cells
    assert "**At the end**" in cells[0].source
    heading, _, rest = cells[-1].source.partition("## What you can do now\n")
    assert rest, f"the last cell has no such heading: {heading}"
    assert 2 <= rest.count("\n- ") <= 4
    number = SCRIPTS.index(script) + 1
    following = f"({SCRIPTS[number].stem}.ipynb)" if number < len(SCRIPTS) else "documentation"
    assert following in rest.split("Next: ")[1]


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_boilerplate_is_hidden(script):
    """Settings of our own runs and checks of the text's claims are in cells that the site leaves out; few of them."""
    cells = [cell for cell in build.read(script).cells if cell.cell_type == "code"]
    removed = [cell for cell in cells if "remove-cell" in cell.metadata.get("tags", [])]
    for cell in cells:
        if any(word in cell.source for word in ("SMOKE", "set_num_threads", "argparse", "assert ")):
            assert cell in removed, cell.source
    assert len(removed) <= len(cells) / 2


@pytest.mark.parametrize("script", by_name(SCRIPTS))
def test_script_has_claims_that_can_fail(script):
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("script", by_name(READ))
def test_script_uses_public_names_only(script):
    assert private_names(script.read_text(encoding="utf-8")) == []


def private_names(source):
    """What of ours a source uses beside public names: other imports, underscores, names not in ``__all__``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "pyro_vsd"]
            found += [alias.name for alias in ours if (alias.name, alias.asname) != ("pyro_vsd", "vsd")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_vsd"):
            found.append(f"from {node.module}")
        elif isinstance(node, ast.Attribute):
            dunder = node.attr.startswith("__") and node.attr.endswith("__")
            if node.attr.startswith("_") and not dunder:
                found.append(node.attr)
            elif (chain := names_after_vsd(node)) and not is_public(chain):
                found.append(".".join(["vsd", *chain]))
    return found


def names_after_vsd(node):
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) and node.id == "vsd" else []


def is_public(chain):
    """Each name is in the ``__all__`` of the package before it; attributes of classes may follow."""
    package = importlib.import_module("pyro_vsd")
    for name in chain:
        # these are imported on request: listed by dir, not by a star import
        if name not in package.__all__ and name not in ("baselines", "plots", "sklearn", "lightning"):
            return False
        package = getattr(package, name)
        if not inspect.ismodule(package):
            return True
    return True


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pyro_vsd as vsd\nvsd.nn.mlp([1, 1])\nvsd.plots.band\nvsd.datasets.Data.batches", []),
        ("import pyro_vsd.infer.guide", ["pyro_vsd.infer.guide"]),
        ("from pyro_vsd.infer import VSDGuide", ["from pyro_vsd.infer"]),
        ("vsd.infer.setup", ["vsd.infer.setup"]),
        ("vsd.nonsense", ["vsd.nonsense"]),
        ("guide._get('theta')", ["_get"]),
    ],
)
def test_private_names_are_found(line, found):
    assert private_names(line) == found


# ---- the tool that makes the notebooks

SOURCE = """# %% [markdown]
# # 9. A title

# %% tags=["hide-input"]
import os

import matplotlib.pyplot as plt

print("PYRO_VSD_SMOKE" in os.environ)
figure, ax = plt.subplots(figsize=(1, 1))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a small tutorial and its notebook."""
    folder = tmp_path_factory.mktemp("tutorials")
    shutil.copy(build.FOLDER / "build.py", folder)
    (folder / "README.md").write_text("[A title](09_small.ipynb)")
    (folder / "09_small.py").write_text(SOURCE)
    done = python(folder / "build.py", "09_small", cwd=folder, PYRO_VSD_SMOKE="1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it to spoil; ``build`` looks there."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_build_makes_a_notebook_that_passes(folder):
    assert build.problems(folder / "09_small.py") == []


@pytest.mark.slow
def test_notebook_holds_nothing_of_the_machine(folder):
    notebook = nbformat.read(folder / "09_small.ipynb", as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [cell.id for cell in notebook.cells] == ["cell-1", "cell-2"]
    kept = {"tags": ["hide-input"], "jupyter": {"source_hidden": True}}
    assert [cell.metadata for cell in notebook.cells] == [{}, kept]


@pytest.mark.slow
def test_build_runs_the_full_mode(folder):
    """Whatever the environment says: what is committed is never the short run."""
    notebook = nbformat.read(folder / "09_small.ipynb", as_version=4)
    assert notebook.cells[1].outputs[0].text == "False\n"


def change_source(notebook):
    notebook.cells[1].source += "\n# changed"


def change_tags(notebook):
    notebook.cells[1].metadata = {}


def change_text(notebook):
    notebook.cells[0].source += " changed"


def add_error(notebook):
    notebook.cells[1].outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]))


def add_warning(notebook):
    notebook.cells[1].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="UserWarning"))


def drop_outputs(notebook):
    notebook.cells[1].outputs = []


def drop_count(notebook):
    notebook.cells[1].execution_count = 7


def add_path(notebook):
    notebook.cells[1].outputs[0].text += f"saved to {Path.home()}/model.ckpt"


def add_address(notebook):
    data = {"text/plain": "<pyro.infer.svi.SVI at 0x7f79e0980750>"}
    notebook.cells[1].outputs.append(nbformat.v4.new_output("execute_result", data, execution_count=1))


def swell(notebook):
    notebook.cells[1].outputs[0].text += "0" * build.MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (change_source, "is out of date with 09_small.py"),
        (change_tags, "is out of date with 09_small.py"),
        (change_text, "is out of date with 09_small.py"),
        (add_error, "holds an error"),
        (add_warning, "holds warnings"),
        (drop_outputs, "holds no numbers or no figures"),
        (drop_count, "was not run from top to bottom"),
        (add_path, "holds a path of this machine"),
        (add_address, "shows the address of an object"),
        (swell, "bytes, more than"),
    ],
)
def test_problems_are_found(folder, spoil, problem):
    path = folder / "09_small.ipynb"
    notebook = nbformat.read(path, as_version=4)
    spoil(notebook)
    nbformat.write(notebook, path)
    found = build.problems(folder / "09_small.py")
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.slow
def test_a_tutorial_must_be_listed(folder):
    (folder / "README.md").write_text("nothing")
    assert build.problems(folder / "09_small.py") == ["09_small.ipynb is not listed in README.md"]


@pytest.mark.slow
def test_a_notebook_must_exist(folder):
    (folder / "09_small.ipynb").unlink()
    assert "does not exist" in build.problems(folder / "09_small.py")[0]


@pytest.mark.slow
def test_check_fails_on_a_problem(folder):
    (folder / "README.md").write_text("nothing")
    done = python(folder / "build.py", "--check", cwd=folder)
    assert done.returncode == 1
    assert "09_small.ipynb is not listed in README.md" in done.stderr


def test_an_unknown_tag_raises(tmp_path):
    (tmp_path / "09_small.py").write_text(SOURCE.replace("hide-input", "hide-everything"))
    with pytest.raises(ValueError, match="hide-everything"):
        build.read(tmp_path / "09_small.py")


def test_an_unknown_name_raises():
    with pytest.raises(ValueError, match="99_nothing"):
        build.scripts(["99_nothing"])
