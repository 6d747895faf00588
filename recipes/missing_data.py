"""Missing data: the error, and how all workers learn of it."""

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class MissingDataError(FileNotFoundError):
    """A recipe's data set is not there or cannot be used; the message says what to put where, or what is wrong."""


def fetch_error(title: str, fetch: Callable[[], object]) -> MissingDataError | None:
    """Return why fetching a data set failed; None if it did not.

    For ``prepare_data``, which must not raise: the other workers would wait. ``setup`` raises the error on all workers.
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
    """Raise an error of any worker on all workers; every rank enters it. Nodes may see different disks.

    Raises:
        MissingDataError: this worker's own, or what another worker raised if this one raised nothing.
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
    """Return the message of each worker, None for those without an error. Collective."""
    import torch.distributed as dist  # not at the top: recipes.compare and recipes.plot do without torch

    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, own)
    return messages
