"""What is under way between workers, until somebody waits for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

_abandoned: list[list[tuple[dist.Work, int | None]]] = []
"""What nobody waits for any more, and others have sent or will: received all the same, so that what follows on the same
connections is not held up. A few small objects, and their payloads, for each exchange that is broken off."""


@contextmanager
def lost_worker(peer: int | None) -> Iterator[None]:
    """Raises what torch raises within as ``LostWorkerError``."""
    try:
        yield
    except RuntimeError as error:
        raise LostWorkerError(peer, error) from error


class LostWorkerError(RuntimeError):
    """A message or collective failed, most likely because another worker ended.

    Args:
        peer: the other worker's global rank; None where several take part and torch does not tell which one failed.
        cause: what torch raised.
    """

    def __init__(self, peer: int | None, cause: BaseException) -> None:
        who = "another rank" if peer is None else f"rank {peer}"
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        super().__init__(f"{who} ended, stopped or took another step: {reason}")


class Pending:
    """Messages or collectives under way. Who lets go of one that has not ended leaves it to arrive by itself.

    Args:
        works: what must end.
        peers: of each work, the global rank of the worker at its other end; None where all take part.
    """

    def __init__(self, works: Sequence[dist.Work | None], peers: Sequence[int | None] = ()) -> None:
        peers = peers or [None] * len(works)
        self._works = [(work, peer) for work, peer in zip(works, peers, strict=True) if work is not None]

    def __del__(self, abandoned: list[list[tuple[dist.Work, int | None]]] = _abandoned) -> None:
        # Gloo's connection stands still for ever where a message arrives whose receiver is gone.
        if works := getattr(self, "_works", None):  # a copy that was broken off has none
            abandoned.append(works)

    def wait(self) -> None:
        """Waits until all have ended; on a GPU makes the current stream wait. Once: Gloo's messages come only once.

        Raises:
            LostWorkerError: a work failed.
        """
        works, self._works = self._works, []
        for work, peer in works:
            try:  # not ``lost_worker``: this runs for each message
                work.wait()
            except RuntimeError as error:
                raise LostWorkerError(peer, error) from error
