"""The harness of ``make gpu-check`` with two workers on CPUs."""

import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks import report
from benchmarks.gpu_check import __main__ as gpu_check


@pytest.mark.full
@pytest.mark.long
def test_the_harness_writes_a_report_with_verdicts(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    options = ["--device", "cpu", "--only", "kernels", "steps", "faults", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *options])
    assert gpu_check.main() == 0, path.read_text()
    report = path.read_text()
    assert "- Steps: passed" in report
    assert "- Faults: passed" in report
    assert "NO" not in report.replace("NOT", "")
    rows = {line.split("  ")[0]: line.split() for line in report.splitlines()}
    assert rows["DDP"][-1] == rows["gather, 16-mixed"][-1] == "yes"
    assert "the same bits" in report


NO_GPU = pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cpu", "--only", "kernel"], "invalid choice: 'kernel'"),
        (["--device", "cpu", "--output", "no/such/folder/report.md"], "No such file .* Name a file in a folder"),
        pytest.param([], "--device cpu tests this script only", marks=NO_GPU),
    ],
)
def test_invalid_arguments_are_rejected_before_any_measurement(options, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check", *options])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert re.search(words, capsys.readouterr().err)


def test_an_interrupt_keeps_measurements_and_a_failure_names_its_reason(tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        return subprocess.CompletedProcess([], 1, "", "Traceback\nOSError: no data there")

    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check.subprocess, "run", fail)
    monkeypatch.setattr(gpu_check, "SECTIONS", (gpu_check.training, interrupt, gpu_check.faults))
    surroundings: dict[str, Any] = {"command": "-", "date": "-", "commit": "-", "hardware": {}, "versions": {}}
    monkeypatch.setattr(gpu_check.report, "surroundings", lambda: surroundings)
    monkeypatch.setenv("LIGHTNING_SPARSE_DATA", str(tmp_path))
    path = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--output", str(path)])
    assert gpu_check.main() == 1
    assert path.read_text() == capsys.readouterr().out
    assert "OSError: no data there" in path.read_text()
    assert path.read_text().strip().endswith("interrupted\n```")


def test_results_name_the_command_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("benchmarks.step_time.__main__"))
    monkeypatch.setattr(sys, "argv", ["benchmarks/step_time/__main__.py", "--hosts", "2"])
    assert report.surroundings()["command"] == "python -m benchmarks.step_time --hosts 2"
