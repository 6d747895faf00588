"""Runs a function in several worker processes at once and returns what each returned.

Processes come from a fork server that has imported what tests need once and computed nothing: starting a worker takes
a fraction of a second, it has met no other test, and no thread of the test process is forked along.
"""

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def run_workers(
    function: Callable[..., Any], num_workers: int, *args: Any, process_group: bool = True, timeout: float = 150.0
) -> list[Any]:
    """Returns ``[function(*args) on rank 0, …]``; raises what a worker raised, and kills all of them on a timeout.

    Args:
        function: importable by name (top level of a module); reads its rank from torch.distributed or the environment.
        num_workers: how many processes.
        *args: what it is called with; pickled.
        process_group: whether to initialise a Gloo process group first. Without, only torchrun's environment variables
            are set, from which a Trainer starts its own.
        timeout: seconds for all of them together.
    """
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        processes = [
            _context.Process(target=_work, args=(function, args, rank, num_workers, folder, port, process_group))
            for rank in range(num_workers)
        ]
        for process in processes:
            process.start()
        try:
            if not _wait_until_one_fails(processes, timeout):
                raise TimeoutError(f"workers did not finish within {timeout} s")
        finally:
            for process in processes:
                process.kill()
                process.join()
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failed"))]
        if failures:
            raise AssertionError("\n".join(failures))
        if any(process.exitcode for process in processes):
            raise AssertionError(f"workers died with exit codes {[process.exitcode for process in processes]}")
        return [torch.load(f"{folder}/{rank}.result", weights_only=False) for rank in range(num_workers)]


def _wait_until_one_fails(processes: Sequence[Any], timeout: float) -> bool:
    """Waits for all processes; returns whether they have ended, or one of them has failed, in so many seconds."""
    deadline = time.monotonic() + timeout
    failed = False
    while running := [process for process in processes if process.exitcode is None]:
        if not failed and any(process.exitcode for process in processes):
            failed, deadline = True, time.monotonic() + 1.0  # the others report too, if they can
        if not connection.wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            return failed
    return True


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_workers: int,
    folder: str,
    port: int,
    process_group: bool,
) -> None:
    os.environ |= environment_of(rank, num_workers, port)
    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_workers)
        torch.save(function(*args), f"{folder}/{rank}.result")
        if process_group:
            dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def environment_of(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Returns what torchrun tells a worker on a machine of its own."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_workers),
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
