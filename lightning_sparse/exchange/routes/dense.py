"""The dense routes, which send a masked gradient: the selected values, and zeros elsewhere."""

import torch

from lightning_sparse.exchange.routes.adding import divide
from lightning_sparse.exchange.routes.reduce_scatter import slice_elements
from lightning_sparse.exchange.routes.transfer import Transfer
from lightning_sparse.exchange.wire import Wire


class DenseTransfer(Transfer):
    """All-reduces the masked gradient in ``out``.

    The result is that of the sparse routes up to rounding. The order of additions is the same for every worker. Sums
    have the residual's dtype, even if values are rounded to half precision: no residual would keep a sum's error. The
    caller has divided values by ``divisor``, so their sum is the average, except with ``by_senders``.
    """

    def start(self) -> None:
        """Issue the all-reduce."""
        self.is_dense = True
        if self.by_senders:
            is_sent = self.out != 0
            self._senders = is_sent.view(torch.uint8) if self.workers.num_workers < 256 else is_sent.int()
            self._counting = self.workers.all_reduce(self._senders)
            self.sent_bytes += self._senders.nbytes
        self.work = self.workers.all_reduce(self.out)
        self.sent_bytes += self.out.nbytes

    def finish(self) -> None:
        """Wait for the sums, and divide them if they are not yet averages."""
        super().finish()
        if self.by_senders:
            self._counting.wait()
            self.out.div_(self._senders.clamp_(min=1))


class QuantisedDenseTransfer(Transfer):
    """Sends every encoded element to the worker that sums its slice, and the sums to all workers.

    ::

        worker i ── slice j, 1 byte per element ──▶ worker j              one all-to-all
        worker j ── its sums ──▶ all                                      one all-gather

    Sums of int8 are sent as int16 if they fit, other sums in the dtype of ``out``. An all-reduce would add in the dtype
    that it sends, and dtypes of few bits cannot hold a sum.
    """

    def start(self) -> None:
        """Issue the all-to-all of the slices."""
        self.is_dense = True
        wire, n = self.format.wire, self.workers.num_workers
        num_padded = slice_elements(self.out.numel(), n) * n
        slices = self.take("slices", num_padded, wire.storage)
        slices[: self.out.numel()].copy_(wire.encoded(self.out))
        self._received = self.take("received slices", num_padded, wire.storage)
        self.work = self.workers.all_to_all(self._received.view(torch.uint8), slices.view(torch.uint8))
        self.sent_bytes += slices.nbytes

    def prepare(self) -> None:
        """Sum this worker's slice and issue its gather."""
        self.work.wait()
        received = self.format.wire.decoded(self._received.view(self.workers.num_workers, -1), self.out.dtype)
        self._wire = wire_of_sums(self.format.wire, self.out.dtype, self.workers.num_workers)
        sums = received.sum(0)
        if self.by_senders:  # an average is not on the grid
            self._wire = Wire(self.out.dtype)
            sums.div_(received.count_nonzero(0).clamp_(min=1))
        part = self._wire.encoded(sums)
        self._gathered = self.take("sums", self._received.numel(), self._wire.storage)
        self.work = self.workers.all_gather(self._gathered.view(torch.uint8), part.view(torch.uint8))
        self.sent_bytes += part.nbytes

    def finish(self) -> None:
        """Wait for the sums, and divide them by n unless they are averages."""
        self.work.wait()
        self.out.copy_(self._wire.decoded(self._gathered[: self.out.numel()], self.out.dtype))
        if not self.by_senders:
            divide(self.out, self.workers.num_workers)


def wire_of_sums(wire: Wire, dtype: torch.dtype, num_workers: int) -> Wire:
    """Return a form for sums of the workers' values that does not round."""
    fits = wire.dtype == torch.int8 and 127 * num_workers <= torch.iinfo(torch.int16).max
    return Wire(torch.int16, wire.step) if fits else Wire(dtype)
