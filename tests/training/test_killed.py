"""Training that is killed again and again ends with the weights of the run that was left alone."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training import cases

NAMES = ("whole", "saved", "killed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a fork server")
@pytest.mark.parametrize("kind", ["torch", "pyro"])
def test_killed_twenty_five_times(kind, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.killed", str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    kills, steps = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kills == 25
    assert steps >= 5  # the kills fell all over the run
    whole, saved, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in NAMES)
    assert cases.same(saved, whole)
    assert cases.same(killed, whole)
