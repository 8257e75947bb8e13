"""Without matplotlib the error names the extra."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CODE = """
import sys
sys.modules["matplotlib"] = None
try:
    import pyro_vsd.plots
except ImportError as error:
    print(error)
"""


def test_error_names_the_extra():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'pyro_vsd[plots]'" in done.stdout
