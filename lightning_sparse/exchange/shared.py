"""The route of a sparsifier that selects the same coordinates on all workers: their values alone, in an all-reduce."""

from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.shipment import Shipment
from lightning_sparse.exchange.workers import Workers


class SharedShipment(Shipment):
    """All-reduces k values in the residual's dtype: no indices, nothing to forecast, and as much for any n.

    Args:
        indices: int64, shape (k,), the same on all workers.

    Attributes:
        indices: likewise.
        values: shape (k,), of out's dtype, for the caller to fill.
    """

    def __init__(
        self,
        bucket: int,
        payload_format: PayloadFormat,
        out: Tensor,
        workers: Workers,
        buffers: Buffers,
        *,
        indices: Tensor,
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers)
        self.is_typical = False
        self.indices = indices
        self.values = self.take("values", indices.numel(), out.dtype)
        self._work = Pending([])

    def start(self) -> None:
        """Issues the all-reduce."""
        self._work = self.workers.all_reduce(self.values)
        self.sent_bytes += self.values.numel() * self.values.itemsize
        self.out.zero_()  # while the values travel

    def join(self) -> None:
        """Waits for the all-reduce, on a GPU on the device."""
        self._work.wait()

    def finish(self, header: Tensor) -> None:
        """Divides the sums by n and puts them where they belong."""
        self.out.index_copy_(0, self.indices, self.values.div_(self.workers.num_workers))
