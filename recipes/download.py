"""Fetching a data set's file: resumable, checked, and there whole or not at all."""

import fcntl
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from recipes import MissingDataError

# Some servers refuse Python's own.
USER_AGENT = "Mozilla/5.0 (compatible; lightning-sparse)"
READ_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 16


def fetch(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Returns ``path`` once the file is there, whole and right; fetches it from ``url`` only if it is not there.

    1. A file that is there is taken if its md5 is right (without ``md5``: as it is), without a connection.
    2. Else it is fetched to ``<path>.part``. What an earlier attempt left there is completed if the server sends
       ranges and either ``md5`` or the server's own version of the file (its ETag or date, kept in
       ``<path>.part.version``) can tell that both halves are of the same file.
    3. Length and md5 are checked, the bytes are on the disk, and only then is it renamed to ``path``.

    Not collective: call it in ``LightningDataModule.prepare_data``, on one process per node. What it raises there
    leaves the other workers waiting, so catch it and let ``setup`` fail on all of them. Two processes that fetch the
    same file, as two nodes with one file system, wait for each other.

    Args:
        url: where the file is, http or https.
        path: where to put it; missing folders are made.
        md5: of the whole file, in hexadecimal.

    Raises:
        MissingDataError: the file could not be fetched, or is there and is not the right one. One line that says which
            file to get from where and where to put it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(part) as file:
                # It may have come while this process waited for the lock.
                if not path.exists():
                    if md5 is None or _md5(part) != md5:
                        _complete(url, file, md5)
                    os.fsync(file.fileno())
                    part.replace(path)
                    _version_file(part).unlink(missing_ok=True)
        found = md5 and _md5(path)
    except (OSError, HTTPException) as error:
        resumable = part.exists() and (md5 or _version_file(part).exists())
        kept = part.stat().st_size if resumable else 0
        again = f" The first {kept:,} bytes are in {part.name}; run it again to fetch the rest." if kept else ""
        raise MissingDataError(
            f"{path.name} is missing and could not be fetched: {_reason(error)}. Put the file from {url} at "
            f"{path.absolute()}.{again}"
        ) from error
    if found != md5:
        # Not removed here: it may be something that the user wants to keep.
        raise MissingDataError(
            f"{path.absolute()} is there but is not the right file, or not whole: md5 {found}, expected {md5}. Delete "
            f"it to have it fetched again, or put the file from {url} there."
        )
    return path


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """Opens the unfinished file for appending, which no other process does meanwhile; removes it if left empty."""
    while True:
        with part.open("ab") as file:
            with suppress(OSError):  # a network file system without locks; the md5 still tells what came of it
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samefile(part, file.fileno())
            except FileNotFoundError:
                is_current = False
            # Else the process that held the lock renamed or removed it, and what is open here has no name any more.
            if is_current:
                try:
                    yield file
                finally:
                    if part.exists() and not part.stat().st_size:
                        part.unlink()
                return


def _complete(url: str, file: BinaryIO, md5: str | None) -> None:
    """Fetches what the file lacks; if the result is wrong because of what it began with, the whole of it."""
    if md5 is None and not _version_file(Path(file.name)).exists():
        file.truncate(0)
    offset = os.fstat(file.fileno()).st_size
    found = None
    for start in (offset, 0) if offset else (0,):
        try:
            _download(url, file, start)
        except urllib.error.HTTPError as error:
            error.close()
            if start and error.code == 416:  # range not satisfiable: the server's file is shorter than this one
                continue
            raise
        found = md5 and _md5(Path(file.name))
        if found == md5:
            return
    file.truncate(0)
    raise HTTPException(f"what the server sends has md5 {found}, expected {md5}")


def _download(url: str, file: BinaryIO, offset: int) -> None:
    """Appends to the first ``offset`` bytes of the file what follows them, or all of it if the server sends all."""
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    version_file = _version_file(Path(file.name))
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if version_file.exists():
            headers["If-Range"] = version_file.read_text()  # a server that has another version now sends all of it
    response: HTTPResponse
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=READ_TIMEOUT_SECONDS) as response:
        if response.status != 206:
            offset = 0
            version_file.unlink(missing_ok=True)
            # A weak ETag does not promise equal bytes.
            version = response.headers.get("ETag", "W/")
            version = response.headers.get("Last-Modified") if version.startswith("W/") else version
            if version:
                version_file.write_text(version)
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            raise HTTPException(f"the server sent another range than asked for: {response.headers['Content-Range']}")
        announced = response.headers.get("Content-Length")
        if announced is None and not response.chunked:
            raise HTTPException("the server does not say how long the file is")
        total = None if announced is None else offset + int(announced)
        file.truncate(offset)
        name = Path(file.name).name.removesuffix(".part")
        with tqdm(desc=name, total=total, initial=offset, unit="B", unit_scale=True, unit_divisor=1024) as progress:
            try:
                while chunk := response.read(CHUNK_BYTES):
                    file.write(chunk)
                    progress.update(len(chunk))
            finally:
                file.flush()
    # http.client takes a connection that ends early for the end of the file when it is read in chunks.
    received = os.fstat(file.fileno()).st_size
    if total is not None and received != total:
        raise HTTPException(f"the connection ended after {received:,} of {total:,} bytes")


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _reason(error: Exception) -> str:
    reason = error.reason if type(error) is urllib.error.URLError else error
    return " ".join(str(reason).split()) or type(reason).__name__


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
