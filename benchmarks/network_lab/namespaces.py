"""Network namespaces by the commands ``ip`` and ``tc``."""

import contextlib
import json
import os
import re
import signal
import subprocess

PREFIX = "sparse-lab"
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# Burst of a link after a pause. A larger burst speeds up short transfers; a smaller burst lets timers slow a fast link.
BURST_SECONDS, MIN_BURST_BYTES = 0.25e-3, 20_000
# Larger than the socket buffers of a few connections, because a full queue drops packets.
QUEUE_BYTES = 64_000_000


def clean() -> list[str]:
    """Remove the namespaces of labs whose process has ended, kill their processes, and return their names."""
    names = [entry["name"] for entry in json.loads(run("ip", "-j", "netns", "list") or "[]")]
    labs = [re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name) for name in names]
    abandoned = [lab[0] for lab in labs if lab and not os.path.exists(f"/proc/{lab[1]}")]
    for name in abandoned:
        remove(name)
    return abandoned


def shape_line(device: str, rate: str | None) -> str:
    """Return a line for `tc` that shapes a device's outgoing traffic."""
    if rate is None:
        return f"qdisc replace dev {device} root noqueue"
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"Invalid {rate=}. Must be a number with the unit kbit, mbit or gbit, such as 1gbit.")
    bytes_per_second = float(rate[:-4]) * UNITS[rate[-4]] / 8
    burst = max(MIN_BURST_BYTES, int(BURST_SECONDS * bytes_per_second))
    return f"qdisc replace dev {device} root tbf rate {rate} burst {burst} limit {QUEUE_BYTES}"


def configure(program: str, namespace: str, *lines: str) -> None:
    """Execute lines of `ip` or `tc` in a namespace."""
    run(program, "-n", namespace, "-batch", "-", lines="\n".join(lines))


def run(*command: str, lines: str = "") -> str:
    """Return the standard output of a command with `lines` as its input."""
    # In a new session, so that Ctrl-C does not reach the commands that clean up.
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {' '.join(done.stderr.split())} {lines}".rstrip())
    return done.stdout


def remove(namespace: str) -> None:
    """Kill the processes in a namespace and remove it, if it exists."""
    with contextlib.suppress(RuntimeError):
        for process in run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "delete", namespace)
