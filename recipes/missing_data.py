"""Raises an error about missing data on all workers."""

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
        MissingDataError: this worker's own error, else that of another worker.
    """
    try:
        yield
    except MissingDataError as error:
        _messages(str(error))
        raise
    for worker, message in enumerate(_messages(None)):
        if message is not None:
            raise MissingDataError(f"Worker {worker} has no data: {message}")


def _messages(own: str | None) -> list[str | None]:
    """Return each worker's message, None for workers without an error. Every rank calls this."""
    import torch.distributed as dist  # here, because recipes.compare and recipes.plot do not need torch

    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, own)
    return messages
