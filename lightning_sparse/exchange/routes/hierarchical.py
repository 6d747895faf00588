"""The route for nodes of several workers: dense inside a node, sparse between nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.exchange.groups import Nodes
from lightning_sparse.exchange.payload import PayloadFormat, aligned
from lightning_sparse.exchange.routes.adding import add
from lightning_sparse.exchange.routes.reduce_scatter import slice_elements
from lightning_sparse.exchange.routes.transfer import Transfer
from lightning_sparse.exchange.wire import Wire


@dataclass(eq=False, repr=False, kw_only=True)
class HierarchicalTransfer(Transfer):
    """Sums the masked gradients of a node's workers densely, and sends the sums between nodes sparsely.

    ::

        node A: workers 0 … L-1   all-reduce of masked gradients           fast links, dense
        local rank l: slice l     its non-zero sums to local rank l of     slow links, sparse; each worker of a node
                                  every other node                         sends 1 / L
        node A: workers 0 … L-1   all-gather of the slices                 fast links, dense

    Every worker keeps its own residual and selects its own coordinates. Values are summed within nodes, then over
    nodes, in the same order for every worker.

    Args:
        nodes: the sub-groups.
    """

    nodes: Nodes

    def __post_init__(self) -> None:
        self._slice_elements = slice_elements(self.format.num_elements, self.nodes.inside.num_workers)
        self._slice_format = PayloadFormat(self._slice_elements, Wire(self.out.dtype))

    def start(self) -> None:
        """Issue the all-reduce inside the node."""
        if self.nodes.inside.num_workers > 1:
            self.work = self.nodes.inside.all_reduce(self.out)
            self.sent_bytes += self.out.nbytes

    def prepare(self) -> Tensor | None:
        """Wait for the sums, and return the number of nonzero sums in this worker's slice."""
        self.work.wait()
        start = self.nodes.inside.rank * self._slice_elements
        part = self.out[start : start + self._slice_elements]
        self._slice = self.take("slice", self._slice_elements, self.out.dtype).zero_()
        self._slice[: part.numel()].copy_(part)
        return self._slice.count_nonzero()  # NaN is not zero

    def second_round(self, header: Tensor, sizes: list[int]) -> None:
        """Exchange the slice between nodes, sparse or dense, whichever is smaller, and gather the slices inside."""
        inside, between = self.nodes.inside, self.nodes.between
        self.is_dense = between.num_workers == 1
        if between.num_workers > 1:
            size = self._slice_format.payload_bytes(aligned(max(sizes)))
            if between.num_workers * size < 2 * self._slice.nbytes:
                payload = self.take("payload", size, torch.uint8)
                self._slice_format.fill_marked(payload, self._slice, self._slice)
                gathered = self.take("gathered", size * between.num_workers, torch.uint8)
                between.all_gather(gathered, payload).wait()
                add(self._slice_format, gathered.view(between.num_workers, size), self._slice.zero_())
                self.sent_bytes += size
            else:
                self.is_dense = True
                between.all_reduce(self._slice).wait()
                self.sent_bytes += self._slice.nbytes
        self._slices = self._slice
        if inside.num_workers > 1:
            self._slices = self.take("slices", self._slice_elements * inside.num_workers, self.out.dtype)
            self.work = inside.all_gather(self._slices, self._slice)
            if self.out.device.type != "cpu":
                # With two busy communicators, GPUs may run kernels in different orders and deadlock. So on the device,
                # the next bucket's exchange between nodes starts after this exchange.
                self.work.wait()
            self.sent_bytes += self._slice.nbytes

    def finish(self) -> None:
        """Copy the slices to ``out``; divide by n unless the caller has."""
        self.work.wait()
        self.out.copy_(self._slices[: self.out.numel()])
        if self.divisor == 1:
            self.out.div_(self.workers.num_workers)
