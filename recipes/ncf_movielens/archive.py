"""Downloads MovieLens from GroupLens' server."""

import shutil
import zipfile
from pathlib import Path

from recipes import MissingDataError
from recipes.download import fetch, whole

SERVER = "https://files.grouplens.org/datasets/movielens"
MD5 = {"ml-20m": "cd245b17a1ae2cc31bb14903e1204af3"}
"""Published by GroupLens; ml-latest-small changes over time and has none."""


def ratings_path(root: Path, dataset: str) -> Path:
    """Return ``<root>/<dataset>/ratings.csv``, which may not exist yet."""
    return root / dataset / "ratings.csv"


def fetch_ratings(root: Path, dataset: str) -> Path:
    """Return ``<root>/<dataset>/ratings.csv``, downloaded and unpacked unless it exists.

    The archive stays in ``root`` and is not downloaded again. Not collective: call it in one process per node.

    Raises:
        MissingDataError: the file could not be downloaded, or the archive is damaged.
    """
    target = ratings_path(root, dataset)
    if target.exists():
        return target
    archive = fetch(f"{SERVER}/{dataset}.zip", root / f"{dataset}.zip", md5=MD5.get(dataset))
    _unpack(archive, f"{dataset}/ratings.csv", target)
    return target


def _unpack(archive: Path, member: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            whole(target) as part,
            part.open("wb") as file,
            zipfile.ZipFile(archive) as opened,
            opened.open(member) as source,
        ):
            shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        reason = error.args[0] if error.args else type(error).__name__  # str() would quote a KeyError's message
        raise MissingDataError(f"{archive.absolute()} is broken: {reason}. Delete it to download it again.") from error
