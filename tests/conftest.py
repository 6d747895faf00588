import atexit
import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

gc.disable()  # until all is imported: to look through what stays anyway, over and over, takes a third of that time

# No deadline: the machine may be busy. In continuous integration the examples are the same in every run, elsewhere new.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it starts in the background ignore it, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)  # threads that wait for a core which another process has cost more than they bring


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        gc.enable()  # this process collects no tests and imports no more
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for tests and the commands that they start


def pytest_itemcollected(item, begun=set()):  # noqa: B006  (a memory)
    """Marks as ``full``, for ``make test-all``, all rows but the first of each table of tests with workers."""
    table = item.nodeid.partition("[")[0]
    is_first = table not in begun
    begun.add(table)
    is_unit = "unit" in item.path.parts
    if not (is_first or is_unit or item.get_closest_marker("representative")):
        item.add_marker("full")
    if item.get_closest_marker("cuda") and not sys.modules["torch"].cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none on this machine"))


@pytest.fixture(scope="module")
def rows(request):
    """Returns the parameters of all rows of a module that this session runs, for the first to start workers once."""
    items = [item for item in request.session.items if item.path == request.node.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The long ones first: at the end nothing is left that all wait for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        in_groups = [item for item in items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in in_groups), "pytest-xdist does not see groups in this pytest"
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    gc.freeze()  # modules and tests stay to the end: no need to look at them in each collection
    atexit.register(gc.unfreeze)  # Python ends as it always does, but pytest collects garbage several times before that
    gc.enable()
