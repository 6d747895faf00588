"""Processes of a command with the environment variables of torchrun, on hosts of a lab or on loopback."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "RESULT "
"""Begins the line in which a worker prints its result as JSON."""


class Workers:
    """The processes of a command, started with torchrun's environment variables.

    Args:
        commands: Program and arguments for each host.
        workers_per_host: Processes per host.
        variables: Environment variables in addition to torchrun's and this process's. OMP_NUM_THREADS is 1 by default.
        pin: Whether to pin each worker to a processor core, in turn over the available cores.
        echo: Whether to print each line with the number of its host.

    Attributes:
        processes: Processes by rank; each leads a process group.
        lines: Lines that each worker has written to stdout and stderr, by rank.
        failed_rank: The worker whose nonzero exit status `wait` returned.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        workers_per_host: int,
        variables: Mapping[str, str],
        pin: bool,
        echo: bool,
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[list[str]] = []
        self.failed_rank: int | None = None
        self._readers: list[threading.Thread] = []
        cores = os.sched_getaffinity(0)
        affinities = itertools.cycle([{core} for core in sorted(cores)] if pin else [cores])
        world_size = len(commands) * workers_per_host
        try:
            for rank in range(world_size):
                host, local_rank = divmod(rank, workers_per_host)
                environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                environment |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(workers_per_host)}
                environment |= {"GROUP_RANK": str(host), "NODE_RANK": str(host), **variables}
                # A child inherits the affinity before it counts cores or starts threads.
                os.sched_setaffinity(0, next(affinities))
                self._start(commands[host], environment, f"[host {host}] " if echo else None)
        except BaseException:
            self.end()
            raise
        finally:
            os.sched_setaffinity(0, cores)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], label: str | None) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, env=environment, text=True, errors="replace", start_new_session=True, **pipes
        )
        self.processes.append(process)
        self.lines.append([])
        self._readers.append(threading.Thread(target=_read, args=(process, self.lines[-1], label), daemon=True))
        self._readers[-1].start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all workers and return 0, or end them at the first nonzero exit status and return it.

        Raises:
            TimeoutError: After `timeout` seconds; ends all workers.
        """
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        try:
            while True:
                statuses = [process.poll() for process in self.processes]
                if any(statuses):
                    self.failed_rank, status = next((rank, status) for rank, status in enumerate(statuses) if status)
                    return status if status > 0 else 128 - status  # as a shell reports a signal
                if None not in statuses:
                    return 0
                if time.monotonic() > deadline:
                    running = [rank for rank, status in enumerate(statuses) if status is None]
                    raise TimeoutError(f"Workers {running} still run after {timeout} s.")
                time.sleep(0.02)
        finally:
            self.end()

    def outputs(self, timeout: float | None = None) -> list[str]:
        """Wait for all workers and return their output by rank.

        Raises:
            RuntimeError: A worker fails; ends the other workers.
            TimeoutError: After `timeout` seconds; ends all workers.
        """
        status = self.wait(timeout)
        outputs = ["".join(lines) for lines in self.lines]
        if self.failed_rank is not None:
            raise RuntimeError(f"Rank {self.failed_rank} ended with {status=}:\n{outputs[self.failed_rank]}")
        return outputs

    def end(self) -> None:
        """Terminate the running workers, and kill them after five seconds."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            deadline = time.monotonic() + 5.0
            for process in running:
                os.killpg(process.pid, number)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(1.0)  # with a limit, because a child of a worker may keep the pipe open


def _read(process: subprocess.Popen[str], lines: list[str], label: str | None) -> None:
    with process.stdout as stream:
        for line in stream:
            lines.append(line)
            if label is not None:
                sys.stdout.write(f"{label}{line.rstrip()}\n")
                sys.stdout.flush()


def start_on_loopback(
    command: Sequence[str],
    hosts: int,
    workers_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    pin: bool = True,
    echo: bool = False,
) -> Workers:
    """Start a command on loopback as the workers of several hosts; see `Workers` for the arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    return Workers([command] * hosts, workers_per_host, variables, pin, echo)


def read_results(outputs: Sequence[str]) -> list[Any]:
    """Return each worker's JSON result after the mark, by rank."""
    return [
        json.loads(next(line for line in text.splitlines() if line.startswith(MARK))[len(MARK) :]) for text in outputs
    ]
