"""Payloads of several buckets in one message to each worker, where a message costs more than the bytes in it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.workers import Workers

MESSAGE_SECONDS = 1e-3
"""Core time of one Gloo message per worker, whatever its size: 0.2 ms at best, and up to 3 ms where
``lightning_sparse.exchange.gloo_threads`` cannot help (docs/performance.md)."""
FULL_BYTES = 2**16
"""Waiting payloads of so many bytes are sent at once where the link's rate is unknown: it suits 500 Mbit/s."""


def full_bytes(link_gbit_s: float | None) -> int:
    """Returns the bytes that a link carries in the time of one message; so many waiting bytes are sent at once.

    Args:
        link_gbit_s: the rate of a worker's link; None if it is not known.
    """
    return FULL_BYTES if link_gbit_s is None else round(MESSAGE_SECONDS * link_gbit_s * 1e9 / 8)


Take = Callable[[str, int, torch.dtype], Tensor]
"""Gives memory by name, size and dtype."""


class CoalescedPayload:
    """One bucket's payload, sent to all workers together with others.

    Args:
        coalescer: sends it.
        payload: uint8, shape (bytes,).
    """

    def __init__(self, coalescer: "PayloadCoalescer", payload: Tensor) -> None:
        self.payload = payload
        self._coalescer = coalescer
        self._rows: Tensor | None = None
        self._pending: Pending | None = None

    def receive(self, pending: Pending, rows: Tensor) -> None:
        """Notes the collective, and where all workers' payloads arrive."""
        self._pending, self._rows = pending, rows

    def wait(self) -> Tensor:
        """Returns the payloads of all workers once they are here: uint8, shape (n, bytes), each contiguous."""
        if self._pending is None:
            self._coalescer.flush()
        assert self._pending is not None
        assert self._rows is not None
        self._pending.wait()
        return self._rows


class PayloadCoalescer:
    """Gathers the payloads of neighbouring buckets together. Collective: all workers' payloads are equally long.

    On a GPU each payload is sent at once: its latency is hidden behind what backward computes.

    Args:
        workers: among whom.
        full_bytes: so many waiting bytes are sent at once.
    """

    def __init__(self, workers: Workers, full_bytes: int) -> None:
        self._workers = workers
        self._full_bytes = full_bytes
        self._waiting: list[tuple[CoalescedPayload, Take]] = []

    def add(self, payload: Tensor, take: Take) -> CoalescedPayload:
        """Adds a payload, which must not change any more, to those that wait; sends them once they are enough.

        Args:
            payload: uint8, shape (bytes,), a multiple of 8 of them.
            take: see ``Take``.
        """
        coalesced = CoalescedPayload(self, payload)
        self._waiting.append((coalesced, take))
        if not self._workers.sends_messages(payload) or self._waiting_bytes() >= self._full_bytes:
            self.flush()
        return coalesced

    def flush(self) -> None:
        """Starts gathering the waiting payloads, if any: the step's last one is there, or somebody needs one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        payloads, take = [coalesced.payload for coalesced, _ in waiting], waiting[0][1]
        n, sizes = self._workers.num_workers, [payload.numel() for payload in payloads]
        together = payloads[0]
        if len(payloads) > 1:
            together = torch.cat(payloads, out=take("together", sum(sizes), torch.uint8))
        gathered = take("gathered", n * sum(sizes), torch.uint8)
        pending = self._workers.all_gather(gathered, together)
        for (coalesced, _), rows in zip(waiting, torch.split(gathered.view(n, -1), sizes, dim=1), strict=True):
            coalesced.receive(pending, rows)

    def discard(self) -> None:
        """Forgets what waits: its step was broken off."""
        self._waiting.clear()

    def _waiting_bytes(self) -> int:
        return sum(coalesced.payload.numel() for coalesced, _ in self._waiting)
