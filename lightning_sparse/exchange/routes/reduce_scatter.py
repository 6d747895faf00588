"""The route for many workers: each worker averages a slice of the bucket, then all gather the slices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan

import torch
from torch import Tensor

from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.exchange.routes.adding import average, concatenate
from lightning_sparse.exchange.routes.gather import GatherTransfer
from lightning_sparse.exchange.routes.transfer import Largest
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.sparsifiers.protocol import Selection


def slice_elements(num_elements: int, num_workers: int) -> int:
    """Return the elements of each worker's slice; the last slices may be shorter or empty."""
    return -(-num_elements // num_workers)


def slice_bounds(num_elements: int, num_workers: int) -> list[int]:
    """Return the starts of the slices and the end of the last slice."""
    size = slice_elements(num_elements, num_workers)
    return [min(rank * size, num_elements) for rank in range(num_workers + 1)]


@dataclass(eq=False, repr=False, kw_only=True)
class ReduceScatterTransfer(GatherTransfer):
    """A sparse reduce-scatter and a gather of the averages, with less volume than a dense all-reduce for any n.

    ::

        worker i ── coordinates in slice j ──▶ worker j       one all-to-all of fixed capacity
        worker j:   average of its slice, in rank order
        worker j ── its average ──▶ all                       one all-gather of fixed capacity, sparse or dense,
                                                              whichever is smaller

    Sums are in rank order, so the result has the bits of the gather route. If a slice of a worker or a summed slice
    exceeds its capacity, all workers see it in the headers and sizes, and gather the bucket instead.

    With ``thresholds_sums``, the caller leaves this worker's own slice out of the payload. ``keep_sums`` adds the slice
    to the averages and keeps small averages. ``put_back`` returns finite values beyond a capacity to the residual.
    If non-finite values are dropped there, the bucket's first average becomes NaN on all workers.

    Args:
        slice_capacity: capacity for one worker's coordinates in one slice, the same on all workers.
        union_capacity: capacity for all workers' coordinates in one slice, the same on all; None sends slices densely.
        thresholds_sums: whether small sums stay with the worker of their slice.

    Attributes:
        keep_sums: called with the slice's averages without this worker's values, shape (slice elements,), and a
            capacity. Changes them in place to the averages to send, and returns the number of large ones.
        put_back: adds values at unique indices to the residual.
    """

    slice_capacity: int
    union_capacity: int | None
    thresholds_sums: bool = False
    keep_sums: Callable[[Tensor, int], Tensor] = field(init=False)
    put_back: Callable[[Selection], None] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slice_elements = slice_elements(self.format.num_elements, self.workers.num_workers)
        self._slice_format = PayloadFormat(self._slice_elements, self.format.wire)
        self._average_format = PayloadFormat(self._slice_elements, Wire(self.out.dtype))
        capacity = self._slice_elements if self.union_capacity is None else self.union_capacity
        self._is_sparse = self._average_format.payload_bytes(capacity) < self._slice_elements * self.out.itemsize
        self._average_capacity = capacity if self._is_sparse else self._slice_elements

    @property
    def own_slice(self) -> tuple[int, int]:
        """The first element of this worker's slice, and the element after the last."""
        start = min(self.workers.rank * self._slice_elements, self.format.num_elements)
        return start, min(start + self._slice_elements, self.format.num_elements)

    def start(self) -> None:
        """Issue the all-to-all of the slices' coordinates."""
        n, size = self.workers.num_workers, self._slice_format.payload_bytes(self.slice_capacity)
        slices = self.take("slices", size * n, torch.uint8)
        received = self.take("received slices", size * n, torch.uint8)
        self._pack(slices.view(n, size))
        self._received = received.view(n, size)
        self.work = self.workers.all_to_all(received, slices)
        self.sent_bytes += slices.nbytes
        if not self.is_cleared:
            self.out.zero_()  # overlaps with the all-to-all

    def prepare(self) -> Tensor | None:
        """Average this worker's slice, issue its gather and return the number of coordinates in the slice."""
        self.work.wait()
        mean = self.take("slice", self._slice_elements, self.out.dtype).zero_()
        average(self._slice_format, self._received, mean, self.buffers, by_senders=self.by_senders)
        union = self.keep_sums(mean, self._average_capacity) if self.thresholds_sums else mean.count_nonzero()
        part = mean
        if self._is_sparse:
            part = self.take("average", self._average_format.payload_bytes(self._average_capacity), torch.uint8)
            self._average_format.fill_marked(part, mean, mean)
        self._averages = self.take("averages", self.workers.num_workers * part.numel(), part.dtype)
        self.work = self.workers.all_gather(self._averages, part)
        self.sent_bytes += part.nbytes
        return union

    def complete(self) -> None:
        """Concatenate the slices."""
        self.work.wait()
        if self._is_sparse:
            concatenate(self._average_format, self._averages.view(self.workers.num_workers, -1), self.out, self.buffers)
        else:
            self.out.copy_(self._averages[: self.out.numel()])
        self._is_averaged = True

    def second_round(self, largest: Largest, header: Tensor) -> None:
        """Restart as a gather of payloads if a capacity was exceeded."""
        is_exceeded = largest.slice > self.slice_capacity or largest.selected > self.capacity
        is_exceeded |= self._is_sparse and largest.size > self._average_capacity
        if self.thresholds_sums:  # the residuals hold all finite values that exceeded a capacity
            if is_exceeded and largest.non_finite:
                self.out[:1] = nan
        elif is_exceeded:
            self._is_averaged = False
            self.out.zero_()
            super().start()
            super().second_round(largest, header)

    def _pack(self, slices: Tensor) -> None:
        """Copy the payload's coordinates into one payload per slice, without waiting for the device."""
        indices, values = self.format.unpack_padded(self.payload, self.out.dtype)
        bounds = torch.arange(self.workers.num_workers + 1, device=indices.device) * self._slice_elements
        starts = torch.searchsorted(indices, bounds.clamp(max=self.format.num_elements))
        places = starts[:-1, None] + torch.arange(self.slice_capacity, device=indices.device)
        is_used = places < starts[1:, None]
        places = places.clamp_(max=indices.numel() - 1)
        # Unused positions get an index beyond the slice and all blocks, so no block counts them.
        beyond = self._slice_format.num_blocks * BLOCK_ELEMENTS
        local = torch.where(is_used, indices[places] - bounds[:-1, None], beyond)
        self._slice_format.fill(slices, Selection(local, values[places]))
        if self.thresholds_sums:
            owners = indices.div(self._slice_elements, rounding_mode="floor").clamp_(max=self.workers.num_workers - 1)
            rank_in_slice = torch.arange(indices.numel(), device=indices.device) - starts[owners]
            beyond_capacity = torch.where(rank_in_slice < self.slice_capacity, 0, values)
            self.put_back(Selection(indices.clamp(max=self.format.num_elements - 1), beyond_capacity))
