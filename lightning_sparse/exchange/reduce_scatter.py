"""The route for many workers: each worker sums one slice of the bucket, then the summed slices are gathered."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.cost_model import Costs
from lightning_sparse.exchange.forecast import aligned
from lightning_sparse.exchange.gather import GatherShipment
from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.shipment import LARGEST_SLICE, NUM_SELECTED
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers import Selection


def slice_elements(num_elements: int, num_workers: int) -> int:
    """Returns the elements of each worker's slice; the last slices may be shorter or empty."""
    return -(-num_elements // num_workers)


def largest_slice(indices: Tensor, num_elements: int, num_workers: int) -> Tensor:
    """Returns the most of these ascending indices that fall into any worker's slice, without a wait for the device."""
    bounds = torch.arange(num_workers + 1, device=indices.device) * slice_elements(num_elements, num_workers)
    return torch.searchsorted(indices, bounds.clamp_(max=num_elements)).diff().amax()


class ReduceScatterShipment(GatherShipment):
    """A sparse reduce-scatter, then a gather of the sums: volume stays below a dense all-reduce for any n.

    ::

        worker i ── coordinates in slice j ──▶ worker j       one all-to-all of fixed capacity
        worker j:   sum of its slice, in rank order
        worker j ── summed slice ──▶ all                      one all-gather, sparse or dense, whichever is less

    The sums are made in rank order, so the result is that of the gather route to the last bit. If a worker has more
    coordinates for a slice than fit, all see it in the headers and the bucket is gathered instead.

    Args:
        slice_capacity: room for the coordinates of one worker in one slice, the same on all workers.
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
        capacity: int,
        costs: Costs | None,
        slice_capacity: int,
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers, capacity=capacity, costs=costs)
        self._slice_capacity = slice_capacity
        self._slice_elements = slice_elements(payload_format.num_elements, workers.num_workers)
        self._parcel_format = PayloadFormat(self._slice_elements, payload_format.wire_dtype)
        self._sum_format = PayloadFormat(self._slice_elements, out.dtype)
        self._has_overflowed = False
        self._sum = out
        self._summed = Selection(torch.empty(0, dtype=torch.int64), torch.empty(0))
        self._slices: list[Tensor] = []
        self._sizes: list[int] = []
        self._slices_are_dense = False

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

    def prepare(self, header: Tensor) -> int:
        """Sums this worker's slice; returns how many of its coordinates anyone sent."""
        self._wait()
        self._has_overflowed = bool((header[:, LARGEST_SLICE] > self._slice_capacity).any()) or bool(
            (header[:, NUM_SELECTED] > self.capacity).any()
        )
        if self._has_overflowed:
            return 0
        self._sum = self.take("slice", self._slice_elements, self.out.dtype)
        self._sum.zero_()
        is_sent = torch.zeros(self._slice_elements, dtype=torch.bool, device=self._sum.device)
        for parcel in self._received.unbind():
            count = int(self._parcel_format.parts(parcel).counts.sum())
            indices, values = self._parcel_format.unpack(parcel, self._sum.dtype, count)
            self._sum.scatter_add_(0, indices, values)
            is_sent[indices] = True
        indices = is_sent.nonzero().squeeze(1)
        self._summed = Selection(indices, self._sum[indices])
        return indices.numel()

    def second(self, header: Tensor, sizes: list[int]) -> None:
        """Issues the gather of the summed slices, or begins again as a gather of payloads."""
        n = self.workers.num_workers
        if self._has_overflowed:
            super().start()
            super().second(header, sizes)
            return
        self._sizes = sizes
        room = aligned(max(sizes))
        dense_bytes = self._slice_elements * self.out.itemsize
        self._slices_are_dense = self._sum_format.payload_bytes(room) >= dense_bytes
        if self._slices_are_dense:
            part, numel, dtype = self._sum, self._slice_elements, self.out.dtype
        else:
            numel, dtype = self._sum_format.payload_bytes(room), torch.uint8
            part = self.take("summed", numel, dtype)
            self._sum_format.fill(part, self._summed)
        gathered = self.take("gathered slices", n * numel, dtype)
        self._work = self.workers.all_gather(gathered, part)
        self._slices = list(gathered.view(n, numel).unbind())
        self.sent_bytes += part.numel() * part.itemsize

    def finish(self, header: Tensor) -> None:
        """Puts the slices together and divides by n."""
        if self._has_overflowed:
            super().finish(header)
            return
        self._wait()
        if not self._slices_are_dense:
            self.out.zero_()
        for rank, received in enumerate(self._slices):
            start = rank * self._slice_elements
            part = self.out[start : start + self._slice_elements]  # the last slices may be shorter
            if self._slices_are_dense:
                part.copy_(received[: part.numel()])
            else:
                indices, values = self._sum_format.unpack(received, self.out.dtype, self._sizes[rank])
                part[indices] = values
        self.out.div_(self.workers.num_workers)

    def _pack(self, parcels: Tensor) -> None:
        """Copies the payload's coordinates into one parcel a slice, without knowing their number on the host."""
        n, capacity = self.workers.num_workers, self._slice_capacity
        indices, values = self.format.unpack_padded(self.payload, self.format.wire_dtype)
        bounds = torch.arange(n + 1, device=indices.device) * self._slice_elements
        starts = torch.searchsorted(indices, bounds.clamp(max=self.format.num_elements))
        places = starts[:-1, None] + torch.arange(capacity, device=indices.device)
        is_used = places < starts[1:, None]
        places = places.clamp_(max=max(indices.numel() - 1, 0))
        # What is not used gets an index beyond the slice, after all blocks: no block counts it.
        ends = self._parcel_format.num_blocks * BLOCK_ELEMENTS
        local = torch.where(is_used, indices[places] - bounds[:-1, None], ends)
        for parcel, one, value in zip(parcels.unbind(), local.unbind(), values[places].unbind(), strict=True):
            self._parcel_format.fill(parcel, Selection(one, value))
