"""Builds the notebooks from the scripts in this folder: runs every cell and keeps the outputs and figures.

    python tutorials/build.py                  # all of them
    python tutorials/build.py 02_regression    # one
    python tutorials/build.py --check          # runs nothing; fails where a notebook is not what its script says
    python tutorials/build.py --smoke          # runs all in the short mode and writes nothing

The scripts are the source (jupytext's percent format); never edit a notebook by hand. Tags of cells are kept:
``# %% tags=["hide-input"]`` folds the code away, ``"remove-cell"`` leaves the cell out of the documentation.
"""

import argparse
import copy
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
SMOKE = "PYRO_VSD_SMOKE"
# A tutorial takes at most three minutes on two cores; a cell that takes this long hangs.
CELL_SECONDS = 1200
# Figures are most of a notebook; above this, lower the dpi or draw less.
MAX_BYTES = 400_000
TAGS = ("hide-input", "remove-cell")


def scripts(names: list[str] | None = None) -> list[Path]:
    """The tutorials of these names, all by default, in their order."""
    found = {path.stem: path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
    wanted = [Path(name).stem for name in names or found]
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise ValueError(f"expected tutorials among {', '.join(found)}, got {', '.join(unknown)}")
    return [found[name] for name in wanted]


def read(script: Path) -> Any:
    """The script as a notebook without outputs: nothing in it depends on when and where it was made."""
    notebook = nbformat.v4.upgrade(jupytext.read(script))
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"  # else random
        tags = cell.metadata.get("tags", [])
        if unknown := set(tags) - set(TAGS):
            raise ValueError(f"{script.name}: expected tags among {', '.join(TAGS)}, got {', '.join(unknown)}")
        # the site reads the tags, Jupyter the other entry
        hidden = {"tags": tags, "jupyter": {"source_hidden": True}} if tags else {}
        cell.metadata = nbformat.from_dict(hidden)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "name": "python"},
        }
    )
    return notebook


def execute(script: Path, smoke: bool = False) -> Any:
    """The notebook with its outputs, run in an empty folder."""
    notebook = read(script)
    metadata = copy.deepcopy(notebook.metadata)  # the kernel adds its own
    # One torch thread, as in `make`: matrices are too small to benefit from a second.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # Pyro's progress bars miss ipywidgets, which nothing here needs.
    environment["PYTHONWARNINGS"] = "ignore:IProgress not found"
    environment.pop(SMOKE, None)
    environment.pop("MPLBACKEND", None)  # the kernel's own shows figures in the notebook
    if smoke:
        environment[SMOKE] = "1"
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    notebook.metadata = metadata
    for output in _outputs(notebook):
        if "metadata" in output:
            output.metadata = nbformat.NotebookNode()
    return notebook


def problems(script: Path) -> list[str]:
    """What is wrong with the notebook of a script, a sentence each."""
    listing, path = FOLDER / "README.md", script.with_suffix(".ipynb")
    found = []
    if f"({path.name})" not in listing.read_text(encoding="utf-8"):
        found.append(f"{path.name} is not listed in {listing.name}")
    if not path.exists():
        return [*found, f"{path.name} does not exist: python tutorials/build.py {script.stem}"]
    notebook = nbformat.read(path, as_version=4)
    if _sources(notebook) != _sources(read(script)):
        found.append(f"{path.name} is out of date with {script.name}: python tutorials/build.py {script.stem}")
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"{path.name} was not run from top to bottom")
    outputs = _outputs(notebook)
    kinds = [output.output_type for output in outputs]
    if "error" in kinds:
        found.append(f"{path.name} holds an error")
    if any(output.get("name") == "stderr" for output in outputs):
        found.append(f"{path.name} holds warnings")
    if "stream" not in kinds or "display_data" not in kinds:
        found.append(f"{path.name} holds no numbers or no figures")
    folders = {str(FOLDER.parent), str(Path.home()), tempfile.gettempdir(), sys.prefix}
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    found += [f"{path.name} holds a path of this machine, {part}" for part in sorted(folders) if part + os.sep in text]
    if " at 0x" in text:
        found.append(f"{path.name} shows the address of an object: let no cell end with one")
    if (size := path.stat().st_size) > MAX_BYTES:
        found.append(f"{path.name} has {size} bytes, more than {MAX_BYTES}")
    return found


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _sources(notebook: Any) -> list[tuple[str, str, Any]]:
    return [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="tutorials such as 02_regression; all by default")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--check", action="store_true", help="run nothing; fail where a notebook is out of date")
    modes.add_argument("--smoke", action="store_true", help="run in the short mode and write nothing")
    options = parser.parse_args()
    chosen = scripts(options.names)
    if not options.check:
        for script in chosen:
            start = time.perf_counter()
            notebook = execute(script, options.smoke)
            if not options.smoke:
                nbformat.write(notebook, script.with_suffix(".ipynb"))
            print(f"{script.stem}: {time.perf_counter() - start:.0f} s", flush=True)
    if options.smoke:
        return
    found = [problem for script in chosen for problem in problems(script)]
    if found:
        sys.exit("\n".join(found))
    print(f"{len(chosen)} tutorials are up to date and listed")


if __name__ == "__main__":
    main()
