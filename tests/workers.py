"""Runs a function in several worker processes at once and returns what each returned.

Processes come from a fork server that has imported what tests need once and trained nothing: starting a worker takes
a fraction of a second, and no thread of the test process is forked along. Workers stay for the next call, as a
notebook's kernel does, but those that failed or were left changed (``tests.worker_process``).
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
"""The environment variable that says what ``WORLD_SIZE`` does, which Lightning removes when a Trainer has finished."""

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
    """Returns ``[function(*args) on rank 0, …]``; raises what a worker raised, and kills all of them on a timeout.

    Args:
        function: importable by name (top level of a module); reads its rank from torch.distributed or the environment.
        num_workers: how many processes.
        *args: what it is called with; pickled.
        process_group: whether to initialise a Gloo process group first. Without, only torchrun's environment variables
            are set, from which a Trainer starts its own.
        timeout: seconds for all of them together.
        new: whether they must be processes that have met no other test, and that end as a program does.
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
    """Makes a test of the body that every worker runs; the options are those of ``run_workers``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_workers(_run_body, num_workers, body.__module__, body.__name__, arguments, **options)

        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def of_all_workers(value: Any) -> list[Any]:
    """Returns the values of all workers, by rank; every worker of the process group calls this."""
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
def _let_go() -> None:
    for worker in _kept:
        worker.pipe.close()
    for worker in _kept:
        worker.process.join(10)
        worker.process.kill()


def _wait_until_one_fails(workers: Sequence[_Worker], timeout: float) -> list[_Worker]:
    """Returns those that wait for another call, none where one failed; the others have ended or are of no use.

    Raises:
        TimeoutError: not all came to an end in so many seconds.
    """
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
                with contextlib.suppress(EOFError, ConnectionError):  # it ends, and its exit code says how
                    worker.pipe.recv()
                    staying.append(running.pop(worker.process.sentinel))
            elif worker := running.pop(source, None):
                pipes.pop(worker.pipe, None)
                if worker.process.exitcode and not failed:
                    failed, deadline = True, time.monotonic() + 1.0  # the others report too, if they can
    return [] if failed else staying


def environment_of(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Returns what torchrun tells a worker on a machine of its own."""
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
    """Keeps a port of this machine, on which only those listen who are told of it."""
    with socket.socket() as holder:
        # Bound and not listening: the system gives the port to nobody else, and who names it may listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
