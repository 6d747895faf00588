"""Tests of kernels pass in Triton's interpreter: in a separate process, because it patches ``triton``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["distributed/test_fused_training.py"], marks=pytest.mark.slow),
        ["unit/test_fused_threshold.py", "unit/test_fused_decode.py"],
    ],
)
def test_kernels_pass_in_tritons_interpreter(files):
    pytest.importorskip("triton", reason="triton is not installed")
    paths = [str(TESTS / file) for file in files]
    command = [sys.executable, "-m", "pytest", *paths, "-q", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"TRITON_INTERPRET=1 {' '.join(command)}\n{done.stdout}\n{done.stderr}", pytrace=False)
