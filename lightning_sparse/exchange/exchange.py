"""The exchange of a whole step: which route each bucket takes, and the order in which collectives are issued.

DDP calls the communication hook once per bucket, in the same order on all workers. From the hook's body, in that order:

1. ``open``    chooses the bucket's route by the headers of the last step, the same on all workers
2. ``start``   issues its first collective; early buckets travel while backward continues
3. ``finish``  in the hook of the last bucket: reads all headers, the only wait of the step for the device; issues the
               further rounds that a bucket needs, in order; writes all averages

The payload of the last bucket carries the headers of all buckets. If that bucket has no payload, a small gather of the
headers follows.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers, copy_to_host
from lightning_sparse.exchange.groups import Nodes, find_nodes, is_one_node
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.cost_model import Costs, Forecast, Route, speeds
from lightning_sparse.exchange.routes.dense import DenseShipment, DenseStepsShipment, dense_element_bytes
from lightning_sparse.exchange.routes.gather import GatherShipment, PayloadCoalescer
from lightning_sparse.exchange.routes.hierarchical import HierarchicalShipment
from lightning_sparse.exchange.routes.reduce_scatter import ReduceScatterShipment, slice_elements
from lightning_sparse.exchange.routes.shipment import LARGEST_SLICE, NUM_SELECTED, Shipment
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import Pending, Workers, let_senders_finish

ExchangeMode = Literal["auto", "gather", "reduce_scatter", "dense", "hierarchical"]
EXCHANGE_MODES: tuple[ExchangeMode, ...] = ("auto", "gather", "reduce_scatter", "dense", "hierarchical")
FIRST_CAPACITY = 1024
"""The capacity in the first step of a route that the user chose, when nothing is known."""
UNEVEN_SLICES = 2
"""How many times its even share the fullest slice is assumed to hold before the first count."""


class Exchange:
    """Averages sparse buckets over the workers of a process group. Every method is collective.

    Args:
        mode: a route of ``TransportOptions``. ``"auto"`` judges by the number of selected coordinates in the step
            before (``lightning_sparse.exchange.routes.cost_model``). A bucket without a history, as in the first
            step, goes dense.
        group: the process group; None is the default group.
        link_gbit_s: the rate of a worker's link, from which follow the choice of ``"auto"`` and how long payloads wait
            for each other (``lightning_sparse.exchange.routes.gather``); None assumes a cautious one.
        workers: other workers than the group's, for a warmup.

    Attributes:
        counts_slices: whether headers must tell the largest slice.
        has_shortcut: whether a lone worker takes its selection for the average. Without, it goes through the motions of
            the route: for warmups, and for benchmarks on a single GPU.
    """

    has_shortcut: bool = True

    def __init__(
        self,
        mode: ExchangeMode,
        group: dist.ProcessGroup | None = None,
        link_gbit_s: float | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.mode = mode
        self.link_gbit_s = link_gbit_s
        self.workers = workers or Workers(group, dist.get_rank(group), dist.get_world_size(group))
        # The assumed rate of a link depends on it.
        self._is_one_node = mode == "auto" and link_gbit_s is None and workers is None and is_one_node(self.workers)
        self.counts_slices = mode == "reduce_scatter" or (mode == "auto" and self.workers.num_workers > 2)
        self._nodes: Nodes | None = find_nodes(group) if mode == "hierarchical" else None
        if workers is None and self.workers.is_over_gloo:
            let_senders_finish()
        self._buffers = Buffers()
        self._coalescer = PayloadCoalescer(self.workers, link_gbit_s)
        self._forecasts: dict[str, dict[tuple[int, int], Forecast]] = {"selected": {}, "slices": {}, "unions": {}}
        self._shipments: list[Shipment] = []
        self._headers: list[Tensor] = []

    def close(self) -> None:
        """End the sub-groups of nodes, if there are any."""
        for workers in self._nodes or ():
            dist.destroy_process_group(workers.group)
        self._nodes = None

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Return the history from which routes and capacities follow; the same on all workers."""
        return {
            name: [[*key, *forecast] for key, forecast in forecasts.items()]
            for name, forecasts in self._forecasts.items()
        }

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Replace the history by that of another exchange of as many workers."""
        for name, forecasts in self._forecasts.items():
            forecasts.clear()
            for bucket, num_elements, last, mean, deviation in state.get(name, []):
                forecasts[int(bucket), int(num_elements)] = Forecast(int(last), mean, deviation)

    def forget_sizes(self) -> None:
        """Free memory that buckets of other sizes needed."""
        self._buffers.forget()

    def begin(self) -> None:
        """Forget a step that was broken off in its middle."""
        if self._shipments:
            self._buffers.forget()  # messages under way still arrive in that memory
        self._shipments.clear()
        self._headers.clear()
        self._coalescer.waiting.clear()

    def open(
        self, bucket: int, wire: Wire, header_fields: int, out: Tensor, *, is_last: bool, is_full: bool = False
    ) -> Shipment:
        """Return the bucket's shipment, for the caller to fill.

        Args:
            bucket: the bucket's place in DDP's order.
            wire: how values travel.
            header_fields: H of this bucket.
            out: float32 or float64, shape (d,): receives the average, the same bits on all workers.
            is_last: whether no bucket of this step comes after it.
            is_full: whether all coordinates are sent for once, as in a calibration. The bucket then goes dense, as
                payloads of all coordinates would take more memory and time, and forecasts ignore it.
        """
        n, num_elements = self.workers.num_workers, out.numel()
        key = (bucket, num_elements)
        fields = sum(header.numel() for header in self._headers) + header_fields if is_last else 0
        common = (bucket, PayloadFormat(num_elements, wire, fields), out, self.workers, self._buffers)
        if n == 1 and self.has_shortcut:
            return Shipment(*common)
        is_empty = num_elements == 0  # parameters without elements: a payload of no bytes has no views
        if self._nodes is not None and not is_empty:
            return HierarchicalShipment(*common, nodes=self._nodes)
        fixed_bytes = PayloadFormat(num_elements, wire).fixed_bytes
        element = dense_element_bytes(wire, out.dtype, n)
        costs = Costs(n, num_elements, wire.dtype.itemsize, out.itemsize, fixed_bytes, element)
        route = "dense" if is_full or is_empty else self._route(key, costs, on_gpu=out.device.type != "cpu")
        if route == "dense":
            dense = (DenseStepsShipment if wire.is_stepped and not is_empty else DenseShipment)(*common)
            dense.is_typical = not is_full
            return dense
        capacity = self._forecasts["selected"].get(key, Forecast.first(FIRST_CAPACITY)).capacity(num_elements)
        may_go_dense = costs if self.mode == "auto" else None
        if route == "gather":
            return GatherShipment(*common, coalescer=self._coalescer, capacity=capacity, costs=may_go_dense)
        elements = slice_elements(num_elements, n)
        slices = self._forecasts["slices"].get(key, Forecast.first(UNEVEN_SLICES * capacity // n))
        union = self._forecasts["unions"].get(key)
        return ReduceScatterShipment(
            *common,
            coalescer=self._coalescer,
            capacity=capacity,
            costs=may_go_dense,
            slice_capacity=slices.capacity(elements),
            union_capacity=None if union is None else union.capacity(elements),
        )

    def start(self, shipment: Shipment, header: Tensor) -> None:
        """Issue the first collective of a shipment that the caller has filled.

        The header holds this worker's numbers of the bucket: float64, shape (H,); its first two fields are NUM_SELECTED
        and LARGEST_SLICE.
        """
        self._shipments.append(shipment)
        self._headers.append(header)
        is_last = shipment.format.header_fields > 0
        if is_last and isinstance(shipment, GatherShipment) and shipment.carries_headers:
            shipment.format.parts(shipment.payload).header.copy_(torch.cat(self._headers))
        shipment.start()
        if is_last:
            self._coalescer.flush()

    def finish(self) -> tuple[list[Tensor], int, int]:
        """Complete the step: every ``out`` holds its average.

        Returns:
            For each bucket all workers' headers in rank order: float64, shape (n, H), on the CPU; the bytes that this
            worker handed to collectives; and the elements of buckets that were sent densely.
        """
        shipments, lengths = self._shipments, [header.numel() for header in self._headers]
        local_sizes = [size for shipment in shipments if (size := shipment.prepare()) is not None]
        told = [size.double().view(1) for size in local_sizes]
        if not shipments[-1].carries_headers:
            told = self._headers + told
        wait_for_copy = copy_to_host(self._gather(told), self._buffers)
        for shipment in shipments:
            shipment.complete()
        *headers, sizes = torch.split(wait_for_copy(), [*lengths, len(local_sizes)], dim=1)
        columns: Iterator[list[int]] = iter(sizes.T.long().tolist())
        for shipment, header in zip(shipments, headers, strict=True):
            of_all = next(columns) if shipment.has_sizes else []
            shipment.send_overflow(header, of_all)
            self._remember(shipment, header, of_all)
        for shipment, header in zip(shipments, headers, strict=True):
            shipment.finish(header)
        sent_bytes = sum(shipment.sent_bytes for shipment in shipments) + 8 * sum(part.numel() for part in told)
        dense_elements = sum(shipment.out.numel() for shipment in shipments if shipment.is_dense)
        self._shipments, self._headers = [], []
        self._buffers.end_step()
        return headers, sent_bytes, dense_elements

    def _route(self, key: tuple[int, int], costs: Costs, *, on_gpu: bool) -> Route:
        if self.mode in ("gather", "reduce_scatter", "dense"):
            return self.mode
        selected, slices = self._forecasts["selected"].get(key), self._forecasts["slices"].get(key)
        if selected is None:
            return "dense"
        largest_slice = UNEVEN_SLICES * selected.last / costs.num_workers if slices is None else slices.last
        known = speeds(self.link_gbit_s, on_gpu=on_gpu, is_one_node=self._is_one_node)
        return costs.cheapest(selected.last, largest_slice, known)

    def _remember(self, shipment: Shipment, header: Tensor, sizes: list[int]) -> None:
        if not shipment.is_typical:
            return
        key, largest = (shipment.bucket, shipment.format.num_elements), header.amax(0)
        seen = {"selected": int(largest[NUM_SELECTED])}
        if self.counts_slices and shipment.payload is not None:
            seen["slices"] = int(largest[LARGEST_SLICE])
        if isinstance(shipment, ReduceScatterShipment):
            seen["unions"] = max(sizes)  # even one that did not fit: the next step has the capacity
        for name, count in seen.items():
            self._forecasts[name][key] = self._forecasts[name].get(key, Forecast.first(0)).after(count)

    def _gather(self, told: list[Tensor]) -> Tensor:
        """Return all workers' headers and sizes on the device: float64, shape (n, sum of lengths + sizes).

        ``told`` are this worker's, without the headers that the last bucket's payload carries.
        """
        n, pending, gathered = self.workers.num_workers, Pending([]), []
        if told:
            everyone = local = torch.cat(told)
            if n > 1:
                everyone = local.new_empty(n * local.numel())
                pending = self.workers.all_gather(everyone, local)
            gathered.append(everyone.view(n, -1))
        # A sum may have failed because of one worker, and then another worker sends no headers. So sums are first.
        for shipment in self._shipments:
            shipment.work.wait()
        last = self._shipments[-1]
        if isinstance(last, GatherShipment) and last.carries_headers:
            gathered.insert(0, last.headers())
        pending.wait()
        return torch.cat(gathered, 1) if len(gathered) > 1 else gathered[0]
