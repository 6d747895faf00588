"""What is under way between workers, until somebody waits for it."""

from collections.abc import Sequence

import torch.distributed as dist

_abandoned: list[list[dist.Work]] = []
"""What nobody waits for any more, and others have sent or will: received all the same, so that what follows on the same
connections is not held up. A few small objects, and their payloads, for each exchange that is broken off."""


class Pending:
    """Messages or collectives under way. Who lets go of one that has not ended leaves it to arrive by itself.

    Args:
        works: what must end.
    """

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def __del__(self, abandoned: list[list[dist.Work]] = _abandoned) -> None:
        # Gloo's connection stands still for ever where a message arrives whose receiver is gone.
        if works := getattr(self, "_works", None):  # a copy that was broken off has none
            abandoned.append(works)

    def wait(self) -> None:
        """Waits until all have ended; on a GPU makes the current stream wait. Once: Gloo's messages come only once."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
