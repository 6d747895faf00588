"""Data that are not there: the error, and how all workers come to know of it."""


class MissingDataError(FileNotFoundError):
    """A recipe's data set is not there or cannot be used; the message says what to put where, or what is wrong."""


def fail_together(error: MissingDataError | None) -> None:
    """Raises what went wrong on another worker; every rank calls this. Nodes may see different disks.

    Args:
        error: what went wrong on this worker, which then raises it itself; None if nothing did.

    Raises:
        MissingDataError: another worker has an error and this one has none.
    """
    import torch.distributed as dist  # not at the top: recipes.compare and recipes.plot do without torch

    if not (dist.is_available() and dist.is_initialized()):
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    for worker, message in enumerate(messages):
        if message is not None and error is None:
            raise MissingDataError(f"Worker {worker} has no data: {message}")
