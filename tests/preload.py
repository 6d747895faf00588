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


def _meet_lightning():
    """Has a Trainer look up what it looks up once in a process. Backward is not for it: a fork could do none."""
    import logging
    import warnings
    from unittest import mock

    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Model(LightningModule):
        def validation_step(self, batch, batch_idx):
            self.log("mean", batch.mean())

    logger, state = logging.getLogger("lightning.pytorch"), torch.get_rng_state()
    level = logger.level
    logger.setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    # To ask for GPUs would mark all forks as ones that may not use them.
    with (
        warnings.catch_warnings(),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        warnings.simplefilter("ignore")
        trainer = Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
        trainer.validate(Model(), torch.utils.data.DataLoader(torch.zeros(2, 1)), verbose=False)
    logger.setLevel(level)
    torch.set_rng_state(state)


_meet_lightning()

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # as the first kernel does that a process launches

importlib.import_module("tests.worker_process").copies()

# The garbage collector of a worker would write to every page that it shares with the server.
gc.freeze()
gc.enable()
