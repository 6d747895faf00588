"""Tests of kernels pass in Triton's interpreter: in a separate process, because it patches ``triton``."""

import os
import subprocess
import sys

import pytest

from tests.markdown import PROJECT

TESTS = PROJECT / "tests"


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["distributed/gradients/test_fused_training.py"], marks=pytest.mark.slow),
        ["unit/kernels/test_fused_threshold.py", "unit/kernels/test_fused_decode.py"],
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
