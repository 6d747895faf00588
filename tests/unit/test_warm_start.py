"""A command that a server runs is to its parent what it would be without."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.warm_start import VARIABLE, warm_start
from tests.workers import run_workers

SCRIPT = """
import os, sys, time
print("torch" in sys.modules, __name__, sys.argv[1:], os.getcwd(), os.environ["MARK"], sys.stdin.read(), flush=True)
print(os.getpid(), file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server():
    if VARIABLE in os.environ:
        yield
    else:
        with warm_start():
            yield


@pytest.fixture
def script(server, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*arguments, **environment):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        variables = os.environ | {"MARK": "ä", "OMP_NUM_THREADS": "1"} | environment
        command = [sys.executable, "script.py", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=variables, text=True, encoding="utf-8", **pipes)

    def run(*arguments, **environment):
        with start(*arguments, **environment) as process:
            output, _ = process.communicate("given")
        return process.returncode, output

    return SimpleNamespace(start=start, run=run, folder=tmp_path)


@pytest.mark.parametrize(
    ("environment", "warm"), [({}, True), ({"OMP_NUM_THREADS": "2"}, False), ({VARIABLE: "/nowhere"}, False)]
)
def test_a_script_has_its_arguments_folder_variables_input_and_exit_code(environment, warm, script):
    expected = f"{warm} __main__ ['3', 'b c'] {script.folder} ä given\n"
    assert script.run("3", "b c", **environment) == (3, expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it(number, script):
    with script.start("wait") as process:
        process.stdin.close()
        pid = int(process.stderr.readline())
        assert pid != process.pid  # it is the server's
        process.send_signal(number)
        assert process.wait(20) == -number
        process.stderr.read()  # until it has ended, also where only its parent's process was killed
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():  # the server has yet to ask how
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_forked_may_use_gpus(script):
    """CUDA cannot be used in a fork of a process that has asked for GPUs: nothing that is forked here from has."""
    (script.folder / "script.py").write_text("import torch; print('torch' in globals(), torch.cuda._is_in_bad_fork())")
    assert script.run() == (0, "True False\n")
    assert run_workers(is_spoilt, 1, new=True) == [False]


def is_spoilt():
    return torch.cuda._is_in_bad_fork()
