"""Compiles a C source into functions of this process, once per user and kind of processor.

A shared library runs as soon as it is loaded. So a cached library is loaded only if it is complete and nobody else can
have written it. Without a folder that only this user writes to, every process compiles for itself.
"""

import ctypes
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds that a compiler may take. It needs two."""


def cache_folder() -> Path | None:
    """Returns the folder of compiled libraries, and makes it; None if others can write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_sparse"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid() and not _is_own(folder):
        folder.chmod(0o700)  # made by a former version, or with another umask
    return folder if _is_own(folder) and os.access(folder, os.W_OK) else None


def build(source: Path, command: Sequence[str], names: Sequence[str]) -> Any:
    """Returns a library with the named functions, from the cache or compiled now by this command.

    Raises:
        OSError, subprocess.SubprocessError: no place to write to, or a compiler that does not work.
        AttributeError: the library lacks a function.
    """
    key = hashlib.sha256(source.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    folder = None
    with suppress(OSError, RuntimeError):  # no home, or not writable
        folder = cache_folder()
    if folder is not None:
        kept = folder / f"{source.stem}-{key}.so"
        with suppress(OSError, AttributeError):
            if _is_own(kept) and _is_whole(kept):
                return _load(kept, names)
        with suppress(OSError, subprocess.CalledProcessError):  # no room, or mounted noexec
            return _make(source, command, names, folder, kept)
    return _make(source, command, names, None, None)


def _make(source: Path, command: Sequence[str], names: Sequence[str], folder: Path | None, kept: Path | None) -> Any:
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as part:
        made = Path(part) / "made.so"
        # In a folder of its own: other workers do the same at the same time.
        compile_it = [*command, "-o", str(made), str(source)]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        subprocess.run(compile_it, check=True, timeout=TIMEOUT, **options)
        library = _load(made, names)
        if kept is not None:
            whole = Path(part) / "whole.so"  # another file, as this process runs the first
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
    """Whether only this user and root can write here."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of the rest. Loading an incomplete file would kill the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]
