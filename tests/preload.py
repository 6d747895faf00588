"""What the fork server of tests.workers imports, so that no worker has to: most of what workers need."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata

from tests.warm_start.huge_pages import use_huge_pages

# Every Trainer asks for entry points, and for an answer all installed packages are read.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
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

# The garbage collector of a worker would write to every page that it shares with the server.
gc.freeze()
use_huge_pages()
gc.enable()
