"""A worker process of ``tests.workers``: answers calls one by one, as long as none leaves anything behind."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

_PATCHED = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.parallel.distributed")
"""Into which modules, beside ours, tests put functions of their own."""


class Call(NamedTuple):
    """What a worker is to do.

    Attributes:
        function: is called.
        args: with what.
        environment: variables for this call alone.
        folder: where the result goes, or the traceback.
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
    """Answers calls, each with a word when it is done, until the pipe ends or something has changed for good."""
    environment, random_states, found = dict(os.environ), _random_states(), _traces()
    while True:
        try:
            call: Call = pipe.recv()
        except EOFError:
            return
        _set_random_states(*random_states)
        # A strategy of several workers says who they are; one of a single worker takes it as it is.
        rank_zero_only.rank = utilities_rank_zero_only.rank = 0
        _answer(call)
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
        if call.is_last or _changed(found):
            pipe.close()
            return
        pipe.send(None)


def _answer(call: Call) -> None:
    os.environ |= call.environment
    rank, num_workers = int(call.environment["RANK"]), int(call.environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        if call.process_group:
            store = f"file://{call.folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_workers)
            dist.barrier()  # who has nothing to do would close what another is still connecting to
        torch.save(call.function(*call.args), f"{call.folder}/{rank}.result")
        if dist.is_initialized() and (call.process_group or not call.is_last):
            dist.destroy_process_group()
    except BaseException:
        Path(f"{call.folder}/{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_random_states(python: Any, of_numpy: Any, of_torch: torch.Tensor) -> None:
    random.setstate(python)
    numpy.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


def _changed(found: dict[Any, Any]) -> bool:
    traces = _traces()
    return any(traces.get(key) != value for key, value in found.items())


def _traces() -> dict[Any, Any]:
    """What a call may leave for the next one to meet."""
    loggers = [logging.getLogger(), *map(logging.getLogger, ("lightning", "lightning.pytorch", "lightning_sparse"))]
    traces: dict[Any, Any] = {
        "folder": os.getcwd(),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "loggers": [(logger.level, list(logger.handlers), list(logger.filters)) for logger in loggers],
        "warnings": list(warnings.filters),
        "threads": threading.enumerate(),
        "children": multiprocessing.active_children(),
        "network": os.stat("/proc/self/ns/net").st_ino if sys.platform == "linux" else None,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_sparse") or name in _PATCHED:
            for key, value in list(vars(module).items()):
                kind = type(value)  # not isinstance: some objects warn when they are asked for their class
                if issubclass(kind, type) and value.__module__ == name:
                    traces[name, key] = [(key, id(one)) for key, one in vars(value).items() if hasattr(one, "__get__")]
                elif callable(value) or issubclass(kind, (str, int, float)):
                    traces[name, key] = id(value)
    return traces
