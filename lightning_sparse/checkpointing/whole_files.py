"""Checkpoints that appear only when they are complete: files and folders."""

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it when it is complete, so that a kill leaves the old one.

    Lightning writes below TMPDIR and moves the file. From another file system that copies over the old checkpoint, and
    a kill in the middle leaves neither. Addresses such as ``s3://…`` are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if Path(path).is_dir():
            raise IsADirectoryError(f"Cannot save {str(path)!r}: it is a folder. Remove it, or save elsewhere.")
        part = part_of(Path(path))
        super().save_checkpoint(checkpoint, part, storage_options)
        os.replace(part, path)


def part_of(path: Path) -> Path:
    """Return the temporary name of a checkpoint that is a folder, while ranks write it."""
    return path.with_name(f".{path.name}.part")


def put_in_place(path: Path) -> None:
    """Give a complete folder its name and remove the old checkpoint; do nothing if there is no such folder.

    A kill leaves one of the two, or both between the renames: ``.NAME.whole`` and ``.NAME.old``.
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
