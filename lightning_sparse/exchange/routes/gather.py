"""The usual route: every worker's payload goes to all others in one all-gather of fixed capacity."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.routes.adding import average
from lightning_sparse.exchange.routes.coalescer import CoalescedPayload, PayloadCoalescer
from lightning_sparse.exchange.routes.cost_model import Costs
from lightning_sparse.exchange.routes.forecast import aligned
from lightning_sparse.exchange.routes.shipment import NUM_SELECTED, Shipment
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.kernels import is_available
from lightning_sparse.sparsifiers import Selection


class GatherShipment(Shipment):
    """Gathers payloads of a capacity that was forecast; what did not fit follows in an exact second round.

    ::

        first     | header | ends | c values | c offsets |   one all-gather; k may be larger than c on some workers
        second             | ends | rest                 |   only then: one all-gather, as large as the largest rest

    The result is that of ``plain_average`` in tests/distributed/test_exchange.py, to the last bit: all that one rank
    sent is added before anything of the next.

    Args:
        coalescer: sends payloads.
        capacity: c, the same on all workers.
        costs: where given, a rest that would cost more than a dense all-reduce makes the bucket start again as one.
    """

    def __init__(
        self,
        bucket: int,
        payload_format: PayloadFormat,
        out: Tensor,
        workers: Workers,
        buffers: Buffers,
        *,
        coalescer: PayloadCoalescer,
        capacity: int,
        costs: Costs | None,
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers)
        self.capacity = capacity
        self.payload_bytes = payload_format.payload_bytes(capacity)
        self.payload: Tensor = self.take("payload", self.payload_bytes, torch.uint8)
        self._costs = costs
        self._coalescer = coalescer
        self._coalesced: CoalescedPayload | None = None
        self._rows = self.payload.view(1, -1)
        self._work: Pending | None = None
        self._rest_format = PayloadFormat(payload_format.num_elements, payload_format.wire)
        self._rests: list[Tensor] = []
        self._is_decoded = False

    def start(self) -> None:
        """Sends the payload on its way to all."""
        self._is_decoded = False
        self._coalesced = self._coalescer.add(self.payload, self.take)
        self.sent_bytes += self.payload_bytes
        if not self.is_cleared:
            self.out.zero_()  # while the payload travels

    def prepare(self) -> Tensor | None:
        """Adds up the payloads of an early bucket while that of the last one travels."""
        if not self.format.header_fields:
            self.complete()
        return None

    def complete(self) -> None:
        """Adds up on a GPU what all payloads hold and divides it: the average, if none was too small."""
        if self._is_decoded or not is_available(self.out.device):
            return
        self._wait()
        average(self.format, self._rows, self.out, self.buffers)
        self._is_decoded = True

    def headers(self) -> Tensor:
        """Waits for the gather and returns all workers' header parts: float64, shape (n, H), on the device."""
        self._wait()
        return self._rows[:, : 8 * self.format.header_fields].contiguous().view(torch.float64)

    def send_overflow(self, header: Tensor, sizes: list[int]) -> None:
        """Sends what did not fit: nothing in the usual step."""
        counts: list[int] = header[:, NUM_SELECTED].long().tolist()
        largest_rest = max(counts) - self.capacity
        if largest_rest <= 0:
            return
        if self._is_decoded:
            self._is_decoded = False
            self.out.zero_()
        rest = self.rest() if counts[self.workers.rank] > self.capacity else None
        if self._costs is not None and self._costs.gather_bytes(largest_rest) > self._costs.dense_bytes():
            self._start_dense(counts[self.workers.rank], rest)
            return
        size = self._rest_format.payload_bytes(aligned(largest_rest))
        payload = self.take("rest", size, torch.uint8)
        if rest is None:
            self._rest_format.parts(payload).ends.zero_()
        else:
            self._rest_format.fill(payload, rest)
        gathered = self.take("gathered rests", size * self.workers.num_workers, torch.uint8)
        self._wait()
        self._work = self.workers.all_gather(gathered, payload)
        self._rests = list(gathered.view(self.workers.num_workers, size).unbind())
        self.sent_bytes += size

    def finish(self, header: Tensor) -> None:
        """Adds all payloads in rank order and divides by n."""
        self._wait()
        if self._is_decoded:
            return
        if self.is_dense:
            self.out.div_(self.workers.num_workers)
        elif self._rests:
            counts: list[int] = header[:, NUM_SELECTED].long().tolist()
            for row, rest, count in zip(self._rows.unbind(), self._rests, counts, strict=True):
                self.out.scatter_add_(0, *self.format.unpack(row, self.out.dtype, count))
                if count > self.capacity:
                    self.out.scatter_add_(0, *self._rest_format.unpack(rest, self.out.dtype, count - self.capacity))
            self.out.div_(self.workers.num_workers)
        else:
            average(self.format, self._rows, self.out, self.buffers)

    def own(self, num_selected: int) -> Selection:
        """Returns what this worker's payload holds."""
        return self.format.unpack(self.payload, self.out.dtype, num_selected)

    def _wait(self) -> None:
        if self._coalesced is not None:
            self._rows = self._coalesced.wait()
            self._coalesced = None
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _start_dense(self, num_selected: int, rest: Selection | None) -> None:
        """Begins again as a masked dense all-reduce; what was gathered is not used."""
        self._wait()
        self.is_dense = True
        self.out.zero_()
        for part in (self.own(num_selected), rest):
            if part is not None:
                self.out[part.indices] = part.values
        self._work = self.workers.all_reduce(self.out)
        self.sent_bytes += self.out.numel() * self.out.itemsize
