"""What the fork server of tests.workers imports, so that no worker has to: most of what workers need."""

import contextlib
import gc
import importlib
import importlib.metadata
import os

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

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # as the first kernel does that a process launches

importlib.import_module("tests.worker_process").copies()

# The garbage collector of a worker would write to every page that it shares with the server.
gc.freeze()
gc.enable()
