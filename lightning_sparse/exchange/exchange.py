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

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers, HostCopy
from lightning_sparse.exchange.gloo_threads import let_senders_finish
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.coalescer import PayloadCoalescer, full_bytes
from lightning_sparse.exchange.routes.cost_model import Costs, Route, speeds
from lightning_sparse.exchange.routes.dense import DenseShipment, DenseStepsShipment, LocalShipment, dense_element_bytes
from lightning_sparse.exchange.routes.forecast import Forecast
from lightning_sparse.exchange.routes.gather import GatherShipment
from lightning_sparse.exchange.routes.hierarchical import HierarchicalShipment, Nodes, find_nodes, is_one_node
from lightning_sparse.exchange.routes.reduce_scatter import ReduceScatterShipment, slice_elements
from lightning_sparse.exchange.routes.shipment import LARGEST_SLICE, NUM_SELECTED, Shipment, Volume
from lightning_sparse.exchange.wire import Wire
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
            (``lightning_sparse.exchange.routes.cost_model``), judged by what was selected the step before. A bucket
            without a history, as in the first step, goes dense.
        group: the process group; None is the default group.
        link_gbit_s: the rate of a worker's link, by which ``"auto"`` judges, and how long payloads wait for each other
            (``lightning_sparse.exchange.routes.coalescer``); None judges with caution.
        workers: others than the group's, for a warmup.

    Attributes:
        counts_slices: whether headers must tell the largest slice.
        has_shortcut: whether a worker that is alone takes what it selected for the average. Without, it goes through
            the motions of the route: for warmups, and for benchmarks on a single GPU.
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
        # By which "auto" judges a link of which nothing is said.
        self._is_one_node = mode == "auto" and link_gbit_s is None and workers is None and is_one_node(self.workers)
        self.counts_slices = mode == "reduce_scatter" or (mode == "auto" and self.workers.num_workers > 2)
        self._nodes: Nodes | None = find_nodes(group) if mode == "hierarchical" else None
        if workers is None and self.workers.is_over_gloo:
            let_senders_finish()
        self._buffers = Buffers()
        self._coalescer = PayloadCoalescer(self.workers, full_bytes(link_gbit_s))
        self._selected: dict[tuple[int, int], Forecast] = {}
        self._slices: dict[tuple[int, int], Forecast] = {}
        self._unions: dict[tuple[int, int], Forecast] = {}
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
            for name, forecasts in self._forecasts.items()
        }

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Continues from what another exchange of as many workers saw; nothing else is known any more."""
        for name, forecasts in self._forecasts.items():
            forecasts.clear()
            for bucket, num_elements, *numbers in state.get(name, []):
                forecast = forecasts[int(bucket), int(num_elements)] = Forecast(0)
                forecast.load_state(numbers)

    @property
    def _forecasts(self) -> dict[str, dict[tuple[int, int], Forecast]]:
        return {"selected": self._selected, "slices": self._slices, "unions": self._unions}

    def forget_sizes(self) -> None:
        """Gives memory back that buckets of other sizes needed."""
        self._buffers.forget()

    def begin(self) -> None:
        """Forgets a step that was broken off in its middle."""
        if self._shipments:
            self._buffers.forget()  # what was under way still arrives in that memory
        self._shipments.clear()
        self._headers.clear()
        self._coalescer.discard()

    def open(
        self,
        bucket: int,
        num_elements: int,
        wire: Wire,
        header_fields: int,
        out: Tensor,
        *,
        is_last: bool,
        is_full: bool = False,
    ) -> Shipment:
        """Returns the bucket's shipment, for the caller to fill.

        Args:
            bucket: the bucket's place in DDP's order.
            num_elements: its elements.
            wire: how values travel.
            header_fields: H of this bucket.
            out: float32 or float64, shape (num_elements,): receives the average, the same bits on all workers.
            is_last: whether no bucket of this step comes after it.
            is_full: whether everything is sent for once, as in a calibration: densely then, as payloads of all
                coordinates would take more memory and time, and no reason to forecast that of later steps.
        """
        key = (bucket, num_elements)
        fields = sum(header.numel() for header in self._headers) + header_fields if is_last else 0
        payload_format = PayloadFormat(num_elements, wire, fields)
        fixed_bytes = PayloadFormat(num_elements, wire).fixed_bytes
        element = dense_element_bytes(wire, out.dtype, self.workers.num_workers)
        costs = Costs(self.workers.num_workers, num_elements, wire.itemsize, out.itemsize, fixed_bytes, element)
        route = self._route(key, costs, on_gpu=out.device.type != "cpu")
        common = (bucket, payload_format, out, self.workers, self._buffers)
        selected = self._selected.get(key)
        capacity = (Forecast(FIRST_CAPACITY) if selected is None else selected).capacity(num_elements)
        may_go_dense = costs if self.mode == "auto" else None
        if self.workers.num_workers == 1 and self.has_shortcut:
            return LocalShipment(*common)
        is_empty = num_elements == 0  # parameters without elements: payloads of no bytes are no place for views
        if self._nodes is not None and not is_empty:
            return HierarchicalShipment(*common, nodes=self._nodes)
        if route == "dense" or is_full or is_empty:
            dense = (DenseStepsShipment if wire.is_stepped and not is_empty else DenseShipment)(*common)
            dense.is_typical = not is_full
            return dense
        if route == "gather":
            return GatherShipment(*common, coalescer=self._coalescer, capacity=capacity, costs=may_go_dense)
        elements = slice_elements(num_elements, self.workers.num_workers)
        slices = self._slices.get(key) or Forecast(UNEVEN_SLICES * capacity // self.workers.num_workers)
        union = self._unions.get(key)
        return ReduceScatterShipment(
            *common,
            coalescer=self._coalescer,
            capacity=capacity,
            costs=may_go_dense,
            slice_capacity=slices.capacity(elements),
            union_capacity=None if union is None else union.capacity(elements),
        )

    def start(self, shipment: Shipment, header: Tensor, *, is_last: bool) -> None:
        """Issues the first collective of a shipment that the caller has filled.

        Args:
            shipment: from ``open``.
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
        if is_last:
            self._coalescer.flush()

    def finish(self) -> tuple[list[Tensor], Volume]:
        """Completes the step: every ``out`` holds its average.

        Returns:
            For each bucket all workers' headers in rank order: float64, shape (n, H), on the CPU; and what was sent.
        """
        shipments = self._shipments
        local_sizes = [size for shipment in shipments if (size := shipment.prepare()) is not None]
        table, lengths = self._gather_headers(local_sizes)
        copy = HostCopy(table, self._buffers)
        for shipment in shipments:
            shipment.complete()
        *headers, sizes = torch.split(copy.wait(), [*lengths, len(local_sizes)], dim=1)
        columns: Iterator[list[int]] = iter(sizes.T.long().tolist())
        for shipment, header in zip(shipments, headers, strict=True):
            of_all = next(columns) if shipment.has_sizes else []
            shipment.send_overflow(header, of_all)
            self._remember(shipment, header, of_all)
        for shipment, header in zip(shipments, headers, strict=True):
            shipment.finish(header)
        small_bytes = 8 * (len(local_sizes) + (0 if _carries_headers(shipments[-1]) else sum(lengths)))
        dense = sum(shipment.out.numel() for shipment in shipments if shipment.is_dense)
        volume = Volume(sum(shipment.sent_bytes for shipment in shipments) + small_bytes, dense)
        self._shipments.clear()
        self._headers.clear()
        self._buffers.end_step()
        return headers, volume

    def _route(self, key: tuple[int, int], costs: Costs, *, on_gpu: bool) -> Route:
        if self.mode in ("gather", "reduce_scatter", "dense"):
            return self.mode
        selected, slices = self._selected.get(key), self._slices.get(key)
        if selected is None:
            return "dense"
        largest_slice = UNEVEN_SLICES * selected.last / costs.num_workers if slices is None else slices.last
        known = speeds(self.link_gbit_s, on_gpu=on_gpu, is_one_node=self._is_one_node)
        return costs.cheapest(selected.last, largest_slice, known)

    def _remember(self, shipment: Shipment, header: Tensor, sizes: list[int]) -> None:
        if not shipment.is_typical:
            return
        key = (shipment.bucket, shipment.format.num_elements)
        largest = header.amax(0)
        seen = [(self._selected, int(largest[NUM_SELECTED]))]
        if self.counts_slices and shipment.payload is not None:
            seen.append((self._slices, int(largest[LARGEST_SLICE])))
        if isinstance(shipment, ReduceScatterShipment):
            seen.append((self._unions, max(sizes)))  # also where they were too large to fit: the next step has the room
        for forecasts, count in seen:
            if key in forecasts:
                forecasts[key].observe(count)
            else:
                forecasts[key] = Forecast(count)

    def _gather_headers(self, sizes: list[Tensor]) -> tuple[Tensor, list[int]]:
        """What all workers have told, on the device: float64, shape (n, sum of lengths + sizes); and headers' lengths.

        Args:
            sizes: this worker's, which follow the headers of all buckets.
        """
        lengths = [header.numel() for header in self._headers]
        last = self._shipments[-1]
        told = [] if _carries_headers(last) else self._headers
        told = [*told, *(size.double().view(1) for size in sizes)]
        n, local = self.workers.num_workers, torch.cat(told) if told else None
        everyone, pending = local, None
        if local is not None and n > 1:
            everyone = local.new_empty(n * local.numel())
            pending = self.workers.all_gather(everyone, local)
        # A sum may have failed because of one worker, for which another never tells anything: it is looked at first.
        for shipment in self._shipments:
            shipment.join()
        gathered = []
        if isinstance(last, GatherShipment) and _carries_headers(last):
            gathered.append(last.headers())
        if pending is not None:
            pending.wait()
        if everyone is not None:
            gathered.append(everyone.view(n, -1))
        return (torch.cat(gathered, 1) if len(gathered) > 1 else gathered[0]), lengths


def _carries_headers(shipment: Shipment) -> bool:
    return isinstance(shipment, GatherShipment) and not isinstance(shipment, ReduceScatterShipment)
