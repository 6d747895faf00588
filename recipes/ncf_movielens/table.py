"""Reads MovieLens' ``ratings.csv`` as a table of numbers and reports the first invalid row."""

import csv
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipes import MissingDataError

COLUMNS = {"userId": "int64", "movieId": "int64", "rating": "float32", "timestamp": "int64"}
LARGEST_ID = 2**31 - 1

_EXPECTED = {"int64": "a whole number of 64 bits", "float32": "a number"}
_CHUNK_ROWS = 1_000_000


class InvalidRatingsError(MissingDataError):
    """Raised if a ratings file is invalid; the message names the file and the row."""


def read_table(path: Path) -> pd.DataFrame:
    """Return the columns in ``COLUMNS`` of a CSV file with their dtypes.

    Raises:
        InvalidRatingsError: the file is empty; a column is missing; a row does not hold numbers or has too many fields.
    """
    # These files contain no quotes. If pandas parsed a quote, it would join all lines up to the next quote.
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
            f"{path}, row 1: no column {', '.join(missing)}. The header is {','.join(found)}. Must contain "
            f"{','.join(COLUMNS)}."
        )
    # With a selection of columns, pandas would accept rows with too many fields.
    if len(found) > len(COLUMNS):
        options["usecols"] = list(COLUMNS)
    try:
        with warnings.catch_warnings():
            # If all rows are longer than the header, pandas would truncate them and warn.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, dtype=COLUMNS, index_col=False, engine="c", **options)
        if any(table[name].dtype != kind for name, kind in COLUMNS.items()):
            raise ValueError("A number is too large.")  # pandas 2 changes the column to a larger dtype
    except pd.errors.ParserWarning:
        raise InvalidRatingsError(f"{describe_row(path, 0)}: more fields than the header's {len(found)}.") from None
    except (ValueError, OverflowError) as error:  # pandas' ParserError is a ValueError
        raise InvalidRatingsError(_describe_first_bad_row(path, options, error)) from None
    if table.empty:
        raise InvalidRatingsError(f"{path}, row 2: the file has no ratings below the header.")
    return table


def _describe_first_bad_row(path: Path, options: dict[str, Any], error: Exception) -> str:
    """Return row and reason of the first invalid row; the error of pandas does not name the row."""
    too_many = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
    start = 0
    try:
        with pd.read_csv(path, dtype=str, index_col=False, chunksize=_CHUNK_ROWS, **options) as chunks:
            for chunk in chunks:
                for name, kind in COLUMNS.items():
                    bad = np.flatnonzero(~chunk[name].fillna("").map(_is_whole if kind == "int64" else _is_number))
                    if len(bad):
                        text = chunk[name].iloc[bad[0]]
                        return f"{describe_row(path, start + bad[0])}: {name} {text!r} is not {_EXPECTED[kind]}."
                not_finite = np.flatnonzero(np.isinf(chunk["rating"].map(float)))
                if len(not_finite):  # pandas 2 does not read a number that float64 cannot hold
                    return f"{describe_row(path, start + not_finite[0])}: rating is not a finite number."
                start += len(chunk)
    except pd.errors.ParserError:
        pass
    if too_many:
        expected, line, seen = too_many.groups()
        return f"{path}, row {line}: {seen} fields, expected {expected}."
    return f"{path}: {error}"


def _is_whole(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?\d+\s*", text)) and -(2**63) <= int(text) < 2**63


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", text))


def describe_row(path: Path, index: int) -> str:
    """Return file and row of the n-th rating as text; empty lines, which pandas skips, count as rows."""
    ratings = -2
    with path.open("rb") as lines:
        for row, line in enumerate(lines, start=1):
            ratings += bool(line.strip())
            if ratings == index:
                return f"{path}, row {row}"
    return f"{path}, row {index + 2}"
