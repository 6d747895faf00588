"""Imports most modules that workers need, in the fork server of tests.workers."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import os

gc.disable()
# Each Trainer reads the entry points of all installed packages.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for _name in (
    "fsspec.implementations.chained",
    "hypothesis",
    "jsonargparse",
    "lightning.pytorch.cli",
    "lightning_sparse",
    "pytest",
    "sklearn.datasets",
    "torch.distributed._tensor",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "torchvision.datasets",
):
    with contextlib.suppress(ImportError):  # a worker that needs the module raises
        importlib.import_module(_name)

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # the first kernel that a process launches imports it

importlib.import_module("tests.worker_process").copies()

# Without this, garbage collection in a worker writes to every page that it shares with the server.
gc.freeze()
gc.enable()
