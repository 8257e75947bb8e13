"""Pyro's own autoguide tests, with our guide in AutoNormal's place.

They are in neither Pyro's wheel nor its sdist: ``PYRO_SOURCE`` names a checkout of its source.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = os.environ.get("PYRO_SOURCE", "")
FILES = ["tests/infer/test_autoguide.py", "tests/nn/test_module.py"]
PLUGIN = """
import pyro.infer.autoguide, pyro.infer.autoguide.guides
from pyro_vsd import VSDGuide

class AutoNormal(VSDGuide):
    pass

pyro.infer.autoguide.AutoNormal = pyro.infer.autoguide.guides.AutoNormal = AutoNormal
"""
# What we do otherwise, on purpose.
DIFFERENT = {
    # asserts that sites are drawn through a Delta, which loses analytic KLs
    r"test_scores\[AutoNormal\]",
    # assert that two guides share parameters through Pyro's global store
    r"test_autonormal_dynamic_model.*",
    r"test_svi_elbomodule_interface\[.*AutoNormal.*-False\]",
}


def failures(plugin=None):
    """The tests of Pyro that pass and those that fail."""
    chosen = "(AutoNormal or autonormal) and not Messenger"
    command = [sys.executable, "-m", "pytest", "-q", "-rfEp", "-p", "no:cacheprovider", "-k", chosen]
    path = [str(ROOT), SOURCE]
    if plugin is not None:
        command += ["-p", plugin.stem]
        path.append(str(plugin.parent))
    # Most of Pyro's test models have no weights, of which our guide warns; torch's jit is on its way out.
    for ignored in ("the model has no weight:UserWarning", "site .* has shape:UserWarning", ":FutureWarning"):
        command += ["-W", f"ignore:{ignored}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *FILES], cwd=SOURCE, capture_output=True, text=True, env=environment)
    passed, failed = (
        set(re.findall(rf"^(?:{words}) \S+?::(\S+)", done.stdout, re.MULTILINE)) for words in ("PASSED", "FAILED|ERROR")
    )
    assert passed, done.stdout[-3000:] + done.stderr[-3000:]
    return passed, failed


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="PYRO_SOURCE does not name a checkout of Pyro's source")
def test_pyros_tests_of_autoguides(tmp_path):
    plugin = tmp_path / "our_guide_for_auto_normal.py"
    plugin.write_text(PLUGIN)
    passed, failed = failures(plugin)
    theirs, broken = failures()
    assert passed | failed == theirs | broken
    new = failed - broken
    expected = {test for test in theirs if any(re.fullmatch(pattern, test) for pattern in DIFFERENT)}
    assert new == expected
    assert len(expected) == 6
    assert len(passed) > 70
