"""The dense route: the selected values as a whole gradient with zeros between them, in an all-reduce."""

from torch import Tensor

from lightning_sparse.exchange.shipment import Shipment


class DenseShipment(Shipment):
    """All-reduces the masked gradient in ``out``: the same meaning as the sparse routes at dense cost.

    The order of the additions is the all-reduce's own, the same for every worker. Sums travel in the residual's dtype,
    also where values were rounded to a half precision: nobody keeps what rounding a sum would lose.
    """

    is_masked = True

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
        if not self.is_divided:
            self.out.div_(self.workers.num_workers)


class LocalShipment(Shipment):
    """A bucket of a worker that is alone: what it selected is the average."""

    is_masked = True

    def start(self) -> None:
        """Does nothing."""

    def finish(self, header: Tensor) -> None:
        """Does nothing."""
