"""Files and folders of checkpoints, which get their names only when they are complete."""

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it when complete.

    So a kill leaves the old checkpoint. Lightning writes below TMPDIR and moves the file. If TMPDIR is on another file
    system, a kill during the move leaves neither checkpoint. Addresses such as ``s3://…`` are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = part_of(Path(path))
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)  # after an error, such as a full disk


def part_of(path: Path) -> Path:
    """Return the temporary path of an incomplete checkpoint, file or folder."""
    return path.with_name(f".{path.name}.part")


def require_replaceable(path: Path) -> None:
    """Raise IsADirectoryError for a folder that is neither empty nor a checkpoint."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    is_checkpoint = any(name == "meta.pt" or name.endswith(".distcp") for name in names)
    if names and not is_checkpoint:
        raise IsADirectoryError(f"Cannot save {str(path)!r}: a folder has this name. Remove it, or save elsewhere.")


def set_aside(path: Path) -> None:
    """Rename a folder to ``.NAME.old``, where it stays until the new checkpoint is complete; remove a link."""
    old = path.with_name(f".{path.name}.old")
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)


def put_in_place(path: Path) -> None:
    """Give a complete folder its name, if there is one, and remove the old checkpoint.

    A kill leaves the old or the new checkpoint, or both between the renames: ``.NAME.old`` and ``.NAME.whole``.
    """
    complete = path.with_name(f".{path.name}.whole")
    shutil.rmtree(complete, ignore_errors=True)
    if part_of(path).is_dir():  # a save in one file has none
        part_of(path).rename(complete)
        set_aside(path)
        path.unlink(missing_ok=True)
        complete.rename(path)
    shutil.rmtree(path.with_name(f".{path.name}.old"), ignore_errors=True)
