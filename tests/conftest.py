import atexit
import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

gc.disable()  # until all imports are done; collections take a third of their time and free nothing

# No deadline, because the machine may be busy. Examples are fixed in continuous integration and random elsewhere.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell makes background jobs ignore SIGINT, and the processes that tests start and interrupt inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)  # more threads than cores slow the tests down


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        gc.enable()  # this process neither collects tests nor imports more
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for tests and their subprocesses


def pytest_itemcollected(item, begun=set()):  # noqa: B006  (a cache)
    """Mark ``slow`` tests, and all rows but the first of each table of tests with workers, as ``full``."""
    table = item.nodeid.partition("[")[0]
    is_first = table not in begun
    begun.add(table)
    is_unit = "unit" in item.path.parts
    if not (is_first or is_unit or item.get_closest_marker("representative")):
        item.add_marker("full")
    if item.get_closest_marker("slow"):
        item.add_marker("full")
        item.add_marker("long")
    if item.get_closest_marker("cuda") and not sys.modules["torch"].cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none on this machine"))


@pytest.fixture(scope="module")
def rows(request):
    """Return the parameters of all selected rows of a module, so that the first row can start workers for all."""
    items = [item for item in request.session.items if item.path == request.node.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run long tests first, so that no process waits for them at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        in_groups = [item for item in items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in in_groups), "pytest-xdist does not see groups in this pytest"
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    gc.freeze()  # collections need not scan modules and tests
    atexit.register(gc.unfreeze)  # Python ends as it always does, but pytest collects garbage several times before that
    gc.enable()
