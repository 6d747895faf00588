"""Downloads MovieLens from GroupLens' server."""

import shutil
from pathlib import Path

from recipes.download import fetch, opened_zip, write_atomically

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
    with (
        opened_zip(archive) as files,
        files.open(member) as source,
        write_atomically(target) as part,
        part.open("wb") as file,
    ):
        shutil.copyfileobj(source, file)
