"""Splits MovieLens' ``ratings.csv`` into training interactions and candidates, with a cache."""

import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recipes.download import write_atomically
from recipes.ncf_movielens.table import LARGEST_ID, InvalidRatingsError, describe_row, read_table

NUM_NEGATIVE_CANDIDATES = 100
CANDIDATES_SEED = 20
"""A fixed seed, so that all runs rank equal candidates for any seed and number of workers."""

_CACHE_VERSION = 1

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """Training interactions, and for each user the candidates of the ranking.

    Users and items have indices from 0 in the order of their ids. Items without ratings have no index.

    Attributes:
        users: user of each training interaction, int32 of shape (positives,), in the order of the file.
        items: item of each training interaction, int32 of shape (positives,).
        candidates: each user's held-out item, then 100 distinct items that the user has not rated; int32 of shape
            (num_users, 1 + 100).
        num_users: number of users.
        num_items: number of items.
    """

    users: Tensor
    items: Tensor
    candidates: Tensor
    num_users: int
    num_items: int


def load_ratings(path: Path) -> Ratings:
    """Return the ratings in a MovieLens ``ratings.csv``, from ``<path>.cache.pt`` if it is current.

    The cache records the file's size and time of modification. It appears at its path only when complete.

    Raises:
        InvalidRatingsError: the file is invalid; the message names file and row.
        FileNotFoundError: the file does not exist.
    """
    status = path.stat()
    made_from = {"version": _CACHE_VERSION, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    cache = path.with_name(f"{path.name}.cache.pt")
    with suppress(Exception):  # parse the original file if the cache is invalid in any way
        found = torch.load(cache, weights_only=True)
        with zipfile.ZipFile(cache) as content:  # torch.load checks no checksums
            if found.pop("made_from") == made_from and content.testzip() is None:
                return Ratings(**found)
    ratings = parse_ratings(path)
    _write(cache, {"made_from": made_from, **asdict(ratings)})
    return ratings


def parse_ratings(path: Path) -> Ratings:
    """Return the ratings in a MovieLens ``ratings.csv``; the value of a rating does not matter.

    Raises:
        InvalidRatingsError: the file lacks rows or a column, or a row does not hold four numbers. Or an id is negative
            or above 2^31 - 1. Or a user has a single rating, rated a movie twice, or left fewer than 100 movies
            unrated. The message names file and row, where the header is row 1.
    """
    table = read_table(path)
    for name in ("userId", "movieId"):
        outside = np.flatnonzero((table[name] < 0) | (table[name] > LARGEST_ID))
        if len(outside):
            row, value = outside[0], table[name].iloc[outside[0]]
            raise InvalidRatingsError(
                f"{describe_row(path, row)}: {name} {value} is not within 0…{LARGEST_ID} (2^31 - 1)."
            )
    not_finite = np.flatnonzero(~np.isfinite(table["rating"].to_numpy()))
    if len(not_finite):
        raise InvalidRatingsError(f"{describe_row(path, not_finite[0])}: rating is not a finite number.")
    timestamps = table.pop("timestamp").to_numpy(copy=True)  # torch warns about read-only arrays
    users, user_ids = pd.factorize(table.pop("userId"), sort=True)
    items, item_ids = pd.factorize(table.pop("movieId"), sort=True)
    try:
        return split(users, items, timestamps)
    except _InvalidRowError as error:
        ids = {"user": user_ids[users[error.row]], "item": item_ids[items[error.row]]}
        raise InvalidRatingsError(f"{describe_row(path, error.row)}: {error.reason.format(**ids)}") from None


def split(users: Integers, items: Integers, timestamps: Integers) -> Ratings:
    """Hold out each user's last interaction and draw the other candidates.

    Args:
        users: user of each interaction, indices from 0 without gaps.
        items: item of each interaction, indices from 0 without gaps.
        timestamps: time of each interaction. Of a user's simultaneous interactions, the last in this order is held out.

    Raises:
        ValueError: a user has a single rating, rated an item twice, or rated too many items.
    """
    num_users, num_items = int(users.max()) + 1, int(items.max()) + 1
    counts = np.bincount(users, minlength=num_users)
    # Sorted keys of user and item, so that each user's items are adjacent.
    rated = users * num_items + items
    rated.sort()
    twice = rated[1:][rated[1:] == rated[:-1]]
    if len(twice):
        row = np.flatnonzero(users * num_items + items == twice[0])[1]
        raise _InvalidRowError(int(row), "user {user} has rated movie {item} in an earlier row already.")
    held_out = last_interactions(users, timestamps, num_users)
    if counts.min() < 2:
        reason = "user {user} has this rating only. Must have at least two, as the last is held out. Remove the row."
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
    """Return the row of each user's latest interaction, or the last row of a tie.

    Example:
        >>> last_interactions(np.array([0, 1, 0, 1, 1]), np.array([9, 4, 5, 7, 7]), num_users=2).tolist()
        [0, 4]
    """
    by_user = torch.from_numpy(users), torch.from_numpy(timestamps)
    latest = torch.full((num_users,), torch.iinfo(torch.int64).min).scatter_reduce_(0, *by_user, "amax").numpy()
    rows = np.flatnonzero(timestamps == latest[users])
    last = np.empty(num_users, dtype=np.int64)
    # numpy assigns in order, so each user's last row remains.
    last[users[rows]] = rows
    return last


def unrated_items(rated: Integers, counts: Integers, num_items: int, size: int, seed: int) -> Integers:
    """Return ``size`` distinct items per user that the user has not rated, drawn uniformly.

    Args:
        rated: user * num_items + item of every rating, sorted.
        counts: ratings per user, at most ``num_items - size``.
        num_items: number of items.
        size: items to draw per user.
        seed: seed of the draw.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.integers(num_items, size=(len(counts), size))
    # Draw for all users at once and redraw invalid items. For users with so many ratings that this would take long,
    # list the unrated items instead.
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
    """An interaction that makes the split impossible: its row, and a reason with placeholders."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"Interaction {row}: {reason}")
        self.row = row
        self.reason = reason


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        with write_atomically(path) as part, part.open("wb") as file:  # with a path, torch.save raises RuntimeError
            torch.save(content, file)
    except OSError as error:
        rank_zero_warn(f"The cache could not be written: {error}. Every worker will parse the ratings in every run.")
