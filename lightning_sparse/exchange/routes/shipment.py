"""One bucket on its way through one step: what every route has in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers import Selection

NUM_SELECTED, LARGEST_SLICE = range(2)
"""The fields of a header that the exchange itself reads: k, and the most coordinates in any of n equal slices."""


class Volume(NamedTuple):
    """What a worker sent in a step.

    Attributes:
        sent_bytes: that it handed to collectives.
        dense_elements: elements of buckets that travelled whole.
    """

    sent_bytes: int
    dense_elements: int


class Shipment(ABC):
    """A bucket's exchange in one step. Collective: all workers make the same shipments and call the same methods.

    1. the caller writes what it sends: into ``payload``, or for a masked route into ``out``
    2. ``start``     in the bucket's hook: the first collective goes out, backward continues
    3. ``prepare``   in the last bucket's hook, before any header is read: what can be done without, such as a second
                     collective
    4. ``join``      the same, before this worker waits for what others tell: a sum that is under way
    5. ``complete``  the same, once headers are on their way to the host: the usual ending
    6. ``send_overflow``  with the headers: whatever else is needed
    7. ``finish``    the average is in ``out``

    Args:
        bucket: the bucket's place in DDP's order.
        payload_format: the format of its payload.
        out: float32 or float64, shape (d,): receives the average.
        workers: who takes part.
        buffers: memory to use again in each step.

    Attributes:
        payload: where the caller writes what it sends; None for a masked gradient, which it writes into ``out``.
        divisor: by what the caller divides a masked gradient: n, or 1 where a sum of values is exact.
        has_sizes: whether ``prepare`` returns a number that all workers must know of each other.
        sent_bytes: bytes that this worker handed to collectives.
        is_dense: whether the whole bucket travels, or did in the end.
        is_typical: whether later steps may be expected to be like this one.
        is_cleared: whether the caller left zeros in ``out``.
        rest: what the payload had no room for; set by the caller, asked for only where something is.
    """

    has_sizes: ClassVar[bool] = False

    def __init__(
        self, bucket: int, payload_format: PayloadFormat, out: Tensor, workers: Workers, buffers: Buffers
    ) -> None:
        self.bucket = bucket
        self.format = payload_format
        self.out = out
        self.workers = workers
        self.buffers = buffers
        self.payload: Tensor | None = None
        self.divisor = 1 if payload_format.wire.is_stepped else workers.num_workers
        self.rest: Callable[[], Selection] = _nothing_left
        self.is_typical = True
        self.is_cleared = self.is_dense = False
        self.sent_bytes = 0

    @abstractmethod
    def start(self) -> None:
        """Issues the first collective."""

    def prepare(self) -> Tensor | None:
        """Goes on without any header; returns a number for all to know, if ``has_sizes``: int64, on the device."""
        return None

    def join(self) -> None:
        """Waits for a sum that is under way, on a GPU on the device: one that fails is seen before others are heard."""
        return

    def complete(self) -> None:
        """Enqueues on a GPU what is right in the usual step, so that the device need not wait for the host to look."""
        return

    def send_overflow(self, header: Tensor, sizes: list[int]) -> None:
        """Issues what is needed beyond the usual.

        Args:
            header: all workers' headers of this bucket on the CPU, shape (n, H).
            sizes: what ``prepare`` returned on every worker.
        """
        return

    @abstractmethod
    def finish(self, header: Tensor) -> None:
        """Waits for what is under way and writes the average into ``out``, if it is not there."""

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for this bucket by name; see ``Buffers``."""
        return self.buffers.take((self.bucket, name), numel, dtype, self.out.device)


def _nothing_left() -> Selection:
    raise AssertionError("nobody said what the payload had no room for")
