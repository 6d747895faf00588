"""The usual route: an all-gather of payloads, with shared messages for small payloads."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_sparse.exchange.payload import PayloadFormat, aligned
from lightning_sparse.exchange.routes.adding import add_selection, average, divide
from lightning_sparse.exchange.routes.cost_model import Costs
from lightning_sparse.exchange.routes.transfer import NUM_SELECTED, Largest, Rows, Transfer
from lightning_sparse.exchange.workers import Pending
from lightning_sparse.kernels.launching import is_available
from lightning_sparse.sparsifiers.protocol import Selection

MESSAGE_SECONDS = 1e-3
"""The link's time for the payloads that share a message. A Gloo message costs each worker 0.2 ms of CPU time at best,
and up to 3 ms without the effect of ``use_batch_scheduling`` (docs/evidence/performance.md)."""
FULL_BYTES = 2**16
"""Bytes of waiting payloads that are sent at once if the link's rate is unknown, suitable for 500 Mbit/s."""


@dataclass
class Message:
    """All workers' payloads of neighbouring buckets.

    Args:
        work: the all-gather.
        rows: a message per worker: uint8, shape (n, bytes). Short messages fill only the first bytes of a row.
        formats: of the payloads in a message, one per bucket.
        sizes: the bytes of each payload with unused capacity.
        are_short: whether payloads lack unused capacity.
    """

    work: Pending
    rows: Tensor
    formats: Sequence[PayloadFormat]
    sizes: Sequence[int]
    are_short: bool

    @cached_property
    def payloads(self) -> Sequence[Rows]:
        """The payloads of all workers, for each bucket; waits for the all-gather."""
        self.work.wait()
        if not self.are_short:
            return torch.split(self.rows, list(self.sizes), dim=1)
        flat, payloads = self.rows.view(-1), []
        starts = [*range(0, flat.numel(), self.rows.shape[1])]
        for payload_format, size in zip(self.formats, self.sizes, strict=True):
            capacity = payload_format.capacity(size)
            counts = [payload_format.num_selected_at(flat.data_ptr() + start) for start in starts]
            held = [payload_format.payload_bytes(min(aligned(count), capacity)) for count in counts]
            ends = [start + num_bytes for start, num_bytes in zip(starts, held, strict=True)]
            payloads.append([flat[start:end] for start, end in zip(starts, ends, strict=True)])
            starts = ends
        return payloads


class PayloadCoalescer:
    """Gathers payloads of neighbouring buckets in one message over Gloo.

    A Gloo message costs more than its bytes. On a GPU each payload is sent at once, because backward hides the latency.
    Collective: the payloads of all workers have equal capacities. Messages leave unused capacity out.

    Args:
        link_gbit_s: the rate of a worker's link; None if it is unknown. Waiting payloads are sent once they hold as
            many bytes as the link transfers in MESSAGE_SECONDS.

    Attributes:
        waiting: the transfers whose payloads wait.
    """

    def __init__(self, link_gbit_s: float | None) -> None:
        self._full_bytes = FULL_BYTES if link_gbit_s is None else round(MESSAGE_SECONDS * link_gbit_s * 1e9 / 8)
        self.waiting: list[GatherTransfer] = []

    def add(self, transfer: "GatherTransfer") -> None:
        """Add a final payload to the waiting payloads, and send them if they are large enough."""
        self.waiting.append(transfer)
        # By capacity, because all workers must send at the same bucket.
        waiting_bytes = sum(waiting.payload.nbytes for waiting in self.waiting)
        if not transfer.workers.sends_messages(transfer.payload) or waiting_bytes >= self._full_bytes:
            self.flush()

    def flush(self) -> None:
        """Start gathering the waiting payloads, if there are any."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        payloads, take, workers = [transfer.payload for transfer in waiting], waiting[0].take, waiting[0].workers
        formats, sizes = [transfer.format for transfer in waiting], [payload.numel() for payload in payloads]
        # Gloo's libuv transport (macOS, Windows) cannot receive less than its buffer. Triton's kernels, which tests run
        # on a CPU, need payloads of equal size.
        is_over_tcp = sys.platform == "linux" and os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() != "UV"
        are_short = is_over_tcp and workers.sends_messages(payloads[0]) and not is_available(payloads[0].device)
        if are_short:
            payloads = [transfer.format.shortened(transfer.payload) for transfer in waiting]
        together = payloads[0]
        if len(payloads) > 1:
            num_bytes = sum(payload.numel() for payload in payloads)
            together = torch.cat(payloads, out=take("together", sum(sizes), torch.uint8)[:num_bytes])
        gathered = take("gathered", workers.num_workers * sum(sizes), torch.uint8)
        work = workers.all_gather(gathered, together)
        message = Message(work, gathered.view(workers.num_workers, -1), formats, sizes, are_short)
        for place, transfer in enumerate(waiting):
            transfer.work, transfer.message, transfer.place = work, message, place


@dataclass(eq=False, repr=False, kw_only=True)
class GatherTransfer(Transfer):
    """Gathers payloads of a forecast capacity; a second round sends the coordinates beyond the capacity.

    ::

        first     | header | ends | c values | c offsets |   one all-gather; k may be larger than c on some workers
        second             | ends | overflow             |   only then: another all-gather

    The result has the bits of ``plain_average`` in tests/distributed/exchange/test_exchange.py, because all coordinates
    of a rank are added before those of the next rank.

    Args:
        coalescer: sends payloads.
        capacity: c, the same on all workers.
        costs: if given, the bucket restarts as a dense all-reduce if the second round would cost more; not with
            ``by_senders``.

    Attributes:
        message: contains all workers' payloads; None before the coalescer has sent them.
        place: the place of this bucket's payloads in the message.
    """

    coalescer: PayloadCoalescer
    capacity: int
    costs: Costs | None
    message: Message | None = field(default=None, init=False)
    place: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.payload: Tensor = self.take("payload", self.format.payload_bytes(self.capacity), torch.uint8)
        self._overflows: list[Tensor] | None = None
        self._is_averaged = False

    @cached_property
    def _overflow_format(self) -> PayloadFormat:
        return PayloadFormat(self.format.num_elements, self.format.wire)

    def start(self) -> None:
        """Hand the payload to the coalescer."""
        self.coalescer.add(self)
        if not self.is_cleared and self.take_payloads is None:
            self.out.zero_()  # overlaps with the gather

    def prepare(self) -> Tensor | None:
        """Average an early bucket on a GPU while the last gather runs."""
        if not self.format.header_fields:
            self.complete()
        return None

    def complete(self) -> None:
        """Average the payloads on a GPU; the result is final unless a capacity was exceeded."""
        if not self._is_averaged and self.take_payloads is None and is_available(self.out.device):
            average(self.format, self._wait_for_payloads(), self.out, self.buffers, by_senders=self.by_senders)
            self._is_averaged = True

    def headers(self) -> Tensor:
        """Wait for the gather and return all workers' headers: float64, shape (n, H), on the device."""
        rows, num_bytes = self._wait_for_payloads(), 8 * self.format.header_fields
        if isinstance(rows, Tensor):
            return rows[:, :num_bytes].contiguous().view(torch.float64)
        return torch.stack([row[:num_bytes] for row in rows]).view(torch.float64)

    def second_round(self, largest: Largest, header: Tensor) -> None:
        """Send the coordinates beyond the capacity; usually there are none."""
        rows = self._wait_for_payloads()
        self.sent_bytes += rows.shape[1] if isinstance(rows, Tensor) else sum(row.numel() for row in rows) // len(rows)
        largest_overflow = largest.selected - self.capacity
        if largest_overflow <= 0:
            return
        self._counts: list[int] = header[:, NUM_SELECTED].long().tolist()
        self._is_averaged, self.take_payloads = False, None
        self.out.zero_()
        count = self._counts[self.workers.rank]
        nothing = Selection(self.out.new_empty(0, dtype=torch.int64), self.out.new_empty(0))
        overflow = self.overflow() if count > self.capacity else nothing
        received = None if self.costs is None else self.costs.received_bytes(largest_overflow, 0)
        if received is not None and received["gather"] > received["dense"]:
            self.is_dense = True
            for indices, values in (self.format.unpack(rows[self.workers.rank], self.out.dtype, count), overflow):
                self.out[indices] = values
            self.work = self.workers.all_reduce(self.out)
            self.sent_bytes += self.out.nbytes
            return
        n, least = self.workers.num_workers, 0 if isinstance(rows, list) else largest_overflow
        sizes = [self._overflow_format.payload_bytes(aligned(max(k - self.capacity, least))) for k in self._counts]
        payload = self.take("overflow", sizes[self.workers.rank], torch.uint8)
        self._overflow_format.fill(payload, overflow)
        gathered = self.take("gathered overflow", max(sizes) * n, torch.uint8)
        self.work = self.workers.all_gather(gathered, payload)
        self._overflows = [row[:size] for row, size in zip(gathered.view(n, -1), sizes, strict=True)]
        self.sent_bytes += sum(sizes) // n

    def finish(self) -> None:
        """Average all payloads in rank order, or pass them to ``take_payloads``."""
        if self._is_averaged:
            return
        rows = self._wait_for_payloads()
        if self.take_payloads is not None:
            self.take_payloads(self, rows)
            return
        if not self.is_dense and self._overflows is None:
            average(self.format, rows, self.out, self.buffers, by_senders=self.by_senders)
            return
        senders = torch.zeros_like(self.out, dtype=torch.int32) if self.by_senders else None
        if self._overflows is not None:
            for row, overflow, count in zip(rows, self._overflows, self._counts, strict=True):
                held = self.format.unpack(row, self.out.dtype, count)
                beyond = self._overflow_format.unpack(overflow, self.out.dtype, max(count - self.capacity, 0))
                add_selection(held, self.out, senders)
                add_selection(beyond, self.out, senders)
        divide(self.out, self.workers.num_workers, senders)

    def _wait_for_payloads(self) -> Rows:
        """Wait for the last collective and return all workers' payloads."""
        if self.message is None:
            self.coalescer.flush()
        assert self.message is not None
        self.work.wait()
        return self.message.payloads[self.place]
