"""The exchange of a complete step: chooses each bucket's route and issues collectives in order.

The engine passes buckets in the same order on all workers. For each bucket:

1. ``new_transfer``  chooses the bucket's route by the headers of the last step, the same on all workers
2. ``start``         issues its first collective; with DDP, the exchange of early buckets overlaps with backward

and after the last bucket:

3. ``finish``        reads all headers, which waits for the device; issues further rounds, in order; writes all averages

If the last bucket is gathered, its payload carries the headers of all buckets. If not, a small gather of the headers
follows.
"""

from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.buffers import Buffers, copy_to_host
from lightning_sparse.exchange.groups import is_one_node
from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.exchange.routes.cost_model import Costs, Forecast, Route, speeds
from lightning_sparse.exchange.routes.dense import DenseTransfer, QuantisedDenseTransfer, wire_of_sums
from lightning_sparse.exchange.routes.gather import GatherTransfer, PayloadCoalescer
from lightning_sparse.exchange.routes.reduce_scatter import ReduceScatterTransfer, slice_elements
from lightning_sparse.exchange.routes.transfer import Largest, Transfer
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import Pending, Workers, use_batch_scheduling, wait_for_threads_at_exit

ExchangeMode = Literal["auto", "gather", "reduce_scatter", "sparse_sums", "dense"]
FIRST_CAPACITY = 1024
"""Selected coordinates assumed before the first count without a density, for routes that the user chose."""
UNEVEN_SLICES = 2
"""The assumed ratio of the fullest slice to the mean slice before the first count."""


class Exchange:
    """Averages sparse buckets over a process group. ``new_transfer`` to ``finish`` are collective.

    Args:
        mode: a route of ``ExchangeOptions``. ``"auto"`` chooses by the number of selected coordinates in the previous
            step (``lightning_sparse.exchange.routes.cost_model``).
        group: the process group; None is the default group.
        link_gbit_s: the rate of a worker's link. Determines the choice of ``"auto"`` and how many payloads share a
            message (``PayloadCoalescer``). With None, ``"auto"`` assumes a rate (``speeds``).
        workers: replace the workers of the group, for a warmup and for simulated workers.
        density: the share of selected coordinates that is assumed for a bucket without a history. With None, such a
            bucket takes the dense route with ``"auto"`` and ``"sparse_sums"``.

    Attributes:
        buffers: memory that every step reuses, for all work on buckets.
        counts_slices: whether headers must hold the largest slice.
        has_shortcut: whether a single worker returns its selection as the average. If not, it executes the route, for
            warmups and for benchmarks on a single GPU.
    """

    has_shortcut: bool = True

    def __init__(
        self,
        mode: ExchangeMode,
        group: dist.ProcessGroup | None = None,
        link_gbit_s: float | None = None,
        workers: Workers | None = None,
        density: float | None = None,
    ) -> None:
        self.mode = mode
        self._density = density
        self.link_gbit_s = link_gbit_s
        self.workers = workers or Workers(group, dist.get_rank(group), dist.get_world_size(group))
        # The assumed link rate depends on whether all workers share a node.
        self._is_one_node = mode == "auto" and link_gbit_s is None and workers is None and is_one_node(self.workers)
        has_slices = mode == "auto" and self.workers.num_workers > 2
        self.counts_slices = has_slices or mode in ("reduce_scatter", "sparse_sums")
        if workers is None and self.workers.is_over_gloo:
            use_batch_scheduling()
            wait_for_threads_at_exit()
        self.buffers = Buffers()
        self._coalescer = PayloadCoalescer(link_gbit_s)
        self._forecasts: dict[str, dict[tuple[int, int], Forecast]] = {"selected": {}, "slices": {}, "unions": {}}
        self._transfers: list[Transfer] = []
        self._headers: list[Tensor] = []

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Return the history that determines routes and capacities; the same on all workers."""
        return {
            name: [[*key, *forecast] for key, forecast in forecasts.items()]
            for name, forecasts in self._forecasts.items()
        }

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Replace the history by that of another exchange with equally many workers."""
        for name, forecasts in self._forecasts.items():
            forecasts.clear()
            for bucket, num_elements, last, mean, deviation in state.get(name, []):
                forecasts[int(bucket), int(num_elements)] = Forecast(int(last), mean, deviation)

    def begin(self) -> None:
        """Discard an interrupted step."""
        if self._transfers:
            self.buffers.forget()  # pending messages still arrive in that memory
        self._transfers.clear()
        self._headers.clear()
        self._coalescer.waiting.clear()

    def new_transfer(
        self,
        bucket: int,
        wire: Wire,
        header_fields: int,
        out: Tensor,
        *,
        is_last: bool,
        is_full: bool = False,
        by_senders: bool = False,
    ) -> Transfer:
        """Return the bucket's transfer, for the caller to fill.

        Args:
            bucket: the bucket's position in DDP's order.
            wire: the form of values in the payload.
            header_fields: H of this bucket.
            out: float32 or float64, shape (d,): receives the average, the same bits on all workers.
            is_last: whether this is the last bucket of the step.
            is_full: whether this step sends all coordinates, as in a calibration. The bucket then takes the dense
                route, because payloads would need more memory and time, and forecasts ignore it.
            by_senders: whether the average of an element is over the workers that sent a value other than 0.
        """
        n, num_elements = self.workers.num_workers, out.numel()
        key = (bucket, num_elements)
        fields = sum(header.numel() for header in self._headers) + header_fields if is_last else 0
        payload_format = PayloadFormat(num_elements, wire, fields)
        common = (bucket, payload_format, out, self.workers, self.buffers, by_senders)
        if n == 1 and self.has_shortcut:
            return Transfer(*common)
        is_empty = num_elements == 0  # a payload of no bytes has no views
        fixed_bytes = payload_format.fixed_bytes - 8 * fields
        element = wire.dtype.itemsize + wire_of_sums(wire, out.dtype, n).dtype.itemsize if wire.is_quantised else 0
        costs = Costs(n, num_elements, wire.dtype.itemsize, out.itemsize, fixed_bytes, element)
        route = "dense" if is_full or is_empty else self._route(key, costs, on_gpu=out.device.type != "cpu")
        if route == "dense":
            dense = (QuantisedDenseTransfer if wire.is_quantised and not is_empty else DenseTransfer)(*common)
            dense.is_typical = not is_full
            return dense
        capacity = (self._expected(key) or Forecast.first(FIRST_CAPACITY)).capacity(num_elements)
        may_go_dense = costs if self.mode == "auto" and not by_senders else None
        if route == "gather":
            return GatherTransfer(*common, coalescer=self._coalescer, capacity=capacity, costs=may_go_dense)
        elements = slice_elements(num_elements, n)
        slices = self._forecasts["slices"].get(key, Forecast.first(UNEVEN_SLICES * capacity // n))
        union = self._forecasts["unions"].get(key)
        return ReduceScatterTransfer(
            *common,
            coalescer=self._coalescer,
            capacity=capacity,
            costs=may_go_dense,
            slice_capacity=slices.capacity(elements),
            union_capacity=None if union is None else union.capacity(elements),
            thresholds_sums=self.mode == "sparse_sums",
        )

    def start(self, transfer: Transfer, header: Tensor) -> None:
        """Issue the first collective of a transfer that the caller has filled.

        The header holds this worker's numbers of the bucket: float64, shape (H,); its first three fields are
        those of ``Largest``.
        """
        self._transfers.append(transfer)
        self._headers.append(header)
        is_last = transfer.format.header_fields > 0
        if is_last and type(transfer) is GatherTransfer:
            into = transfer.payload[: 8 * transfer.format.header_fields].view(torch.float64)
            assert into.numel() == sum(header.numel() for header in self._headers), "cat would write into other parts"
            torch.cat(self._headers, out=into)
        transfer.start()
        if is_last:
            self._coalescer.flush()

    def finish(self) -> tuple[list[Tensor], int, int]:
        """Complete the step: every ``out`` holds its average.

        Returns:
            For each bucket, all workers' headers in rank order: float64, shape (n, H), on the CPU; the bytes that a
            worker passed to collectives; and the number of elements in dense buckets.
        """
        transfers, lengths = self._transfers, [header.numel() for header in self._headers]
        local_sizes = [transfer.prepare() for transfer in transfers]
        numbers = [size.double().view(1) for size in local_sizes if size is not None]
        num_sizes = len(numbers)
        if type(transfers[-1]) is not GatherTransfer:
            numbers = self._headers + numbers
        wait_for_copy = copy_to_host(self._gather(numbers))
        for transfer in transfers:
            transfer.complete()
        table = wait_for_copy()
        headers = list(torch.split(table, [*lengths, num_sizes], dim=1)[:-1])
        # As Python's numbers, and for all buckets at once: operators on a few numbers in tensors take long.
        maxima = table.amax(0).tolist()
        sizes, starts = iter(maxima[sum(lengths) :]), accumulate(lengths, initial=0)
        for transfer, header, start, size in zip(transfers, headers, starts, local_sizes, strict=False):
            selected, of_slice, non_finite = map(int, maxima[start : start + 3])
            largest = Largest(selected, of_slice, non_finite, 0 if size is None else int(next(sizes)))
            transfer.second_round(largest, header)
            self._update_forecasts(transfer, largest)
        for transfer in transfers:
            transfer.finish()
        sent_bytes = sum(transfer.sent_bytes for transfer in transfers)
        if self.workers.num_workers > 1:
            sent_bytes += 8 * sum(part.numel() for part in numbers)
        dense_elements = sum(transfer.out.numel() for transfer in transfers if transfer.is_dense)
        self._transfers, self._headers = [], []
        self.buffers.end_step()
        return headers, sent_bytes, dense_elements

    def _route(self, key: tuple[int, int], costs: Costs, *, on_gpu: bool) -> Route:
        if self.mode in ("gather", "reduce_scatter", "dense"):
            return self.mode
        selected, slices = self._expected(key), self._forecasts["slices"].get(key)
        if selected is None:
            return "dense"
        if self.mode == "sparse_sums":
            return "reduce_scatter"
        largest_slice = UNEVEN_SLICES * selected.last / costs.num_workers if slices is None else slices.last
        known = speeds(self.link_gbit_s, on_gpu=on_gpu, is_one_node=self._is_one_node)
        return costs.cheapest(selected.last, largest_slice, known)

    def _expected(self, key: tuple[int, int]) -> Forecast | None:
        """Return the forecast of a bucket's selected coordinates, None if there is none."""
        first = None if self._density is None else Forecast.first(round(self._density * key[1]))
        return self._forecasts["selected"].get(key, first)

    def _update_forecasts(self, transfer: Transfer, largest: Largest) -> None:
        if not transfer.is_typical:
            return
        key, seen = (transfer.bucket, transfer.format.num_elements), {"selected": largest.selected}
        if self.counts_slices and transfer.payload is not None:
            seen["slices"] = largest.slice
        if isinstance(transfer, ReduceScatterTransfer):
            seen["unions"] = largest.size  # also a size beyond the capacity, for the next step
        for name, count in seen.items():
            self._forecasts[name][key] = self._forecasts[name].get(key, Forecast.first(0)).after(count)

    def _gather(self, numbers: list[Tensor]) -> Tensor:
        """Return all workers' headers and sizes on the device: float64, shape (n, sum of lengths + sizes).

        ``numbers`` holds this worker's sizes, and its headers unless the last bucket's payload carries them.
        """
        n, pending, gathered = self.workers.num_workers, Pending(), []
        if numbers:
            everyone = local = torch.cat(numbers)
            if n > 1:
                everyone = local.new_empty(n * local.numel())
                pending = self.workers.all_gather(everyone, local)
            gathered.append(everyone.view(n, -1))
        # Wait for transfers first: if one fails, another worker may never send its headers.
        for transfer in self._transfers:
            transfer.work.wait()
        last = self._transfers[-1]
        if type(last) is GatherTransfer:
            gathered.insert(0, last.headers())
        pending.wait()
        return torch.cat(gathered, 1) if len(gathered) > 1 else gathered[0]
