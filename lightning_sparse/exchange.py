"""How a selection travels: every worker's payload becomes the same averaged gradient on every worker.

The only module that issues collectives. Each function that does says so: every worker must call it, for the same
buckets in the same order, from the body of DDP's communication hook and from nowhere else. (Gloo matches collectives
by order, and one issued in a future's callback runs in whatever order the callbacks happen to run.)
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.payload import PayloadFormat
from lightning_sparse.sparsifiers import Selection

ExchangeMode = Literal["auto", "gather", "dense"]
EXCHANGE_MODES: tuple[ExchangeMode, ...] = ("auto", "gather", "dense")


class Exchanged(NamedTuple):
    """What comes back from the exchange of one bucket, beside the average itself.

    Attributes:
        headers: float64, shape (n, H): every worker's header, in rank order, the same on all workers.
        payload_bytes: bytes that this worker handed to collectives; the same on all workers.
    """

    headers: Tensor
    payload_bytes: int


class Exchange:
    """Averages sparse buckets over the workers of a process group.

    Args:
        mode: ``"gather"`` sends indices and values to all (:func:`gather_average`), ``"dense"`` all-reduces the
            selected values in a buffer of the bucket's size (:func:`dense_average`), ``"auto"`` takes for each bucket
            and step the one that brings fewer bytes to a worker, judged by what was selected the step before; a bucket
            without a history, as in the first step, goes dense.
        group: the process group; None is the default group.
    """

    def __init__(self, mode: ExchangeMode, group: dist.ProcessGroup | None = None) -> None:
        self.mode = mode
        self.group = group
        self.num_workers = dist.get_world_size(group)
        self._largest_selection: dict[tuple[int, int], int] = {}

    def average(
        self, bucket: int, payload_format: PayloadFormat, selection: Selection, header: Tensor, out: Tensor
    ) -> Exchanged:
        """Writes (1/n) Σ_i out_i into ``out``. Collective: every worker calls this for the same bucket.

        Args:
            bucket: the bucket's place in DDP's order.
            payload_format: the format of its payload, the same on all workers.
            selection: what this worker sends, rounded to the wire dtype.
            header: float64, shape (H,): this worker's statistics.
            out: float32 or float64, shape (payload_format.num_elements,); overwritten. The same bits on all workers.
        """
        average = gather_average if self._gathers(bucket, payload_format, out) else dense_average
        return average(payload_format, selection, header, out, self.group)

    def remember(self, bucket: int, num_elements: int, largest_selection: int) -> None:
        """Notes the largest number of coordinates that any worker selected of a bucket in the step that ends."""
        self._largest_selection[bucket, num_elements] = largest_selection

    def _gathers(self, bucket: int, payload_format: PayloadFormat, out: Tensor) -> bool:
        if self.mode != "auto":
            return self.mode == "gather"
        expected = self._largest_selection.get((bucket, payload_format.num_elements))
        if expected is None:
            return False
        # Bytes that reach one worker: the payloads of the others, or what a ring all-reduce brings it.
        gathered = (self.num_workers - 1) * payload_format.payload_bytes(expected)
        reduced = 2 * (self.num_workers - 1) / self.num_workers * out.numel() * out.itemsize
        return gathered <= reduced


def gather_average(
    payload_format: PayloadFormat,
    selection: Selection,
    header: Tensor,
    out: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Exchanged:
    """Averages by gathering every worker's payload. Collective: one gather of sizes, one padded gather of payloads.

    The plain form of the exchange, against which faster ones are tested. Payloads are added in rank order and the
    indices of each are unique, so no two additions meet in one place at one time: every worker gets the same bits,
    with CUDA's atomic additions too.

    Args:
        payload_format: the format of the bucket's payload.
        selection: what this worker sends.
        header: float64, shape (H,).
        out: float32 or float64, shape (payload_format.num_elements,); overwritten with the average.
        group: the process group; None is the default group.
    """
    num_workers = dist.get_world_size(group)
    payload = payload_format.pack(header, selection)
    if num_workers == 1:
        payloads, sent_bytes = [payload], payload.numel()
    else:
        sizes = torch.zeros(num_workers, 1, dtype=torch.int64, device=payload.device)
        dist.all_gather(list(sizes.unbind()), sizes.new_tensor([payload.numel()]), group=group)
        size_of_rank: list[int] = sizes.flatten().tolist()
        # Gloo refuses payloads of unequal size and NCCL turns them into a broadcast each: pad to the largest.
        largest = max(size_of_rank)
        padded = torch.nn.functional.pad(payload, (0, largest - payload.numel()))
        gathered = [torch.empty_like(padded) for _ in range(num_workers)]
        dist.all_gather(gathered, padded, group=group)
        payloads = [received[:size] for received, size in zip(gathered, size_of_rank, strict=True)]
        sent_bytes = largest + sizes.itemsize
    out.zero_()
    for received in payloads:
        indices, values = payload_format.unpack(received, out.dtype)
        out.index_add_(0, indices, values)
    out.div_(num_workers)
    return Exchanged(torch.stack([payload_format.header(received) for received in payloads]), sent_bytes)


def dense_average(
    payload_format: PayloadFormat,
    selection: Selection,
    header: Tensor,
    out: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Exchanged:
    """Averages by all-reducing the selected values as a masked gradient. Collective: one all-reduce, one gather.

    The same meaning as :func:`gather_average` at dense cost: what was not selected travels as zeros. The order of the
    additions is the all-reduce's own, the same for every worker.

    Args:
        payload_format: the format that the payload would have.
        selection: what this worker sends.
        header: float64, shape (H,).
        out: float32 or float64, shape (payload_format.num_elements,); overwritten with the average.
        group: the process group; None is the default group.
    """
    num_workers = dist.get_world_size(group)
    out.zero_()
    out[selection.indices] = selection.values
    headers = header.new_empty(num_workers, payload_format.header_fields)
    if num_workers == 1:
        headers[0] = header
    else:
        dist.all_reduce(out, group=group)
        dist.all_gather(list(headers.unbind()), header, group=group)
        out.div_(num_workers)
    return Exchanged(headers, out.numel() * out.itemsize + header.numel() * header.itemsize)


def require_agreement(settings: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raises on every worker if the workers' settings differ. Collective: every worker calls this at set-up.

    Args:
        settings: plain values by name.
        group: the process group; None is the default group.

    Raises:
        RuntimeError: names every setting that differs, with the value of each rank.
    """
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, settings, group=group)
    names = sorted({name for one in gathered for name in one})
    differing = [name for name in names if any(one.get(name) != gathered[0].get(name) for one in gathered)]
    if differing:
        lines = [
            f"  {name}: " + ", ".join(f"rank {rank}: {one.get(name)!r}" for rank, one in enumerate(gathered))
            for name in differing
        ]
        raise RuntimeError(
            "The workers disagree on how gradients are exchanged. Start all of them with the same model, settings and "
            "versions. What differs:\n" + "\n".join(lines)
        )
