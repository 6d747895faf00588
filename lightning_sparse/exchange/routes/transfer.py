"""The interface of all routes, for the exchange of a bucket in a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.workers import Pending, Workers
from lightning_sparse.sparsifiers.protocol import Selection

Rows = Tensor | list[Tensor]  # the payloads of all workers: shape (n, bytes), or of different sizes
NUM_SELECTED = 0
"""The header field that holds k."""


class Largest(NamedTuple):
    """The largest numbers of any worker for a bucket. The first three are the first fields of a header."""

    selected: int  # k
    slice: int  # the coordinates in any of n equal slices
    non_finite: int  # the values that are not finite
    size: int  # the result of ``prepare``, else 0


@dataclass(eq=False, repr=False)
class Transfer:
    """The exchange of a bucket in a step; this base class serves one worker.

    Collective: all workers create the same transfers and call the same methods in this order:

    1. the caller writes the sent values into ``payload``, or for a masked route into ``out``
    2. ``start``     in the bucket's hook: issues the first collective while backward continues
    3. ``prepare``   in the last bucket's hook, before any header is read: may issue a second collective in ``work``
    4. ``complete``  during the copy of headers to the host: averages, as if no payload exceeded its capacity
    5. ``second_round``  with the headers: issues the collectives that need them
    6. ``finish``    the average is in ``out``

    Args:
        bucket: the bucket's position in DDP's order.
        format: the format of its payload.
        out: float32 or float64, shape (d,): receives the average.
        workers: the workers that take part.
        buffers: memory that every step reuses.
        by_senders: whether to divide each element's sum by the number of workers that sent a value other than 0,
            instead of n.

    Attributes:
        payload: memory for the sent values; None for a masked gradient, which the caller writes into ``out``.
        take_payloads: if set, the gather route calls it with this transfer and all workers' payloads instead of writing
            ``out``. If a payload overflows, the route writes ``out`` after all.
        overflow: returns selected coordinates beyond the payload's capacity; the caller sets it.
        work: the last started collective; after ``prepare`` the exchange waits for it.
        sent_bytes: bytes passed to collectives; of short payloads, the mean over the workers.
        is_dense: whether all workers exchange the bucket densely, with zeros for unselected elements.
        is_typical: whether later steps are expected to resemble this step.
        is_cleared: whether the caller left zeros in ``out``.
    """

    bucket: int
    format: PayloadFormat
    out: Tensor
    workers: Workers
    buffers: Buffers
    by_senders: bool = False
    payload: Tensor | None = field(default=None, init=False)
    take_payloads: Callable[["Transfer", Rows], None] | None = field(default=None, init=False)
    overflow: Callable[[], Selection] = field(init=False)
    work: Pending = field(default_factory=Pending, init=False)
    sent_bytes: int = field(default=0, init=False)
    is_dense: bool = field(default=False, init=False)
    is_typical: bool = field(default=True, init=False)
    is_cleared: bool = field(default=False, init=False)

    @property
    def divisor(self) -> int:
        """n, the divisor of masked gradients; 1 if the route divides."""
        return 1 if self.format.wire.is_quantised or self.by_senders else self.workers.num_workers

    def start(self) -> None:
        """Issue the first collective."""

    def prepare(self) -> Tensor | None:
        """Start the second collective, if any, before headers are known; may return a size, int64 on the device."""
        return None

    def complete(self) -> None:
        """Average as if no payload exceeded its capacity. A GPU then does not wait for the host."""

    def second_round(self, largest: Largest, header: Tensor) -> None:
        """Issue collectives that need the headers: none in most steps.

        Args:
            largest: the largest numbers of any worker.
            header: all workers' headers of this bucket on the CPU, shape (n, H).
        """

    def finish(self) -> None:
        """Wait for ``work`` and write the average into ``out``, unless ``out`` holds it already."""
        self.work.wait()

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for this bucket by name; see ``Buffers``."""
        return self.buffers.take((self.bucket, name), numel, dtype, self.out.device)
