"""What is left of a Python whose command a server runs: it passes signals on and ends as the command ends."""

import json
import os
import signal
import socket
import sys

_PASSED_ON = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
)  # fmt: skip


def hand_over(address: str) -> None:
    """Has a server run this process's command and ends with it; returns where the server will not or is not there."""
    if len(sys.orig_argv) < 2 or sys.orig_argv[1] == "-c":  # multiprocessing's own, most of them
        return
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
        "ignored": [number for number in _PASSED_ON if signal.getsignal(number) is signal.SIG_IGN],
    }
    body = json.dumps(request).encode()
    folder, network = os.open(".", os.O_RDONLY), os.open("/proc/self/ns/net", os.O_RDONLY)
    # Whatever arrives from here on is for the command.
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: server.sendall(bytes([number])))
    socket.send_fds(server, [len(body).to_bytes(8, "big")], [0, 1, 2, folder, network])
    server.sendall(body)
    if server.recv(1) != b"y":
        for number in _PASSED_ON:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
        server.close()
        os.close(folder)
        os.close(network)
        return
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
