"""From MovieLens' ``ratings.csv`` to what is trained on and what is ranked; read once, then cached beside the file."""

import csv
import mmap
import os
import pickle
import re
import shutil
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recipes import MissingDataError

COLUMNS = {"userId": "int64", "movieId": "int64", "rating": "float32", "timestamp": "int64"}
LARGEST_ID = 2**31 - 1
NUM_NEGATIVE_CANDIDATES = 100
CANDIDATES_SEED = 20
"""Not the training's seed: every run, with any seed and any number of workers, ranks the same candidates."""

_EXPECTED = {"int64": "a whole number of 64 bits", "float32": "a number"}
_CACHE_VERSION = 1
_CHUNK_ROWS = 1_000_000

Integers = npt.NDArray[np.int64]


class InvalidRatingsError(MissingDataError):
    """A ratings file cannot be used; the message names the file and the row."""


@dataclass(frozen=True)
class Ratings:
    """Interactions without their held-out part, and the candidates among which the held-out item is to be found.

    Users and items are numbered from 0 in the order of their ids; an item that nobody rated has no number.

    Attributes:
        users: user of each training interaction, int32 of shape (positives,), in the order of the file.
        items: its item, likewise.
        candidates: int32 of shape (num_users, 1 + 100): each user's held-out item, then 100 distinct items that the
            user has not rated.
        num_users: how many users.
        num_items: how many items.
    """

    users: Tensor
    items: Tensor
    candidates: Tensor
    num_users: int
    num_items: int


def load_ratings(path: Path) -> Ratings:
    """Returns the ratings in a MovieLens ``ratings.csv``, from ``<path>.cache.pt`` if that was made from this file.

    The cache is recognised by the file's size and time of modification, and written as a whole or not at all.

    Raises:
        InvalidRatingsError: the file is not as it should be; with file and row.
        FileNotFoundError: there is no such file.
    """
    status = path.stat()
    made_from = {"version": _CACHE_VERSION, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    cache = path.with_name(f"{path.name}.cache.pt")
    try:
        found = torch.load(cache, weights_only=True)
        if found.pop("made_from") == made_from:
            return Ratings(**found)
    # Whatever is wrong with a cache, the file it was made from is at hand.
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError, AttributeError, ValueError):
        pass
    ratings = parse_ratings(path)
    _write(cache, {"made_from": made_from, **asdict(ratings)}, path)
    return ratings


def parse_ratings(path: Path) -> Ratings:
    """Returns the ratings in a MovieLens ``ratings.csv``; every rating counts as an interaction, whatever its value.

    Raises:
        InvalidRatingsError: no rows; a missing column; a row that does not hold four numbers; an id outside 0…2^31 - 1;
            a user with a single rating, of whom nothing would be left to train on; the same movie rated twice by a
            user; a user who left fewer than 100 movies unrated. With file and row (the header is row 1).
    """
    table = _read(path)
    for name in ("userId", "movieId"):
        outside = np.flatnonzero((table[name] < 0) | (table[name] > LARGEST_ID))
        if len(outside):
            row, value = outside[0], table[name].iloc[outside[0]]
            raise InvalidRatingsError(f"{_where(path, row)}: {name} {value} is not within 0…{LARGEST_ID} (2^31 - 1).")
    not_finite = np.flatnonzero(~np.isfinite(table["rating"].to_numpy()))
    if len(not_finite):
        raise InvalidRatingsError(f"{_where(path, not_finite[0])}: rating is not a finite number.")
    timestamps = table.pop("timestamp").to_numpy(copy=True)  # torch wants to be able to write
    users, user_ids = pd.factorize(table.pop("userId"), sort=True)
    items, item_ids = pd.factorize(table.pop("movieId"), sort=True)
    try:
        return split(users, items, timestamps)
    except _InvalidRowError as error:
        ids = {"user": user_ids[users[error.row]], "item": item_ids[items[error.row]]}
        raise InvalidRatingsError(f"{_where(path, error.row)}: {error.reason.format(**ids)}") from None


def split(users: Integers, items: Integers, timestamps: Integers) -> Ratings:
    """Returns the interactions without each user's last one, and that one among its candidates.

    Args:
        users: the user of each interaction, numbered from 0 without gaps.
        items: its item, likewise.
        timestamps: when it happened; of a user's equally late ones the last in this order counts as last.

    Raises:
        ValueError: users or items that cannot be split so.
    """
    num_users, num_items = int(users.max()) + 1, int(items.max()) + 1
    counts = np.bincount(users, minlength=num_users)
    # User and item as one number, sorted: what a user has rated lies side by side.
    rated = users * num_items + items
    rated.sort()
    twice = rated[1:][rated[1:] == rated[:-1]]
    if len(twice):
        row = np.flatnonzero(users * num_items + items == twice[0])[1]
        raise _InvalidRowError(int(row), "user {user} has rated movie {item} in an earlier row already.")
    held_out = last_interactions(users, timestamps, num_users)
    if counts.min() < 2:
        reason = "user {user} has this rating only, and the last one of each user is held out. Remove the row."
        raise _InvalidRowError(int(held_out[counts < 2].min()), reason)
    unrated = num_items - counts
    if unrated.min() < NUM_NEGATIVE_CANDIDATES:
        reason = (
            f"user {{user}} has left {unrated.min()} of {num_items} movies unrated. Ranking needs "
            f"{NUM_NEGATIVE_CANDIDATES} at least."
        )
        raise _InvalidRowError(int(held_out[unrated.argmin()]), reason)
    negatives = unrated_items(rated, counts, num_items, NUM_NEGATIVE_CANDIDATES, CANDIDATES_SEED)
    candidates = np.concatenate([items[held_out, None], negatives], axis=1)
    kept = np.ones(len(users), dtype=bool)
    kept[held_out] = False
    return Ratings(
        users=torch.from_numpy(users[kept].astype(np.int32)),
        items=torch.from_numpy(items[kept].astype(np.int32)),
        candidates=torch.from_numpy(candidates.astype(np.int32)),
        num_users=num_users,
        num_items=num_items,
    )


def last_interactions(users: Integers, timestamps: Integers, num_users: int) -> Integers:
    """Returns the row of each user's latest interaction, the last such row where several are equally late.

    Example:
        >>> last_interactions(np.array([0, 1, 0, 1, 1]), np.array([9, 4, 5, 7, 7]), num_users=2).tolist()
        [0, 4]
    """
    by_user = torch.from_numpy(users), torch.from_numpy(timestamps)
    latest = torch.full((num_users,), torch.iinfo(torch.int64).min).scatter_reduce_(0, *by_user, "amax").numpy()
    rows = np.flatnonzero(timestamps == latest[users])
    last = np.empty(num_users, dtype=np.int64)
    # numpy assigns in order, so that of a user's rows the last one remains.
    last[users[rows]] = rows
    return last


def unrated_items(rated: Integers, counts: Integers, num_items: int, size: int, seed: int) -> Integers:
    """Returns for each user ``size`` distinct items that the user has not rated, drawn uniformly.

    Args:
        rated: user * num_items + item of every rating, sorted.
        counts: ratings of each user; at least ``size`` less than there are items.
        num_items: how many items.
        size: items to draw for each user.
        seed: of the draw.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.integers(num_items, size=(len(counts), size))
    # All users at once: draw, look for what must not be, draw that again. Where so much is rated that this would
    # take long, the unrated items are listed instead.
    listed = num_items - counts - size < num_items / 4
    starts = np.cumsum(counts) - counts
    for user in np.flatnonzero(listed):
        own = rated[starts[user] : starts[user] + counts[user]] - user * num_items
        drawn[user] = generator.choice(np.setdiff1d(np.arange(num_items), own), size, replace=False)
    unfinished = np.flatnonzero(~listed)
    while len(unfinished):
        items = drawn[unfinished]
        keys = unfinished[:, None] * num_items + items
        wrong = rated[np.searchsorted(rated, keys).clip(max=len(rated) - 1)] == keys
        order = items.argsort(axis=1, kind="stable")
        ordered = np.take_along_axis(items, order, axis=1)
        repeated = np.zeros_like(wrong)
        np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        wrong |= repeated
        items[wrong] = generator.integers(num_items, size=np.count_nonzero(wrong))
        drawn[unfinished] = items
        unfinished = unfinished[wrong.any(axis=1)]
    return drawn


class _InvalidRowError(ValueError):
    """An interaction that makes a split impossible: its index and the reason, with {user} and {item} to fill in."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"Interaction {row}: {reason}")
        self.row = row
        self.reason = reason


def _read(path: Path) -> pd.DataFrame:
    # Not a single quote in these files: taken as such, one would swallow the lines up to the next.
    options: dict[str, Any] = {"quoting": csv.QUOTE_NONE, "na_filter": False, "encoding_errors": "replace"}
    try:
        found = list(pd.read_csv(path, nrows=0, **options).columns)
    except pd.errors.EmptyDataError:
        raise InvalidRatingsError(
            f"{path}, row 1: the file is empty. Expected the header {','.join(COLUMNS)}."
        ) from None
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise InvalidRatingsError(
            f"{path}, row 1: no column {', '.join(missing)}. The header is {','.join(found)}, expected "
            f"{','.join(COLUMNS)}."
        )
    if (with_zero := _first_zero_byte(path, found)) is not None:
        raise InvalidRatingsError(with_zero)
    # With a choice of columns pandas would let rows with too many fields pass.
    if len(found) > len(COLUMNS):
        options["usecols"] = list(COLUMNS)
    try:
        with warnings.catch_warnings():
            # All rows longer than the header: pandas would cut them off and warn.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, dtype=COLUMNS, index_col=False, engine="c", **options)
        if any(table[name].dtype != kind for name, kind in COLUMNS.items()):
            raise ValueError("A number is too large.")  # pandas 2 makes the column one of larger numbers
    except pd.errors.ParserWarning:
        raise InvalidRatingsError(f"{_where(path, 0)}: more fields than the {len(found)} of the header.") from None
    except (ValueError, OverflowError) as error:  # pandas' ParserError is a ValueError
        raise InvalidRatingsError(_first_bad_row(path, options, error)) from None
    if table.empty:
        raise InvalidRatingsError(f"{path}, row 2: there are no ratings below the header.")
    return table


def _first_bad_row(path: Path, options: dict[str, Any], error: Exception) -> str:
    """Returns what is wrong where in a file that pandas has refused to read as numbers, which does not say."""
    too_many = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
    start = 0
    try:
        with pd.read_csv(path, dtype=str, index_col=False, chunksize=_CHUNK_ROWS, **options) as chunks:
            for chunk in chunks:
                for name, kind in COLUMNS.items():
                    bad = np.flatnonzero(~chunk[name].fillna("").map(_is_whole if kind == "int64" else _is_number))
                    if len(bad):
                        text = chunk[name].iloc[bad[0]]
                        return f"{_where(path, start + bad[0])}: {name} {text!r} is not {_EXPECTED[kind]}."
                not_finite = np.flatnonzero(np.isinf(chunk["rating"].map(float)))
                if len(not_finite):  # pandas 2 reads no number that float64 cannot hold
                    return f"{_where(path, start + not_finite[0])}: rating is not a finite number."
                start += len(chunk)
    except pd.errors.ParserError:
        pass
    if too_many:
        expected, line, seen = too_many.groups()
        return f"{path}, row {line}: {seen} fields, expected {expected}."
    return f"{path}: {error}"


def _first_zero_byte(path: Path, header: list[str]) -> str | None:
    """Returns what is wrong where there is a byte of 0, at which pandas 2 takes a number to end."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(b"\0")
        if place < 0:
            return None
        start = content.rfind(b"\n", 0, place) + 1
        row = content[:start].count(b"\n") + 1
        field = content[start:place].count(b",")
        content.seek(start)
        fields = content.readline().rstrip(b"\r\n").decode(errors="replace").split(",")
    name = header[field] if field < len(header) else f"field {field + 1}"
    return f"{path}, row {row}: {name} {fields[field]!r} is not {_EXPECTED.get(COLUMNS.get(name, ''), 'text')}."


def _is_whole(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?\d+\s*", text)) and -(2**63) <= int(text) < 2**63


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", text))


def _where(path: Path, index: int) -> str:
    """Returns file and row, as an editor counts them, of the n-th rating; pandas does not count empty lines."""
    ratings = -2
    with path.open("rb") as lines:
        for row, line in enumerate(lines, start=1):
            ratings += bool(line.strip())
            if ratings == index:
                return f"{path}, row {row}"
    return f"{path}, row {index + 2}"


def _write(path: Path, content: dict[str, Any], ratings: Path) -> None:
    try:
        # A name of its own: other nodes may write the same cache into a shared folder at this moment.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
            try:
                torch.save(content, file)
                file.close()
                shutil.copymode(ratings, file.name)  # whoever may read the one may read the other
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        rank_zero_warn(f"Every worker will read the ratings anew, in every run: no cache could be written: {error}")
