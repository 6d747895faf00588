"""The route for nodes of several workers: dense inside a node, sparse between nodes."""

import os
import socket
from dataclasses import dataclass
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.routes.forecast import aligned
from lightning_sparse.exchange.routes.reduce_scatter import slice_elements
from lightning_sparse.exchange.routes.shipment import Shipment
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import Workers, new_group
from lightning_sparse.sparsifiers import Selection


@dataclass(frozen=True)
class Nodes:
    """The two kinds of sub-groups: the workers of this node, and the workers of this local rank on every node."""

    inside: Workers
    between: Workers

    def close(self) -> None:
        """Ends both sub-groups."""
        for workers in (self.inside, self.between):
            dist.destroy_process_group(workers.group)


def this_node() -> tuple[str, str]:
    """Returns what tells this worker's node from others: its host's name, and its rank where the launcher says it."""
    return socket.gethostname(), os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", ""))


def is_one_node(workers: Workers) -> bool:
    """Whether all workers share a node. Collective."""
    everyone = [this_node()] * workers.num_workers
    if workers.num_workers > 1:
        dist.all_gather_object(everyone, this_node(), group=workers.group)
    return len(set(everyone)) == 1


def find_nodes(group: dist.ProcessGroup | None = None) -> Nodes:
    """Groups the workers by node. Collective: every worker of the group calls this at set-up.

    A node is what has one host name and, where the launcher says it (torchrun's GROUP_RANK, Lightning's NODE_RANK), one
    node rank.

    Raises:
        ValueError: on every worker: the nodes do not all have the same number of workers.
    """
    node = this_node()
    own = (node, f"lightning_sparse/{uuid4().hex}")
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    members: dict[tuple[str, str], list[int]] = {}
    for rank, (node_of_rank, _) in enumerate(everyone):
        members.setdefault(node_of_rank, []).append(rank)
    if len({len(ranks) for ranks in members.values()}) > 1:
        listed = ", ".join(f"{name} {index}: ranks {ranks}" for (name, index), ranks in members.items())
        raise ValueError(
            f'exchange="hierarchical" needs the same number of workers on every node, got {listed}. '
            'Start as many everywhere, or use exchange="auto".'
        )
    rank = dist.get_rank(group)
    inside = members[node]
    between = [ranks[inside.index(rank)] for ranks in members.values()]
    _, name = everyone[0]
    return Nodes(_sub_group(group, inside, f"{name}/inside"), _sub_group(group, between, f"{name}/between"))


def _sub_group(group: dist.ProcessGroup | None, ranks: list[int], name: str) -> Workers:
    global_ranks = [rank if group is None else dist.get_global_rank(group, rank) for rank in ranks]
    # Only its members make a sub-group: every worker makes its own two.
    made = new_group(group, global_ranks, name)
    return Workers(made, dist.get_rank(made), len(ranks))


class HierarchicalShipment(Shipment):
    """Sums the masked gradients of a node's workers densely, and sends the sums between nodes sparsely.

    ::

        node A: workers 0 … L-1   all-reduce of masked gradients           fast links, dense
        local rank l: slice l     its non-zero sums to local rank l of     slow links, sparse; each worker of a node
                                  every other node                         carries an L-th
        node A: workers 0 … L-1   all-gather of the slices                 fast links, dense

    Every worker keeps its own residual and selects its own coordinates: only the way differs, and the order in which
    the sums are made (first within nodes, then over nodes), the same for every worker.

    Args:
        nodes: the sub-groups.
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
        nodes: Nodes,
    ) -> None:
        super().__init__(bucket, payload_format, out, workers, buffers)
        self._nodes = nodes
        self._slice_elements = slice_elements(payload_format.num_elements, nodes.inside.num_workers)
        self._format = PayloadFormat(self._slice_elements, Wire(out.dtype))
        self._work: Pending | None = None
        self._selection = Selection(torch.empty(0, dtype=torch.int64), torch.empty(0))
        self._slice = out
        self._sizes: list[int] = []

    def start(self) -> None:
        """Issues the all-reduce inside the node."""
        if self._nodes.inside.num_workers > 1:
            self._work = self._nodes.inside.all_reduce(self.out)
            self.sent_bytes += self.out.numel() * self.out.itemsize

    def prepare(self) -> Tensor | None:
        """Picks the non-zero sums of this worker's slice, for which it waits; returns their number."""
        if self._work is not None:
            self._work.wait()
        start = self._nodes.inside.rank * self._slice_elements
        part = self.out[start : start + self._slice_elements]
        self._slice = self.take("slice", self._slice_elements, self.out.dtype)
        self._slice.zero_()
        self._slice[: part.numel()].copy_(part)
        indices = self._slice.nonzero().squeeze(1)  # NaN is not zero
        self._selection = Selection(indices, self._slice[indices])
        return torch.full((), indices.numel(), device=indices.device)

    def send_overflow(self, header: Tensor, sizes: list[int]) -> None:
        """Sends the slice to its peers on other nodes, sparse or dense, whichever is less; spreads it in the node."""
        inside, between = self._nodes.inside, self._nodes.between
        if between.num_workers > 1:
            room = aligned(max(sizes))
            size = self._format.payload_bytes(room)
            gathered_bytes = (between.num_workers - 1) * size
            dense_bytes = 2 * (between.num_workers - 1) / between.num_workers * self._slice.numel() * self.out.itemsize
            if gathered_bytes < dense_bytes:
                payload = self.take("payload", size, torch.uint8)
                self._format.fill(payload, self._selection)
                gathered = self.take("gathered", size * between.num_workers, torch.uint8)
                between.all_gather(gathered, payload).wait()
                self._slice.zero_()
                for received in gathered.view(between.num_workers, size).unbind():
                    count = self._format.num_selected(received)
                    self._slice.scatter_add_(0, *self._format.unpack(received, self.out.dtype, count))
                self.sent_bytes += size
            else:
                between.all_reduce(self._slice).wait()
                self.sent_bytes += self._slice.numel() * self._slice.itemsize
        self._whole = self.take("slices", self._slice_elements * inside.num_workers, self.out.dtype)
        if inside.num_workers > 1:
            self._work = inside.all_gather(self._whole, self._slice)
            if self.out.device.type != "cpu":
                # Of two communicators that are busy at once, GPUs may run kernels in different orders, and wait for
                # each other for ever: the next bucket's way between nodes begins, on the device, after this one.
                self._work.wait()
            self.sent_bytes += self._slice.numel() * self._slice.itemsize
        else:
            self._whole, self._work = self._slice, None

    def finish(self, header: Tensor) -> None:
        """Copies the slices into place and divides by n."""
        if self._work is not None:
            self._work.wait()
        self.out.copy_(self._whole[: self.out.numel()])
        if self.divisor == 1:
            self.out.div_(self.workers.num_workers)
