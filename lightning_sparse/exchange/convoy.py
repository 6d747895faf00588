"""Payloads of several buckets in one message to each worker, where a message costs more than what it carries."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.workers import Workers

MESSAGE_SECONDS = 1e-3
"""What a message over Gloo takes each worker of a core, with whatever is in it: 0.2 ms at best, and up to 3 ms where
``lightning_sparse.exchange.gloo_threads`` cannot help (docs/performance.md)."""
FULL_BYTES = 2**16
"""A convoy of so many bytes waits for no other payload, where nothing is said of the link: those of 500 Mbit/s."""


def full_bytes(link_gbit_s: float | None) -> int:
    """Returns how many bytes travel in the time that a message costs: a convoy of so many departs.

    Args:
        link_gbit_s: the rate of a worker's link; None if it is not known.
    """
    return FULL_BYTES if link_gbit_s is None else round(MESSAGE_SECONDS * link_gbit_s * 1e9 / 8)


Take = Callable[[str, int, torch.dtype], Tensor]
"""Gives memory by name, size and dtype."""


class Passage:
    """One payload's way to all workers.

    Args:
        convoy: with which it travels.
        payload: uint8, shape (bytes,).
    """

    def __init__(self, convoy: "Convoy", payload: Tensor) -> None:
        self.payload = payload
        self._convoy = convoy
        self._rows: Tensor | None = None
        self._pending: Pending | None = None

    def set_off(self, pending: Pending, rows: Tensor) -> None:
        """Learns where payloads arrive."""
        self._pending, self._rows = pending, rows

    def wait(self) -> Tensor:
        """Returns the payloads of all workers once they are here: uint8, shape (n, bytes), each contiguous."""
        if self._pending is None:
            self._convoy.depart()
        assert self._pending is not None
        assert self._rows is not None
        self._pending.wait()
        return self._rows


class Convoy:
    """Gathers the payloads of neighbouring buckets together. Collective: all workers' payloads are equally long.

    On a GPU each departs at once: its latency is hidden behind what backward computes.

    Args:
        workers: among whom.
        full_bytes: how many bytes do not wait for more.
    """

    def __init__(self, workers: Workers, full_bytes: int) -> None:
        self._workers = workers
        self._full_bytes = full_bytes
        self._waiting: list[tuple[Passage, Take]] = []

    def join(self, payload: Tensor, take: Take) -> Passage:
        """Adds a payload, which must not change any more, to those that wait; departs once they are enough.

        Args:
            payload: uint8, shape (bytes,), a multiple of 8 of them.
            take: see ``Take``.
        """
        passage = Passage(self, payload)
        self._waiting.append((passage, take))
        if not self._workers.sends_messages(payload) or self._waiting_bytes() >= self._full_bytes:
            self.depart()
        return passage

    def depart(self) -> None:
        """Starts gathering what waits, if anything does: the step's last payload is there, or somebody needs one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        passages, take = [passage for passage, _ in waiting], waiting[0][1]
        n, sizes = self._workers.num_workers, [passage.payload.numel() for passage in passages]
        together = passages[0].payload
        if len(passages) > 1:
            together = take("together", sum(sizes), torch.uint8)
            torch.cat([passage.payload for passage in passages], out=together)
        gathered = take("gathered", n * sum(sizes), torch.uint8)
        pending = self._workers.all_gather(gathered, together)
        for passage, rows in zip(passages, torch.split(gathered.view(n, -1), sizes, dim=1), strict=True):
            passage.set_off(pending, rows)

    def disband(self) -> None:
        """Forgets what waits: its step was broken off."""
        self._waiting.clear()

    def _waiting_bytes(self) -> int:
        return sum(passage.payload.numel() for passage, _ in self._waiting)
