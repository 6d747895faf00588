"""The usual route: every worker's payload goes to all others in one all-gather of fixed capacity."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.cost_model import Costs
from lightning_sparse.exchange.forecast import aligned
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.shipment import NUM_SELECTED, Shipment
from lightning_sparse.exchange.workers import Pending, Workers
from lightning_sparse.sparsifiers import Selection

SPARSE_SHARE = 0.02
"""Up to this many coordinates from all workers together, as a share of the bucket, each is divided by itself."""


class GatherShipment(Shipment):
    """Gathers payloads of a capacity that was forecast; what did not fit follows in an exact second round.

    ::

        first     | header | counts | c values | c offsets |   one all-gather; k may be larger than c on some workers
        second             | counts | rest                 |   only then: one all-gather, as large as the largest rest

    The result is that of :func:`~lightning_sparse.exchange.plain.plain_average`, to the last bit: all that one rank
    sent is added before anything of the next.

    Args:
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
        capacity: int,
        costs: Costs | None,
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers)
        self.capacity = capacity
        self.payload_bytes = payload_format.payload_bytes(capacity)
        self.payload: Tensor = self.take("payload", self.payload_bytes, torch.uint8)
        self._costs = costs
        self._gathered = self.payload
        self._work: Pending | None = None
        self._rest_format = PayloadFormat(payload_format.num_elements, payload_format.wire_dtype)
        self._rests: list[Tensor] = []
        self._is_dense = False

    def start(self) -> None:
        """Issues the all-gather of the payloads."""
        self._gathered = self.take("gathered", self.payload_bytes * self.workers.num_workers, torch.uint8)
        self._work = self.workers.all_gather(self._gathered, self.payload)
        self.sent_bytes += self.payload_bytes
        if not self.is_cleared:
            self.out.zero_()  # while the payload travels

    def headers(self) -> Tensor:
        """Waits for the gather and returns all workers' header parts: float64, shape (n, H), on the device."""
        self._wait()
        rows = self._gathered.view(self.workers.num_workers, self.payload_bytes)
        return rows[:, : 8 * self.format.header_fields].contiguous().view(torch.float64)

    def second(self, header: Tensor, sizes: list[int]) -> None:
        """Sends what did not fit: nothing in the usual step."""
        counts: list[int] = header[:, NUM_SELECTED].long().tolist()
        largest_rest = max(counts) - self.capacity
        if largest_rest <= 0:
            return
        rest = self.rest() if counts[self.workers.rank] > self.capacity else None
        if self._costs is not None and self._costs.gather_bytes(largest_rest) > self._costs.dense_bytes():
            self._start_dense(counts[self.workers.rank], rest)
            return
        size = self._rest_format.payload_bytes(aligned(largest_rest))
        payload = self.take("rest", size, torch.uint8)
        if rest is None:
            self._rest_format.parts(payload).counts.zero_()
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
        if not self._is_dense:
            counts: list[int] = header[:, NUM_SELECTED].long().tolist()
            payloads = self._gathered.view(self.workers.num_workers, self.payload_bytes).unbind()
            if self.out.device.type == "cpu" and not self._rests:
                # One addition over all payloads, which a CPU does in their order.
                everything = self.format.unpack_many(payloads, self.out.dtype, counts)
                self._add(everything)
                if sum(counts) < SPARSE_SHARE * self.out.numel():
                    # Dividing only what is there saves a pass over the bucket. An index that several workers sent is
                    # read as often before it is written, each time with the same quotient.
                    quotients = self.out.index_select(0, everything.indices).div_(self.workers.num_workers)
                    self.out.index_copy_(0, everything.indices, quotients)
                    return
            else:
                # A GPU adds in no order: the places of one addition must be unique, so each payload is one.
                for rank, (payload, count) in enumerate(zip(payloads, counts, strict=True)):
                    self._add(self.format.unpack(payload, self.out.dtype, count))
                    if self._rests and count > self.capacity:
                        self._add(self._rest_format.unpack(self._rests[rank], self.out.dtype, count - self.capacity))
        self.out.div_(self.workers.num_workers)

    def own(self, num_selected: int) -> Selection:
        """Returns what this worker's payload holds."""
        return self.format.unpack(self.payload, self.out.dtype, num_selected)

    def _add(self, selection: Selection) -> None:
        self.out.scatter_add_(0, *selection)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _start_dense(self, num_selected: int, rest: Selection | None) -> None:
        """Begins again as a masked dense all-reduce; what was gathered is not used."""
        self._wait()
        self._is_dense = True
        self.out.zero_()
        for part in (self.own(num_selected), rest):
            if part is not None:
                self.out[part.indices] = part.values
        self._work = self.workers.all_reduce(self.out)
        self.sent_bytes += self.out.numel() * self.out.itemsize
