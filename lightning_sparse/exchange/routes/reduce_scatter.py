"""The route for many workers: each worker sums one slice of the bucket, then the summed slices are gathered."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.routes.adding import average, pack_nonzero, side_by_side
from lightning_sparse.exchange.routes.coalescer import PayloadCoalescer
from lightning_sparse.exchange.routes.cost_model import Costs
from lightning_sparse.exchange.routes.gather import GatherShipment
from lightning_sparse.exchange.routes.shipment import LARGEST_SLICE, NUM_SELECTED
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers import Selection


def slice_elements(num_elements: int, num_workers: int) -> int:
    """Returns the elements of each worker's slice; the last slices may be shorter or empty."""
    return -(-num_elements // num_workers)


def slice_bounds(num_elements: int, num_workers: int) -> list[int]:
    """Returns where the slices begin, and the end of the last one."""
    size = slice_elements(num_elements, num_workers)
    return [min(rank * size, num_elements) for rank in range(num_workers + 1)]


def largest_slice(indices: Tensor, num_elements: int, num_workers: int) -> Tensor:
    """Returns the most of these ascending indices that fall into any worker's slice, without a wait for the device."""
    bounds = torch.arange(num_workers + 1, device=indices.device) * slice_elements(num_elements, num_workers)
    return torch.searchsorted(indices, bounds.clamp_(max=num_elements)).diff().amax()


class ReduceScatterShipment(GatherShipment):
    """A sparse reduce-scatter, then a gather of the averages: volume stays below a dense all-reduce for any n.

    ::

        worker i ── coordinates in slice j ──▶ worker j       one all-to-all of fixed capacity
        worker j:   average of its slice, in rank order
        worker j ── its average ──▶ all                       one all-gather of fixed capacity, sparse or dense,
                                                              whichever is less

    The sums are made in rank order, so the result is that of the gather route to the last bit. If a worker has more
    coordinates for a slice than fit, or a slice more than fit into the second half, all see it in the headers and sizes
    and the bucket is gathered instead.

    Args:
        slice_capacity: room for the coordinates of one worker in one slice, the same on all workers.
        union_capacity: room for the coordinates that anybody has in one slice, likewise; None sends slices densely.

    Attributes:
        has_overflowed: whether something did not fit; known once ``send_overflow`` was called.
    """

    has_sizes = True

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
        slice_capacity: int,
        union_capacity: int | None,
    ) -> None:
        super().__init__(
            bucket, payload_format, out, workers, buffers, coalescer=coalescer, capacity=capacity, costs=costs
        )
        self.has_overflowed = False
        self._slice_capacity = slice_capacity
        self._slice_elements = slice_elements(payload_format.num_elements, workers.num_workers)
        self._parcel_format = PayloadFormat(self._slice_elements, payload_format.wire)
        self._received = self._average = out
        self._average_format = PayloadFormat(self._slice_elements, Wire(out.dtype))
        # Sparse or dense, whichever is less.
        room = self._slice_elements if union_capacity is None else union_capacity
        size = self._average_format.payload_bytes(room)
        self._union_capacity = room if size < self._slice_elements * out.itemsize else None
        self._averages = out

    def start(self) -> None:
        """Issues the all-to-all of the slices' coordinates."""
        n = self.workers.num_workers
        size = self._parcel_format.payload_bytes(self._slice_capacity)
        parcels = self.take("parcels", size * n, torch.uint8)
        received = self.take("received parcels", size * n, torch.uint8)
        self._pack(parcels.view(n, size))
        self._received = received.view(n, size)
        self._work = self.workers.all_to_all(received, parcels)
        self.sent_bytes += size * n
        if not self.is_cleared:
            self.out.zero_()  # while the parcels travel

    def prepare(self) -> Tensor | None:
        """Averages this worker's slice and issues its gather; returns how many of its coordinates anyone sent."""
        self._wait()
        n = self.workers.num_workers
        self._average = self.take("slice", self._slice_elements, self.out.dtype)
        self._average.zero_()
        average(self._parcel_format, self._received, self._average, self.buffers)
        if self._union_capacity is None:
            part, union = self._average, self._average.count_nonzero()
        else:
            part = self.take("average", self._average_format.payload_bytes(self._union_capacity), torch.uint8)
            union = pack_nonzero(self._average_format, self._average, part)
        self._averages = self.take("averages", n * part.numel(), part.dtype)
        self._work = self.workers.all_gather(self._averages, part)
        self.sent_bytes += part.numel() * part.itemsize
        return union

    def complete(self) -> None:
        """Puts the slices together."""
        self._wait()
        if self._union_capacity is None:
            self.out.copy_(self._averages[: self.out.numel()])
        else:
            side_by_side(self._average_format, self._averages.view(self.workers.num_workers, -1), self.out)

    def send_overflow(self, header: Tensor, sizes: list[int]) -> None:
        """Begins again as a gather of payloads where something did not fit."""
        room = self._slice_elements if self._union_capacity is None else self._union_capacity
        self.has_overflowed = max(sizes) > room or bool(
            ((header[:, LARGEST_SLICE] > self._slice_capacity) | (header[:, NUM_SELECTED] > self.capacity)).any()
        )
        if self.has_overflowed:
            self.out.zero_()
            super().start()
            super().send_overflow(header, sizes)

    def finish(self, header: Tensor) -> None:
        """Adds payloads up where the slices were not all."""
        if self.has_overflowed:
            super().finish(header)

    def _pack(self, parcels: Tensor) -> None:
        """Copies the payload's coordinates into one parcel a slice, without knowing their number on the host."""
        assert self.payload is not None
        n, capacity = self.workers.num_workers, self._slice_capacity
        indices, values = self.format.unpack_padded(self.payload, self.out.dtype)
        bounds = torch.arange(n + 1, device=indices.device) * self._slice_elements
        starts = torch.searchsorted(indices, bounds.clamp(max=self.format.num_elements))
        places = starts[:-1, None] + torch.arange(capacity, device=indices.device)
        is_used = places < starts[1:, None]
        places = places.clamp_(max=max(indices.numel() - 1, 0))
        # What is not used gets an index beyond the slice, after all blocks: it is before no block's end.
        beyond = self._parcel_format.num_blocks * BLOCK_ELEMENTS
        local = torch.where(is_used, indices[places] - bounds[:-1, None], beyond)
        self._parcel_format.fill(parcels, Selection(local, values[places]))
