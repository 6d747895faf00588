"""What is left of a Python whose command a server runs: it passes signals on and ends as the command ends."""

import json
import os
import signal
import socket
import sys

_PASSED_ON = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
)  # fmt: skip

_CODE = ("from multiprocessing.forkserver import main;", "import sys;exec(eval(sys.stdin.readline()))")
"""How the fork server of :mod:`tests.workers` begins, and how pytest-xdist's processes do. No other ``-c`` is run."""


def hand_over(address: str) -> None:
    """Has a server run this process's command and ends with it; returns where the server will not or is not there."""
    arguments = sys.orig_argv[1:]
    is_code = "-c" in arguments[:2]
    if not arguments or (is_code and not arguments[-1].startswith(_CODE)):
        return
    inherited = _inherited() if is_code else []
    try:
        server = _connected(address)
    except OSError:
        return
    request = {
        "argv": sys.orig_argv,
        "prefix": sys.prefix,
        "environment": dict(os.environ),
        "affinity": sorted(os.sched_getaffinity(0)),
        "network": os.stat("/proc/self/ns/net").st_ino,
        "umask": _umask(),
        "inherited": inherited,
        "ignored": [number for number in _PASSED_ON if signal.getsignal(number) is signal.SIG_IGN],
    }
    body = json.dumps(request).encode()
    folder, network = os.open(".", os.O_RDONLY), os.open("/proc/self/ns/net", os.O_RDONLY)
    # Whatever arrives from here on is for the command.
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: server.sendall(bytes([number])))
    socket.send_fds(server, [len(body).to_bytes(8, "big")], [0, 1, 2, folder, network, *inherited])
    server.sendall(body)
    if server.recv(1) != b"y":
        for number in _PASSED_ON:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
        server.close()
        os.close(folder)
        os.close(network)
        return
    for file in inherited:
        os.close(file)
    status = server.recv(8)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connected(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:
        server.close()
        raise
    return server


def _inherited() -> list[int]:
    """Returns the numbers of the files that this process was given beside the usual three."""
    found = []
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number > 2:
            try:
                found += [number] * os.get_inheritable(number)
            except OSError:  # that of the list itself
                continue
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
