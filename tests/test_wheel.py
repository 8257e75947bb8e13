"""The package as others install it: a source archive and a wheel, tried outside of the clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ["pyproject.toml", "setup.cfg", "README.md", "LICENSE", "pyro_vsd"]


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_installs_and_works_outside_of_the_clone(tmp_path):
    pytest.importorskip("build")
    clone, dist, installed = (tmp_path / name for name in ("clone", "dist", "installed"))
    clone.mkdir()
    for name in SOURCES:  # a copy: a build leaves files behind
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone)
    # the environment has the build's requirements; no network is needed
    run("-m", "build", "--no-isolation", "--outdir", dist, cwd=clone)
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")

    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "pyro_vsd").rglob("*.py")} | {"pyro_vsd/py.typed"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == modules
    with tarfile.open(archive) as content:
        assert {name.partition("/")[2] for name in content.getnames()} >= modules

    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", installed, wheel, cwd=tmp_path)
    printed = run(ROOT / "tests" / "smoke.py", cwd=tmp_path, PYTHONPATH=str(installed))
    assert str(installed / "pyro_vsd") in printed
