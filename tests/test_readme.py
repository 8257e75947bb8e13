"""Facts about the README: its Python runs as it is, its commands and links exist, the demo draws its figure."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyro_vsd as vsd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
OUTPUT = "".join(re.findall(r"^```text\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))


def test_readme_has_an_example():
    assert BLOCKS
    assert OUTPUT


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs(number, monkeypatch, tmp_path, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    try:
        exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), names)
    finally:
        plt.close("all")
    if number == 0:
        # what the README shows, up to what another machine rounds differently
        assert numbers_of(capsys.readouterr().out) == pytest.approx(numbers_of(OUTPUT), abs=0.03)


def numbers_of(report):
    return {name: float(value) for name, value in re.findall(r"^(\w+) +(\d\.\d+)", report, flags=re.MULTILINE)}


def names_of(block):
    """Dotted names that begin with ``vsd``."""
    nodes = [ast.unparse(node) for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Attribute)]
    return {name for name in nodes if re.fullmatch(r"vsd(\.\w+)+", name)}


# bayesian-torch#26: code that does not match its description; blitz#88: an example that does not converge (above)
@pytest.mark.parametrize("name", sorted(set().union(*map(names_of, BLOCKS))))
def test_a_name_in_the_readme_exists(name):
    thing = vsd
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    assert thing.__doc__


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE))
def test_command_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https?:|#)([^)#]+)", README))
def test_linked_file_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.slow
def test_demo_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tutorials" / "demo.py"), "--epochs", "2", "--seeds", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "NLL, pixel noise 0.4" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
