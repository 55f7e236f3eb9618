"""Every opcode that the tables know runs in a test that compares it with an oracle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("pseudocode", "valu", "salu", "matrix", "memory", "lds", "triton")


@pytest.mark.slow
def test_every_opcode_runs_in_a_test():
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "opcode_coverage",
        *(str(here / f"test_{f}.py") for f in FILES),
    ]
    environment = os.environ | {"PYTHONPATH": str(here)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "never run: none" in done.stdout, done.stdout[-2000:]
