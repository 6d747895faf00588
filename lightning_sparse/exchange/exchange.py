"""The exchange of a whole step: which route each bucket takes, and the order in which collectives are issued.

DDP calls the communication hook once a bucket, in the same order on all workers. From the hook's body, in that order:

1. ``open``    the bucket's route follows from the headers of the last step, the same on all workers
2. ``start``   its first collective goes out; early buckets travel while backward goes on

and in the hook of the last bucket, after its own ``start``:

3. ``finish``  all headers are read, the one wait of the step for the device; the rounds that some bucket needs beyond
               its first are issued, in order; all averages are written

The headers of all buckets ride in the last bucket's payload. Only where that bucket travels masked, without a payload,
a small gather of their own follows.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers
from lightning_sparse.exchange.cost_model import Costs, Route
from lightning_sparse.exchange.dense import DenseShipment, LocalShipment
from lightning_sparse.exchange.forecast import Forecast
from lightning_sparse.exchange.gather import GatherShipment
from lightning_sparse.exchange.hierarchical import HierarchicalShipment, Nodes, find_nodes
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.reduce_scatter import ReduceScatterShipment, slice_elements
from lightning_sparse.exchange.shipment import LARGEST_SLICE, NUM_SELECTED, Shipment
from lightning_sparse.exchange.workers import Workers

ExchangeMode = Literal["auto", "gather", "reduce_scatter", "dense", "hierarchical"]
EXCHANGE_MODES: tuple[ExchangeMode, ...] = ("auto", "gather", "reduce_scatter", "dense", "hierarchical")
FIRST_CAPACITY = 1024
"""Room in the first step of a route that was asked for by name, when nothing is known."""
UNEVEN_SLICES = 2
"""How many times its even share the fullest slice is taken to hold, before it was ever counted."""


class Exchange:
    """Averages sparse buckets over the workers of a process group. Collective in everything but its attributes.

    Args:
        mode: ``"gather"`` sends every worker's coordinates to all; ``"reduce_scatter"`` sends them to the worker that
            sums their slice, and the sums to all; ``"dense"`` all-reduces the selected values in a buffer of the
            bucket's size; ``"hierarchical"`` is dense inside a node and sparse between nodes; ``"auto"`` takes for each
            bucket and step the one of the first three that costs least
            (:mod:`lightning_sparse.exchange.cost_model`), judged by what was selected the step before. A bucket
            without a history, as in the first step, goes dense.
        group: the process group; None is the default group.

    Attributes:
        counts_slices: whether headers must tell the largest slice.
    """

    def __init__(self, mode: ExchangeMode, group: dist.ProcessGroup | None = None) -> None:
        self.mode = mode
        self.workers = Workers(group, dist.get_rank(group), dist.get_world_size(group))
        self.counts_slices = mode == "reduce_scatter" or (mode == "auto" and self.workers.num_workers > 2)
        self._nodes: Nodes | None = find_nodes(group) if mode == "hierarchical" else None
        self._buffers = Buffers()
        self._selected: dict[tuple[int, int], Forecast] = {}
        self._slices: dict[tuple[int, int], Forecast] = {}
        self._shipments: list[Shipment] = []
        self._headers: list[Tensor] = []

    def close(self) -> None:
        """Ends the sub-groups of nodes, if there are any."""
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Returns what was seen of former steps, from which routes and capacities follow; the same on all workers."""
        return {
            name: [[*key, *forecast.state()] for key, forecast in forecasts.items()]
            for name, forecasts in (("selected", self._selected), ("slices", self._slices))
        }

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Continues from what another exchange of as many workers saw; nothing else is known any more."""
        for name, forecasts in (("selected", self._selected), ("slices", self._slices)):
            forecasts.clear()
            for bucket, num_elements, *numbers in state[name]:
                forecast = forecasts[int(bucket), int(num_elements)] = Forecast(0)
                forecast.load_state(numbers)

    def begin(self) -> None:
        """Forgets a step that was broken off in its middle."""
        self._shipments.clear()
        self._headers.clear()

    def open(
        self, bucket: int, num_elements: int, wire_dtype: torch.dtype, header_fields: int, out: Tensor, *, is_last: bool
    ) -> Shipment:
        """Returns the bucket's shipment, for the caller to fill.

        Args:
            bucket: the bucket's place in DDP's order.
            num_elements: its elements.
            wire_dtype: dtype in which values travel.
            header_fields: H of this bucket.
            out: float32 or float64, shape (num_elements,): receives the average, the same bits on all workers.
            is_last: whether no bucket of this step comes after it.
        """
        key = (bucket, num_elements)
        fields = sum(header.numel() for header in self._headers) + header_fields if is_last else 0
        payload_format = PayloadFormat(num_elements, wire_dtype, fields)
        fixed_bytes = PayloadFormat(num_elements, wire_dtype).fixed_bytes
        costs = Costs(self.workers.num_workers, num_elements, wire_dtype.itemsize, out.itemsize, fixed_bytes)
        route = self._route(key, costs, on_gpu=out.device.type != "cpu")
        common = (bucket, payload_format, out, self.workers, self._buffers)
        selected = self._selected.get(key)
        capacity = (Forecast(FIRST_CAPACITY) if selected is None else selected).capacity(num_elements)
        may_go_dense = costs if self.mode == "auto" else None
        if self.workers.num_workers == 1:
            return LocalShipment(*common)
        if self._nodes is not None:
            return HierarchicalShipment(*common, nodes=self._nodes)
        if route == "dense":
            return DenseShipment(*common)
        if route == "gather":
            return GatherShipment(*common, capacity=capacity, costs=may_go_dense)
        elements = slice_elements(num_elements, self.workers.num_workers)
        slices = self._slices.get(key) or Forecast(UNEVEN_SLICES * capacity // self.workers.num_workers)
        room = slices.capacity(elements)
        return ReduceScatterShipment(*common, capacity=capacity, costs=may_go_dense, slice_capacity=room)

    def start(self, shipment: Shipment, header: Tensor, *, is_last: bool) -> None:
        """Issues the first collective of a shipment that the caller has filled.

        Args:
            shipment: from :meth:`open`.
            header: float64, shape (H,): this worker's numbers of the bucket; its first two fields are NUM_SELECTED and
                LARGEST_SLICE.
            is_last: whether no bucket of this step comes after it.
        """
        self._shipments.append(shipment)
        self._headers.append(header)
        if is_last and _carries_headers(shipment):
            assert shipment.payload is not None
            shipment.format.parts(shipment.payload).header.copy_(torch.cat(self._headers))
        shipment.start()

    def finish(self) -> tuple[list[Tensor], int]:
        """Completes the step: every ``out`` holds its average.

        Returns:
            For each bucket all workers' headers in rank order: float64, shape (n, H), on the CPU; and the bytes that
            this worker handed to collectives.
        """
        shipments, headers = self._shipments, self._gather_headers()
        small_bytes = 0 if _carries_headers(shipments[-1]) else 8 * sum(header.shape[1] for header in headers)
        sizes, sizes_bytes = self._gather_sizes(headers)
        for shipment, header, one in zip(shipments, headers, sizes, strict=True):
            shipment.second(header, one)
        for shipment, header in zip(shipments, headers, strict=True):
            shipment.finish(header)
            self._remember(shipment, header)
        sent_bytes = sum(shipment.sent_bytes for shipment in shipments) + small_bytes + sizes_bytes
        self.begin()
        return headers, sent_bytes

    def _route(self, key: tuple[int, int], costs: Costs, *, on_gpu: bool) -> Route:
        if self.mode in ("gather", "reduce_scatter", "dense"):
            return self.mode
        selected, slices = self._selected.get(key), self._slices.get(key)
        if selected is None:
            return "dense"
        largest_slice = UNEVEN_SLICES * selected.last / costs.num_workers if slices is None else slices.last
        return costs.cheapest(selected.last, largest_slice, on_gpu=on_gpu)

    def _remember(self, shipment: Shipment, header: Tensor) -> None:
        key = (shipment.bucket, shipment.format.num_elements)
        largest = header.amax(0)
        fields = [(self._selected, NUM_SELECTED)]
        if self.counts_slices and not shipment.is_masked:
            fields.append((self._slices, LARGEST_SLICE))
        for forecasts, field in fields:
            count = int(largest[field])
            if key in forecasts:
                forecasts[key].observe(count)
            else:
                forecasts[key] = Forecast(count)

    def _gather_headers(self) -> list[Tensor]:
        """All workers' headers, by bucket, on the CPU."""
        lengths = [header.numel() for header in self._headers]
        last = self._shipments[-1]
        if isinstance(last, GatherShipment) and _carries_headers(last):
            table = last.headers()
        else:
            local = torch.cat(self._headers)
            table = local.unsqueeze(0)
            if self.workers.num_workers > 1:
                table = local.new_empty(self.workers.num_workers * local.numel())
                self.workers.all_gather(table, local).wait()
                table = table.view(self.workers.num_workers, -1)
        return list(torch.split(table.cpu(), lengths, dim=1))

    def _gather_sizes(self, headers: list[Tensor]) -> tuple[list[list[int]], int]:
        """What each worker's ``prepare`` returned, by bucket, where some bucket needs it told."""
        n = self.workers.num_workers
        local = [shipment.prepare(header) for shipment, header in zip(self._shipments, headers, strict=True)]
        if not any(shipment.has_sizes for shipment in self._shipments):
            return [[] for _ in local], 0
        mine = torch.tensor(local, device=self._shipments[0].out.device)
        everyone = mine.new_empty(n * len(local))
        self.workers.all_gather(everyone, mine).wait()
        return everyone.view(n, len(local)).T.tolist(), mine.numel() * mine.itemsize


def _carries_headers(shipment: Shipment) -> bool:
    return isinstance(shipment, GatherShipment) and not isinstance(shipment, ReduceScatterShipment)
