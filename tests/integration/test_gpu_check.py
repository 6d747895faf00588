"""The harness of ``make gpu-check``, over two workers on CPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_harness_writes_a_report_with_verdicts(tmp_path):
    path = tmp_path / "report.md"
    options = ["--device", "cpu", "--only", "kernels", "steps", "faults", "--output", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = path.read_text()
    assert done.returncode == 0, report + done.stderr
    assert "- Steps: as it should be" in report
    assert "- Faults: as it should be" in report
    assert "NO" not in report.replace("NOT", "")
    rows = {line.split("  ")[0]: line.split() for line in report.splitlines()}
    assert rows["DDP"][-1] == rows["gather, 16-mixed"][-1] == "yes"
    assert "the same bits" in report


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(tmp_path / "report.md")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--device cpu runs the same harness" in done.stderr
