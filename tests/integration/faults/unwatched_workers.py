"""Worker processes without an agent, which would end the others after a death; the output of each is kept."""

import contextlib
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.markdown import PROJECT
from tests.workers import environment_of, reserved_port

HANG = 90.0
"""Seconds after which a process counts as hanging, far more than any process needs."""


class Workers:
    """Worker processes without an agent, each with an output file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []

    def wait(self, ranks: Iterable[int]) -> float:
        """Return the seconds until all of these processes ended on their own."""
        started = time.monotonic()
        for rank in ranks:
            self.processes[rank].join(max(0.0, started + HANG - time.monotonic()))
            assert self.processes[rank].exitcode is not None, f"rank {rank} hangs:\n{self.output(rank)}"
        return time.monotonic() - started

    def wait_for(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition that a worker causes."""
        deadline = time.monotonic() + HANG
        was_alive = True  # at the last check of the condition
        while not condition():
            assert was_alive, f"rank {rank} ended without {what}:\n{self.output(rank)}"
            assert time.monotonic() < deadline, f"no {what} within {HANG} s:\n{self.output(rank)}"
            time.sleep(0.02)
            was_alive = self.processes[rank].is_alive()

    def end(self) -> list[str]:
        """Wait for all workers, which must succeed; return their outputs."""
        ranks = range(len(self.processes))
        self.wait(ranks)
        printed = list(map(self.output, ranks))
        assert not any(process.exitcode for process in self.processes), "\n".join(printed)
        return printed

    def output(self, rank: int) -> str:
        path = self.folder / f"output of {rank}"
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def workers(num_workers: int, folder: Path, function: Callable[..., Any], *args: Any) -> Iterator[Workers]:
    """Start ``function(*args)`` in every worker; kill remaining workers at the end."""
    started = Workers(folder)
    context = multiprocessing.get_context("forkserver")  # prepared by tests.workers
    with reserved_port() as port:
        try:
            for rank in range(num_workers):
                process = context.Process(target=_work, args=(rank, num_workers, port, str(folder), function, args))
                _start(process)
                started.processes.append(process)
            yield started
        finally:
            for process in started.processes:
                process.kill()
                process.join()


def _start(process: Any) -> None:
    """Start a process that no other thread polls.

    ``Process.start()`` polls every known child. A thread that joins this child meanwhile may report 255.
    """
    with _starting:
        process.start()
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


_starting = threading.Lock()


def _work(rank: int, num_workers: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    output = os.open(f"{folder}/output of {rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Restores the foreground behaviour, because a shell makes background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= environment_of(rank, num_workers, port)
    torch.set_num_threads(1)
    function(*args)


def run_script(path: Path, folder: Path, *arguments: str) -> None:
    """Run a script in a folder, in this process."""
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def environment(**variables: str) -> dict[str, str]:
    """Return variables for a script that imports this project, without those of an enclosing run."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables


def printed_by(command: list[str], folder: Path = PROJECT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts its workers itself, and must succeed."""
    options = {"cwd": folder, "env": environment(**variables), "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wait_until(condition: Callable[[], bool], what: str, timeout: float = HANG) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.02)


def is_running(process_id: int) -> bool:
    """Return whether a process is alive, by its file in /proc."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # may disappear during the read
        return False
    return state not in "ZX"
