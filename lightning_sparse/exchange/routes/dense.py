"""The dense routes: the selected values as a whole gradient with zeros between them."""

import torch
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.routes.reduce_scatter import slice_elements
from lightning_sparse.exchange.routes.shipment import Shipment
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import Workers


class DenseShipment(Shipment):
    """All-reduces the masked gradient in ``out``: the same meaning as the sparse routes at dense cost.

    The order of the additions is the all-reduce's own, the same for every worker. Sums travel in the residual's dtype,
    also where values were rounded to a half precision: nobody keeps what rounding a sum would lose.
    """

    def start(self) -> None:
        """Issues the all-reduce."""
        self.is_dense = True
        self._work = self.workers.all_reduce(self.out)
        self.sent_bytes += self.out.numel() * self.out.itemsize

    def join(self) -> None:
        """Waits for the all-reduce, on a GPU on the device."""
        self._work.wait()

    def finish(self, header: Tensor) -> None:
        """Divides the sum by n."""
        if self.divisor == 1:
            self.out.div_(self.workers.num_workers)


class DenseStepsShipment(Shipment):
    """Sends every element as it travels to the worker that sums its slice, and the sums to all.

    ::

        worker i ── slice j, 1 byte an element ──▶ worker j              one all-to-all
        worker j ── its sums ──▶ all                                      one all-gather

    Sums of int8 travel as int16 as long as they fit, others in the dtype of ``out``. An all-reduce could not do that:
    it adds in the dtype in which it sends, and none of few bits holds a sum.
    """

    def __init__(
        self, bucket: int, payload_format: PayloadFormat, out: Tensor, workers: Workers, buffers: Buffers
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers)
        self._wire = payload_format.wire
        self._sums = sums_of(self._wire, out.dtype, workers.num_workers)
        self._num_padded = slice_elements(out.numel(), workers.num_workers) * workers.num_workers
        self._work = Pending([])
        self._received = self._gathered = out

    def start(self) -> None:
        """Issues the all-to-all of the slices."""
        self.is_dense = True
        parcels = self.take("parcels", self._num_padded, self._wire.storage)
        parcels[: self.out.numel()].copy_(self._wire.encoded(self.out))
        self._received = self.take("received parcels", self._num_padded, self._wire.storage)
        self._work = self.workers.all_to_all(*(tensor.view(torch.uint8) for tensor in (self._received, parcels)))
        self.sent_bytes += parcels.numel() * parcels.itemsize

    def prepare(self) -> None:
        """Sums this worker's slice and issues its gather."""
        self._work.wait()
        received = self._received.view(self.workers.num_workers, -1)
        part = self._sums.encoded(self._wire.decoded(received, self.out.dtype).sum(0))
        self._gathered = self.take("sums", self._num_padded, self._sums.storage)
        self._work = self.workers.all_gather(*(tensor.view(torch.uint8) for tensor in (self._gathered, part)))
        self.sent_bytes += part.numel() * part.itemsize

    def join(self) -> None:
        """Waits for the gather, on a GPU on the device."""
        self._work.wait()

    def finish(self, header: Tensor) -> None:
        """Divides the sums by n."""
        self.out.copy_(self._sums.decoded(self._gathered[: self.out.numel()], self.out.dtype))
        self.out.div_(self.workers.num_workers)


class LocalShipment(Shipment):
    """A bucket of a worker that is alone: what it selected is the average."""

    def start(self) -> None:
        """Does nothing."""

    def finish(self, header: Tensor) -> None:
        """Does nothing."""


def dense_element_bytes(wire: Wire, dtype: torch.dtype, num_workers: int) -> int:
    """Returns the bytes of an element on the dense route, there and back."""
    return wire.itemsize + sums_of(wire, dtype, num_workers).itemsize if wire.is_stepped else 2 * dtype.itemsize


def sums_of(wire: Wire, dtype: torch.dtype, num_workers: int) -> Wire:
    """Returns how sums of so many workers' values travel: exactly."""
    fits = wire.dtype == torch.int8 and 127 * num_workers <= torch.iinfo(torch.int16).max
    return Wire(torch.int16, wire.step) if fits else Wire(dtype)
