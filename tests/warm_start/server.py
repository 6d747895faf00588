"""Imports what commands of tests import, and forks itself for each of them: ``python server.py SOCKET``.

Ends, with all that it runs, when its standard input does.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import lookups

_MODULES = (
    "jsonargparse",
    "lightning.pytorch.cli",
    "sklearn.datasets",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "torchvision.datasets",
)
# What these begin with is read while modules are imported, but for a few that are not.
_READ_AT_IMPORT = ("GLOO_", "KMP_", "LD_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "TRITON_")
_READ_LATER = {
    "GLOO_SOCKET_IFNAME",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
_CLONE_NEWNET = 0x40000000

_ENVIRONMENT = dict(os.environ)


class Command(NamedTuple):
    """What the client was started with.

    Attributes:
        arguments: of Python: ``-m`` and a module, ``-c`` and code, or a file, and what follows.
        unbuffered: whether with ``-u``.
    """

    arguments: list[str]
    unbuffered: bool


def main(listener: socket.socket) -> tuple[dict[str, Any], Command] | None:
    """Serves until standard input ends; in a process that stands for a client, returns what it is to run."""
    running: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                _import_modules()  # not before somebody needs them
                request, files = _received(client)
                command = _command(request)
                if command is None:
                    client.sendall(b"n")
                elif (pid := os.fork()) == 0:
                    # Of the server nothing stays open in its fork.
                    for other in [*running, *(one.fd for one in selector.get_map().values() if one.data), listener]:
                        os.close(other if isinstance(other, int) else other.detach())
                    selector.close()
                    client.close()
                    _become(request, files)
                    return request, command
                else:
                    client.sendall(b"y")
                    running[client] = pid
                    selector.register(client, selectors.EVENT_READ)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
                for file in files:
                    os.close(file)
                if client not in running:
                    client.close()
            elif key.data is None:  # from a client: a signal, or it was killed
                client = key.fileobj
                try:
                    numbers = client.recv(64)
                except ConnectionError:
                    numbers = b""
                if not numbers:
                    selector.unregister(client)
                if client in running:
                    for number in numbers or [signal.SIGKILL]:
                        os.kill(running[client], number)
            else:  # a command has ended
                client = key.data
                _, status = os.waitpid(running.pop(client), 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):  # the client was killed
                    selector.unregister(client)
                with contextlib.suppress(OSError):
                    client.sendall(status.to_bytes(8, "big"))
                client.close()


@functools.cache
def _import_modules() -> None:
    gc.disable()
    lookups.remember_entry_points()
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # a command that needs it says so
            importlib.import_module(name)
    lookups.remember_number_of_gpus()
    gc.freeze()  # else a collection in a fork would write to all pages
    gc.enable()


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(client, 8, 64)
    with client.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(head, "big"))), files


def _command(request: dict[str, Any]) -> Command | None:
    """Returns what is to be run, or None if a fork of this process would not be what was asked for."""
    arguments = request["argv"][1:]
    unbuffered = arguments[0] == "-u"
    arguments = arguments[unbuffered:]
    known = arguments and (arguments[0] in ("-c", "-m") or not arguments[0].startswith("-"))

    def read_at_import(environment: Any) -> dict[str, str]:
        names = {name for name in environment if name.startswith(_READ_AT_IMPORT)}
        names -= _READ_LATER | _set_by_imports().keys()
        if "triton" not in sys.modules:
            names = {name for name in names if not name.startswith("TRITON_")}
        return {name: environment[name] for name in names}

    same = (
        request["prefix"] == sys.prefix
        and (_is_in(request["network"]) or os.geteuid() == 0)
        and read_at_import(request["environment"]) == read_at_import(_ENVIRONMENT)
    )
    return Command(arguments, unbuffered) if known and same else None


def _is_in(network: int) -> bool:
    return network == os.stat("/proc/self/ns/net").st_ino


def _set_by_imports() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Takes over a client's files, folder and environment."""
    os.setsid()  # what a command sends to its process group is not for the tests
    for target, file in enumerate(files[:3]):
        os.dup2(file, target)
    os.fchdir(files[3])
    if not _is_in(request["network"]) and ctypes.CDLL(None, use_errno=True).setns(files[4], _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no way into the network namespace")
    # Out of the way of the numbers that they are to have.
    inherited = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files[5:]]
    for file in files:
        os.close(file)
    for target, file in zip(request["inherited"], inherited, strict=True):
        os.dup2(file, target)
        os.close(file)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    environment = _set_by_imports() | request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    # Triton lists what is still there when Python ends, and frozen objects are.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    # What modules found out when they were imported.
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    rank_zero_only.rank = _get_rank() or 0
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()


def run(request: dict[str, Any], command: Command) -> None:
    """Runs a command as Python does."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.orig_argv = request["argv"]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where spawned processes look for the script
    if command.unbuffered:
        sys.stdout.reconfigure(write_through=True)
    first, *others = command.arguments
    folders = {"-c": "", "-m": os.getcwd()}
    folder = folders[first] if first in folders else str(Path(first).resolve().parent)
    listed = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *(os.path.abspath(entry) for entry in listed if entry)]
    importlib.invalidate_caches()
    if first == "-m":
        sys.argv = ["-m", *others[1:]]
        runpy._run_module_as_main(others[0])
    elif first == "-c":
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = command.arguments
        module.__file__ = first
        module.__spec__ = None
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", first)
        exec(compile(Path(first).read_bytes(), first, "exec"), module.__dict__)


if __name__ == "__main__":
    asked = main(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        os._exit(0)  # no word of what is still in use
    run(*asked)
