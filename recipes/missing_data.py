"""Raises errors about missing data on all workers."""

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class MissingDataError(FileNotFoundError):
    """Raised if a recipe's data set is missing or invalid; the message says how to provide it."""


def fetch_error(title: str, fetch: Callable[[], object]) -> MissingDataError | None:
    """Return the error of fetching a data set, or None on success.

    Call it in ``prepare_data``, which must not raise because the other workers would wait. Let ``setup`` raise the
    error on all workers.
    """
    try:
        fetch()
    except MissingDataError as error:
        return error
    except (OSError, tarfile.TarError) as error:
        return MissingDataError(f"{title} could not be unpacked: {error}.")
    return None


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise any worker's error on all workers. Every rank enters it, because nodes may have different disks.

    Raises:
        MissingDataError: another worker has raised an error, with that worker's rank.
    """
    from lightning_sparse.exchange.agreement import raised_together  # recipes.compare and recipes.plot need no torch

    try:
        with raised_together():
            yield
    except RuntimeError as error:
        raise MissingDataError(str(error)) from error
