"""Runs a function in several worker processes at once and returns their results.

Processes come from a fork server that has imported the modules of tests and trained nothing. A worker starts in a
fraction of a second, without threads of the test process. It stays for the next call, unless it failed or its global
state has changed (``tests.worker_process``).
"""

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.worker_process import Call, serve

NUM_WORKERS = "LIGHTNING_SPARSE_TEST_WORKERS"
"""A copy of the environment variable ``WORLD_SIZE``, which Lightning removes after a Trainer has finished."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


class _Worker(NamedTuple):
    process: Any
    pipe: connection.Connection


_kept: list[_Worker] = []


def run_workers(
    function: Callable[..., Any],
    num_workers: int,
    *args: Any,
    process_group: bool = True,
    timeout: float = 150.0,
    new: bool = False,
) -> list[Any]:
    """Return ``[function(*args) on rank 0, …]``; raise the error of a worker; kill all on a timeout.

    Args:
        function: importable by name (top level of a module); reads its rank from torch.distributed or the environment.
        num_workers: number of processes.
        *args: pickled arguments of the function.
        process_group: whether to initialise a Gloo process group first. If False, only torchrun's environment variables
            are set, with which a Trainer creates its own group.
        timeout: seconds for all workers together.
        new: whether to use fresh processes that end after the call as a program does.
    """
    workers = [] if new else _kept[:num_workers]
    del _kept[: len(workers)]
    workers += [_start() for _ in range(num_workers - len(workers))]
    staying: list[_Worker] = []
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        try:
            for rank, worker in enumerate(workers):
                environment = environment_of(rank, num_workers, port)
                call = Call(function, args, environment, folder, process_group, is_last=new)
                worker.pipe.send_bytes(pickle.dumps(call))  # send() would let workers share the memory of tensors
            staying = _wait_until_one_fails(workers, timeout)
        finally:
            for worker in workers:
                if worker not in staying:
                    worker.process.kill()
                    worker.process.join()
                    worker.pipe.close()
        _kept.extend(staying)
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failed"))]
        if failures:
            raise AssertionError("\n".join(failures))
        exit_codes = [worker.process.exitcode for worker in workers]
        if any(exit_codes):
            raise AssertionError(f"workers died with exit codes {exit_codes}")
        return [pickle.loads(Path(f"{folder}/{rank}.result").read_bytes()) for rank in range(num_workers)]


def on_workers(num_workers: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function that every worker runs into a test; options are those of ``run_workers``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_workers(_run_body, num_workers, body.__module__, body.__name__, arguments, **options)

        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def of_all_workers(value: Any) -> list[Any]:
    """Return the values of all workers by rank. Collective: every rank calls this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _start() -> _Worker:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    return _Worker(process, ours)


@atexit.register
def _end_workers() -> None:
    for worker in _kept:
        worker.pipe.close()
    for worker in _kept:
        worker.process.join(10)
        worker.process.kill()


def _wait_until_one_fails(workers: Sequence[_Worker], timeout: float) -> list[_Worker]:
    """Return the workers that wait for another call, or none if any failed; raise TimeoutError after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    failed = False
    staying = []
    pipes = {worker.pipe: worker for worker in workers}
    running = {worker.process.sentinel: worker for worker in workers}
    while running:
        ready = connection.wait([*pipes, *running], max(0.0, deadline - time.monotonic()))
        if not ready and not failed:
            raise TimeoutError(f"workers did not finish within {timeout} s")
        if not ready:
            break
        for source in ready:
            if worker := pipes.pop(source, None):
                with contextlib.suppress(EOFError, ConnectionError):  # its exit code is checked below
                    worker.pipe.recv()
                    staying.append(running.pop(worker.process.sentinel))
            elif worker := running.pop(source, None):
                pipes.pop(worker.pipe, None)
                if worker.process.exitcode and not failed:
                    failed, deadline = True, time.monotonic() + 1.0  # gives the other workers time to report
    return [] if failed else staying


def environment_of(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives a worker on its own machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_workers),
        NUM_WORKERS: str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of this machine for processes that get its number."""
    with socket.socket() as holder:
        # Bound but not listening: the system assigns the port to no other process, and ours may listen on it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
