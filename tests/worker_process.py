"""A worker process of ``tests.workers``: answers calls in turn until a call changes global state."""

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.distributed.tensor import DTensor

LONGEST_WAIT = 5.0
"""Seconds to poll for the store. Afterwards torch itself reports that no process serves it."""
_PATCHED = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.parallel.distributed")
"""Modules of torch in which tests replace functions."""


class Call(NamedTuple):
    """A call for a worker.

    Attributes:
        function: the function to call.
        args: its arguments.
        environment: variables for this call alone.
        folder: gets the result or the traceback.
        process_group: whether to initialise a Gloo process group first.
        is_last: whether to end afterwards.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    folder: str
    process_group: bool
    is_last: bool


def serve(pipe: connection.Connection) -> None:
    """Answer calls and acknowledge each, until the pipe ends or a call has changed global state."""
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of that name
    rendezvous._create_c10d_store = _without_a_pause(rendezvous._create_c10d_store)
    environment, traces = dict(os.environ), _Traces()
    while True:
        try:
            call: Call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # A strategy of several workers sets the rank; a strategy of a single worker uses the present rank.
        rank_zero_only.rank = utilities_rank_zero_only.rank = 0
        with isolate_rng(include_cuda=False):
            _answer(call)
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
        if call.is_last or traces.have_changed():
            pipe.close()
            return
        pipe.send(None)


def _without_a_pause(create: Callable[..., Any]) -> Callable[..., Any]:
    """Make workers poll rank 0's store every few milliseconds; torch waits for at least half a second."""

    def create_when_served(hostname: str, port: int, rank: int, *others: Any, **options: Any) -> Any:
        deadline = time.monotonic() + LONGEST_WAIT
        while rank != 0 and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((hostname, port), 1.0):
                break
            time.sleep(0.005)
        return create(hostname, port, rank, *others, **options)

    return create_when_served


def _answer(call: Call) -> None:
    os.environ |= call.environment
    rank, num_workers = int(call.environment["RANK"]), int(call.environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        if call.process_group:
            store = f"file://{call.folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_workers)
            dist.barrier()  # an idle worker could close a connection that another is still opening
        Path(f"{call.folder}/{rank}.result").write_bytes(pickle.dumps(call.function(*call.args)))
        if dist.is_initialized() and (call.process_group or not call.is_last):
            dist.destroy_process_group()
            # Its cache holds meshes of destroyed groups, which torch 2.8 would use for later meshes of equal shape.
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    except BaseException:
        Path(f"{call.folder}/{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


class _Traces:
    """Remembers the global state that a call may change."""

    def __init__(self) -> None:
        self._settings = _settings()
        self._modules, self._classes = copies()

    def have_changed(self) -> bool:
        return (
            _settings() != self._settings
            or any(sys.modules.get(name) is not module for name, (module, _) in self._modules.items())
            or any(vars(now).get(key) is not was for now, copy in self._modules.values() for key, was in copy.items())
            or any(_methods(cls) != methods for cls, methods in self._classes)
        )


@functools.cache
def copies() -> tuple[dict[str, tuple[Any, dict[str, Any]]], list[tuple[type, dict[str, Any]]]]:
    """Return functions, classes, numbers and texts of our modules, and the methods of their classes.

    Other objects may be caches. The fork server calls this first, so that workers find the result cached.
    """
    modules = {
        name: (module, {key: value for key, value in vars(module).items() if _is_fixed(value)})
        for name, module in list(sys.modules.items())
        if name.startswith("lightning_sparse") or name in _PATCHED
    }
    classes = [
        (cls, _methods(cls))
        for name, (_, copy) in modules.items()
        for cls in copy.values()
        if issubclass(type(cls), type) and cls.__module__ == name
    ]
    return modules, classes


def _is_fixed(value: Any) -> bool:
    return callable(value) or issubclass(type(value), (str, int, float))  # some objects warn when asked for their class


def _methods(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if hasattr(value, "__get__")}


def _settings() -> dict[str, Any]:
    loggers = [logging.getLogger(), *map(logging.getLogger, ("lightning", "lightning.pytorch", "lightning_sparse"))]
    return {
        "folder": os.getcwd(),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "loggers": [(logger.level, list(logger.handlers), list(logger.filters)) for logger in loggers],
        "warnings": list(warnings.filters),
        "threads": threading.enumerate(),
        "children": multiprocessing.active_children(),
        "network": os.stat("/proc/self/ns/net").st_ino if sys.platform == "linux" else None,
    }
