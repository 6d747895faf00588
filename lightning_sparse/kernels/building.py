"""A C source becomes functions of this process: compiled once for a user and a kind of processor, and kept.

What is kept is loaded only if it is whole and nobody else can have written it: a shared library runs as soon as it is
loaded. Where there is no such place, every process compiles for itself.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds that a compiler may take. It needs two."""
PART = "building-"
FORGOTTEN = 86_400.0
"""Seconds after which what a process that was killed left of its work is cleared away."""


def cache_folder() -> Path | None:
    """Returns the folder for what is compiled, made if need be; None if there is none that only this user writes to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_sparse"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid() and not _is_own(folder):
        folder.chmod(0o700)  # made by a former version, or with another umask
    return folder if _is_own(folder) and os.access(folder, os.W_OK) else None


def build(source: Path, command: Sequence[str], names: Sequence[str]) -> Any:
    """Returns a library with these functions, from the cache or compiled now.

    Args:
        source: the file.
        command: compiler and options.
        names: of the functions.

    Raises:
        OSError, subprocess.SubprocessError: nowhere to write to, or a compiler that does not work, as a message says.
        AttributeError: what it makes lacks a function.
    """
    key = hashlib.sha256(source.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    folder = None
    with suppress(OSError, RuntimeError):  # no home, or one that cannot be written to
        folder = cache_folder()
    if folder is not None:
        kept = folder / f"{source.stem}-{key}.so"
        with suppress(OSError, AttributeError):
            if _is_own(kept) and _is_whole(kept):
                return _load(kept, names)
        _clear_away(folder)
        with suppress(OSError, subprocess.CalledProcessError):  # no room there, or nothing may be run from there
            return _make(source, command, names, folder, kept)
    return _make(source, command, names, None, None)


def _make(source: Path, command: Sequence[str], names: Sequence[str], folder: Path | None, kept: Path | None) -> Any:
    with tempfile.TemporaryDirectory(prefix=PART, dir=folder) as part:
        made = Path(part) / "made.so"
        # In a folder of its own: other workers do the same at the same time.
        subprocess.run(
            [*command, "-o", str(made), str(source)],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        library = _load(made, names)
        if kept is not None:
            whole = Path(part) / "whole.so"  # another file: this process runs the first
            content = made.read_bytes()
            whole.write_bytes(content + hashlib.sha256(content).digest())
            whole.chmod(0o700)
            whole.replace(kept)
        return library


def _load(path: Path, names: Sequence[str]) -> Any:
    library = ctypes.CDLL(str(path))
    for name in names:
        getattr(library, name)
    return library


def _is_own(path: Path) -> bool:
    """Whether nobody but this user, and who may do everything, can write here."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of what is before. Of a part of it, loading would kill the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _clear_away(folder: Path) -> None:
    for leftover in folder.glob(f"{PART}*"):
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - FORGOTTEN:
                shutil.rmtree(leftover)
