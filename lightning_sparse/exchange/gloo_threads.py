"""Has the threads in which Gloo handles what arrives wait for those that send.

Such a thread needs the lock of a pair of workers, which whoever sends to that worker or receives from it holds
meanwhile; without the lock it looks again at once, and again (``Pair::handleEvents``, gloo/transport/tcp/pair.cc). The
kernel gives a thread that wakes the core of one that computes. So where a worker has one core, what arrives while it
sends stops the sending, to wait for it, until the kernel's slice of some milliseconds is over: 2 to 3 ms a message,
whatever is in it. A thread of the class ``SCHED_BATCH`` (sched(7)) has the same share of the cores and pushes nobody
aside when it wakes.
"""

import contextlib
import os
from pathlib import Path

NAME = b"gloo_tcp_loop"
"""What Gloo calls its threads: that of torch 2.15 does, that of 2.8 gives them no name, and they are left alone."""


def let_senders_finish() -> None:
    """Has all of this process's threads of Gloo push nobody aside. On Linux, where it needs no privileges.

    Threads that were given a class of scheduling already keep it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for folder in Path("/proc/self/task").glob("*"):  # none elsewhere
        with contextlib.suppress(OSError):  # it has ended, or the kernel forbids it
            is_gloo = (folder / "comm").read_bytes().strip() == NAME
            if is_gloo and os.sched_getscheduler(int(folder.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(folder.name), os.SCHED_BATCH, os.sched_param(0))
