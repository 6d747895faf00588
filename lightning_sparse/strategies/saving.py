"""How checkpoints are written: a file that is whole or not there, and how long a worker waits for the others."""

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

NO_WORKER = "it is saved by a process that was no worker, and their optimizers and number of steps are not in it either"
"""Of a file that a notebook writes after a fit."""
PATIENCE = 300.0
"""Seconds that a worker waits for all others to come and save. Validation may keep one that long."""
PATIENCE_IN_TROUBLE = 15.0
"""The same while an exception or a signal is handled: likely nobody else comes, and who stops a job soon kills it."""


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and puts it there when it is whole, so that a kill leaves the one before.

    Lightning's own writes below TMPDIR and moves the file. From another file system that is a copy over the former
    checkpoint of that name, and a kill in its middle leaves neither. Addresses such as ``s3://…`` go its way.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        folder, name = os.path.split(path)
        part = os.path.join(folder, f".{name}.part")
        super().save_checkpoint(checkpoint, part, storage_options)
        os.replace(part, path)


class WholeFiles(Strategy):
    """A strategy whose files are written whole: in place of no plugin for that, or inside of one that wraps another."""

    _reads_folders = False

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *others: Any, **options: Any) -> dict[str, Any]:
        # The further arguments differ between versions of Lightning.
        if not self._reads_folders and Path(checkpoint_path).is_dir():
            raise ValueError(
                f"The checkpoint {str(checkpoint_path)!r} is a folder, and {type(self).__name__} reads files. Folders "
                "come from hsdp_* and local_hsdp_* strategies: resume with one of these, or have it save one file, "
                "save_distributed_checkpoint=False."
            )
        return super().load_checkpoint(checkpoint_path, *others, **options)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFileCheckpointIO()  # keeps to what the user has put inside, if any
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


def part_of(path: Path) -> Path:
    """Returns the folder in which a checkpoint becomes whole that is a folder."""
    return path.with_name(f".{path.name}.part")


def put_in_place(path: Path) -> None:
    """Gives a checkpoint that is whole its name, and removes the one before; does nothing where there is none.

    A kill leaves one of the two, in the instant when they change places both: ``.NAME.whole`` and ``.NAME.old``.
    """
    whole, old = (path.with_name(f".{path.name}.{ending}") for ending in ("whole", "old"))
    shutil.rmtree(whole, ignore_errors=True)
    try:
        part_of(path).rename(whole)
    except FileNotFoundError:  # another node has the same disk, and was first
        return
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        path.rename(old)
    else:
        path.unlink(missing_ok=True)
    whole.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def is_no_worker(strategy: Strategy) -> bool:
    """Whether this is the process that has workers forked or spawned, as a notebook's, and none of them.

    Lightning brings it weights, metrics and the best checkpoint's path, and neither optimizers nor the number of steps.
    """
    return isinstance(strategy.launcher, _MultiProcessingLauncher) and not dist.is_initialized()


def patience_of(timeout: timedelta | None) -> float:
    """Returns the seconds to wait for others, no more than a process group's timeout."""
    return PATIENCE if timeout is None else min(PATIENCE, timeout.total_seconds())


def shortened(patience: float) -> float:
    """Returns the seconds to wait for others where they may not come, out of those usual."""
    return min(patience, PATIENCE_IN_TROUBLE)


def is_in_trouble() -> bool:
    """Whether an exception is being handled, or a signal by Lightning."""
    if sys.exc_info()[0] is not None:
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).endswith("signal_connector"):
            return True
    return False
