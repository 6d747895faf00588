"""Downloads a data set's file, resumably, and verifies it before it appears at its path."""

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

# Some servers refuse the user agent of urllib.
USER_AGENT = "Mozilla/5.0 (compatible; lightning-sparse)"
READ_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 16


def fetch(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Downloads a file unless it exists, verifies it and returns ``path``.

    1. If ``path`` exists and its md5 matches, returns without a connection. Without ``md5``, any content matches.
    2. Otherwise downloads to ``<path>.part``. Completes an earlier ``.part`` file if the server sends ranges. Then
       ``md5``, or the server's ETag or date in ``<path>.part.version``, must show that both parts are of one file.
    3. Checks length and md5, writes the bytes to disk, and then renames the file to ``path``.

    Not collective: call it in ``LightningDataModule.prepare_data``, on one process per node. An exception there would
    leave the other workers waiting, so catch it and let ``setup`` raise on all workers. Processes that download to one
    path, for example on two nodes with a shared file system, wait for each other.

    Args:
        url: http or https address of the file.
        path: path of the file; missing folders are created.
        md5: hexadecimal digest of the complete file.

    Raises:
        MissingDataError: the download failed, or ``path`` holds another file. The message is one line with address
            and path.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(part) as file:
                # Another process may have downloaded it while this process waited for the lock.
                if not path.exists():
                    if md5 is None or _md5(part) != md5:
                        _complete(url, file, md5)
                    os.fsync(file.fileno())
                    part.replace(path)
                    _version_file(part).unlink(missing_ok=True)
        found = md5 and _md5(path)
    except (OSError, HTTPException) as error:
        resumable = part.exists() and (md5 or _version_file(part).exists())
        size = part.stat().st_size if resumable else 0
        hint = f" The first {size:,} bytes are in {part.name}; run it again to fetch the rest." if size else ""
        raise MissingDataError(
            f"{path.name} is missing and could not be fetched: {_reason(error)}. Put the file from {url} at "
            f"{path.absolute()}.{hint}"
        ) from error
    if found != md5:
        # Do not delete it: the user may want to keep it.
        raise MissingDataError(
            f"{path.absolute()} is another file or incomplete: md5 {found}, expected {md5}. Delete it to download it "
            f"again, or replace it by the file from {url}."
        )
    return path


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """Opens the unfinished file for appending under a lock, and removes it if it stays empty."""
    while True:
        with part.open("ab") as file:
            with suppress(OSError):  # a network file system without locks; the md5 still detects damage
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samefile(part, file.fileno())
            except FileNotFoundError:
                is_current = False
            # Otherwise the previous holder of the lock renamed or removed the file that is open here.
            if is_current:
                try:
                    yield file
                finally:
                    if part.exists() and not part.stat().st_size:
                        part.unlink()
                return


def _complete(url: str, file: BinaryIO, md5: str | None) -> None:
    """Downloads the missing rest of a file, or all of it if the existing part is wrong."""
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
    raise HTTPException(f"the server's file has md5 {found}, expected {md5}")


def _download(url: str, file: BinaryIO, offset: int) -> None:
    """Downloads the bytes from ``offset`` on, or the complete file if the server ignores the range."""
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    version_file = _version_file(Path(file.name))
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if version_file.exists():
            headers["If-Range"] = version_file.read_text()  # a server with another version sends the complete file
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
            raise HTTPException(f"the server sent a range that was not requested: {response.headers['Content-Range']}")
        announced = response.headers.get("Content-Length")
        if announced is None and not response.chunked:
            raise HTTPException("the server does not send the file's length")
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
    # When read in chunks, http.client mistakes an early end of the connection for the end of the file.
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
