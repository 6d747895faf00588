"""A Python that has torch and Lightning imported already, for the commands that tests start.

A test that starts ``python train.py`` or torchrun as a user does waits 5 seconds of a core for imports, in each of the
processes that this starts. With a warm start the new Python (``client.py``, by way of ``sitecustomize.py``) hands its
command, folder, environment, files and signals to a server (``server.py``), which forks itself for it; the new Python
remains as the process that its parent knows, passes signals on and ends as the fork ends. Only what does not come from
this project is imported beforehand.

So begin the processes of pytest-xdist and the fork servers of :mod:`tests.workers` as well.

Whatever the server cannot stand for starts as it always does: another Python, options, any other ``-c``, variables that
are read when torch is imported, a network namespace of its own where the server is not root's. So does everything under
``-n 0``, where ``LIGHTNING_SPARSE_COLD_START`` is set, and in tests that take the fixture ``cold_start``: of each kind
of launch there is one.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
VARIABLE = "LIGHTNING_SPARSE_WARM_START"


@contextlib.contextmanager
def warm_start() -> Iterator[None]:
    """Starts a server, to which the Pythons go that this process and its children start meanwhile."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/server"
        listener.bind(address)
        listener.listen(64)  # whoever comes waits until the server is there
        command = [sys.executable, str(FOLDER / "server.py"), str(listener.fileno())]
        before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [listener.fileno()]}
        with subprocess.Popen(command, env=own, start_new_session=True, **pipes) as server:  # it ends with its input
            listener.close()
            os.environ[VARIABLE] = address
            os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [before["PYTHONPATH"]])])
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
                server.stdin.close()
