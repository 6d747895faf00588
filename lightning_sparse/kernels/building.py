"""Compiles a C source into functions of this process, once per user and kind of processor.

A shared library runs code when it is loaded. So a process loads a cached library only if it is complete and no other
user can have written it. Without a folder that only this user can write to, every process compiles its own library.
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

TIMEOUT = 60.0
"""Time limit of the compiler in seconds. It usually needs two."""


def cache_folder() -> Path | None:
    """Create and return the folder of compiled libraries; None if other users can write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_sparse"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid() and not _is_own(folder):
        folder.chmod(0o700)  # an older version or another umask created it
    return folder if _is_own(folder) and os.access(folder, os.W_OK) else None


def build(source: Path, command: Sequence[str]) -> ctypes.CDLL:
    """Return the source's library, from the cache or compiled by this command.

    Raises:
        OSError, subprocess.SubprocessError: no folder is writable, or the compiler fails.
    """
    key = hashlib.sha256(source.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    folder = None
    with suppress(OSError, RuntimeError):  # no home, or it is not writable
        folder = cache_folder()
    if folder is not None:
        cached = folder / f"{source.stem}-{key}.so"
        with suppress(OSError):
            content = cached.read_bytes()
            # Loading an incomplete file would kill the process.
            if _is_own(cached) and hashlib.sha256(content[:-32]).digest() == content[-32:]:
                return ctypes.CDLL(str(cached))
        with suppress(OSError, subprocess.CalledProcessError):  # no disk space, or mounted noexec
            return _compile(source, command, cached)
    return _compile(source, command, None)


def _compile(source: Path, command: Sequence[str], cached: Path | None) -> ctypes.CDLL:
    """Compile and load a library, and put a copy with its checksum at ``cached``."""
    with tempfile.TemporaryDirectory(prefix="building-", dir=None if cached is None else cached.parent) as part:
        built = Path(part) / "made.so"
        # In a separate folder, because other workers compile at the same time.
        arguments = [*command, "-o", str(built), str(source)]
        subprocess.run(arguments, check=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        library = ctypes.CDLL(str(built))
        if cached is not None:
            complete = Path(part) / "whole.so"  # a new file, because this process runs the first
            content = built.read_bytes()
            complete.write_bytes(content + hashlib.sha256(content).digest())
            complete.chmod(0o700)
            complete.replace(cached)
        return library


def _is_own(path: Path) -> bool:
    """Return whether only this user and root can write here."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
