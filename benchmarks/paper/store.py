"""Where results live: one small JSON per unit, ``<folder>/<task>/<variant>-seed<k>.json``.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> path = save({"metrics": {"nll": 0.5}}, folder, "mnist", "vsd", 0)
>>> path.name
'vsd-seed0.json'
>>> load(folder, "mnist")[0]["metrics"]
{'nll': 0.5}
"""

import json
import math
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "done", "load", "load_one", "path_of", "rounded", "save"]

#: the committed results
RESULTS = Path(__file__).resolve().parent.parent / "results"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.]*", re.ASCII)


def path_of(folder: str | Path, task: str, variant: str, seed: int) -> Path:
    """The file of a unit."""
    for what, name in (("task", task), ("variant", variant)):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{what}: expected lower-case letters, digits, dots and underscores, got {name!r}.")
    return Path(folder) / task / f"{variant}-seed{seed}.json"


def save(result: dict[str, Any], folder: str | Path, task: str, variant: str, seed: int) -> Path:
    """Writes a result with its key; a reader sees the whole file or none, also if the process is killed meanwhile.

    :param result: what JSON can hold, without NaN and infinities; ``task``, ``variant`` and ``seed`` are added.
    """
    path = path_of(folder, task, variant, seed)
    text = json.dumps({"task": task, "variant": variant, "seed": seed} | result, indent=1, allow_nan=False)
    write(path, _compact(text) + "\n")
    return path


def write(path: Path, text: str) -> None:
    """Writes a file by a temporary neighbour and a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def done(folder: str | Path, task: str, variant: str, seed: int) -> bool:
    """Whether the unit has a result; a file that holds none is warned of and does not count."""
    path = path_of(folder, task, variant, seed)
    if not path.is_file():
        return False
    try:
        load_one(path)
    except ValueError as error:
        warnings.warn(f"{error} It counts as missing.", stacklevel=2)
        return False
    return True


def load_one(path: Path) -> dict[str, Any]:
    """One result.

    :raises ValueError: naming the file, where it holds something else.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: expected a result, got no JSON ({error}). Run its unit again.") from None
    if not isinstance(result, dict) or not {"task", "variant", "seed"} <= result.keys():
        raise ValueError(f"{path}: expected a result with its task, variant and seed. Run its unit again.")
    return result


def load(folder: str | Path, task: str) -> list[dict[str, Any]]:
    """All results of a task, by file name; an empty list where there are none."""
    return [load_one(path) for path in sorted((Path(folder) / task).glob("*-seed*.json"))]


def rounded(value: Any, digits: int = 6) -> Any:
    """The same tree with its floats rounded to significant digits, so that files stay small.

    >>> rounded({"a": [1 / 3, 2]}, 3)
    {'a': [0.333, 2]}
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else value
    if isinstance(value, dict):
        return {key: rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one, digits) for one in value]
    return value


def _compact(text: str) -> str:
    """Lists of numbers on one line; strings cannot be meant, they hold no line breaks in JSON."""
    return re.sub(r"\[\n([^\[\]{}\"]*)\n *\]", lambda m: "[" + " ".join(m.group(1).split()) + "]", text)
