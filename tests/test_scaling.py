"""The scripts of ``docs/scaling.md`` as a user would run them, in two processes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_distributed import two_processes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"```text\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
pytestmark = pytest.mark.slow


@two_processes
@pytest.mark.skipif(importlib.util.find_spec("torch.distributed.fsdp._fully_shard") is None, reason="before torch 2.6")
def test_sharded_parameters_in_two_processes(tmp_path):
    (tmp_path / "sharded.py").write_text(SCRIPTS["sharded.py"], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sharded.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_sweep_of_two_processes(tmp_path):
    optuna = pytest.importorskip("optuna")
    script = SCRIPTS["sweep.py"].replace("n_trials=10", "n_trials=2")
    command = [sys.executable, "-c", script]
    pair = [subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in pair] == [0, 0]
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep.log"))
    study = optuna.load_study(study_name="digits", storage=optuna.storages.JournalStorage(backend))
    assert [trial.state.is_finished() for trial in study.trials] == [True] * 4
