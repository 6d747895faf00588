"""Messages and collectives that are under way until the exchange waits for them."""

from collections.abc import Sequence

import torch.distributed as dist

_abandoned: list[list[tuple[dist.Work, int | None]]] = []
"""Works of exchanges that were broken off: a few small objects, and their payloads, for each. The messages still arrive
there, so that they do not hold up later messages on the same connections."""


class LostWorkerError(RuntimeError):
    """A message or collective failed, most likely because another worker ended.

    Args:
        peer: the other worker's global rank; None where several take part and torch does not tell which one failed.
        cause: the error that torch raised.
    """

    def __init__(self, peer: int | None, cause: BaseException) -> None:
        who = "another rank" if peer is None else f"rank {peer}"
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        super().__init__(f"{who} ended, stopped or took another step: {reason}")


class Pending:
    """Messages or collectives under way. They still arrive if the object is deleted before they end.

    Args:
        works: the works to wait for.
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
        """Wait until all have ended; on a GPU make the current stream wait. A second call returns at once.

        Raises:
            LostWorkerError: a work failed.
        """
        works, self._works = self._works, []
        for work, peer in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostWorkerError(peer, error) from error
