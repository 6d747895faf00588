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
    import torch.distributed as dist  # recipes.compare and recipes.plot need no torch

    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    messages = [None if raised is None else str(raised)]
    if dist.is_initialized():
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, messages[dist.get_rank()])
    if raised is not None:
        raise raised
    for rank, message in enumerate(messages):
        if message is not None:
            raise MissingDataError(f"Rank {rank}: {message}")
