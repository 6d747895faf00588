"""Downloads a data set's file, verifies it before it appears at its path, and unpacks it."""

import hashlib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import requests
from tqdm import tqdm

from recipes import MissingDataError

# Some servers refuse the user agent of requests.
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; lightning-sparse)", "Accept-Encoding": "identity"}
TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 16


def fetch(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Download a file unless it exists, verify it and return ``path``.

    The file appears at ``path`` only when it is complete. Nodes that share a file system may download it at the same
    time.

    Not collective: call it in ``LightningDataModule.prepare_data``, on one process per node. An exception there would
    leave the other workers waiting, so catch it and let ``setup`` raise on all workers.

    Args:
        url: http or https address of the file.
        path: path of the file; missing folders are created.
        md5: hexadecimal digest of the complete file.

    Raises:
        MissingDataError: the download failed, or ``path`` holds another file. The message is one line with address
            and path.
    """
    try:
        if not path.exists():
            _download(url, path, md5)
        found = md5 and md5_of(path)
    except OSError as error:  # includes all errors of requests
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MissingDataError(
            f"{path.name} is missing and could not be fetched: {reason}. Put the file from {url} at {path.absolute()}."
        ) from error
    if found != md5:
        # Do not delete it: the user may want to keep it.
        raise MissingDataError(
            f"{path.absolute()} is another file or incomplete: md5 {found}, expected {md5}. Delete it to download it "
            f"again, or replace it by the file from {url}."
        )
    return path


def _download(url: str, path: Path, md5: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as part:
        with (
            requests.get(url, headers=HEADERS, timeout=TIMEOUT_SECONDS, stream=True) as response,
            part.open("wb") as file,
        ):
            response.raise_for_status()
            total = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(desc=path.name, total=total, unit="B", unit_scale=True, unit_divisor=1024) as progress:
                for chunk in response.iter_content(CHUNK_BYTES):  # raises an error if the connection ends early
                    file.write(chunk)
                    progress.update(len(chunk))
        if md5 is not None and (found := md5_of(part)) != md5:
            raise OSError(f"the server's file has md5 {found}, expected {md5}")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file appears at ``path`` when the context ends without an error.

    The yielded path is unique, because other nodes may write to a shared folder at the same time.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def opened_zip(archive: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file for reading.

    Raises:
        MissingDataError: the file is damaged; damage can look like a password or an unknown compression.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        reason = error.args[0] if error.args else type(error).__name__  # str() would quote a KeyError's message
        raise MissingDataError(f"{archive.absolute()} is damaged: {reason}. Delete it to download it again.") from error


def md5_of(path: Path) -> str:
    """Return the MD5 digest of a file, hexadecimal."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
