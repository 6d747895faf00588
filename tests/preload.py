"""What the fork server of tests.workers imports, so that no worker has to: most of what workers need."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import os
import sys
from typing import Any

_find_entry_points = importlib.metadata.entry_points


@functools.cache
def _entry_points_along(path: tuple[str, ...], **parameters: Any) -> Any:
    return _find_entry_points(**parameters)


# Every Trainer asks, and all installed packages are read each time. Before Lightning takes the function.
importlib.metadata.entry_points = lambda **parameters: _entry_points_along(tuple(sys.path), **parameters)
gc.disable()
for _name in (
    "fsspec.implementations.chained",
    "hypothesis",
    "jsonargparse",
    "lightning.pytorch.cli",
    "lightning_sparse",
    "pytest",
    "sklearn.datasets",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "torchvision.datasets",
):
    with contextlib.suppress(ImportError):  # a worker that needs it says so
        importlib.import_module(_name)


def _remember_number_of_gpus() -> None:
    """Every step of an optimizer asks: without GPUs the same library is searched for in all folders each time."""
    import torch

    count = getattr(torch.cuda, "_raw_device_count_nvml", None)

    @functools.cache
    def count_or_fail() -> int:
        try:
            return count()
        except (OSError, AttributeError):
            return -1  # as PyTorch takes it

    if count is not None:
        torch.cuda._raw_device_count_nvml = count_or_fail


_remember_number_of_gpus()

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # as the first kernel does that a process launches

importlib.import_module("tests.worker_process").copies()

# The garbage collector of a worker would write to every page that it shares with the server.
gc.freeze()
gc.enable()
