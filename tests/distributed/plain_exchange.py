"""The plain form of the exchange: short, synchronous, and what every faster form is tested against."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.payload import PayloadFormat
from lightning_sparse.sparsifiers import Selection


def plain_average(
    payload_format: PayloadFormat, selection: Selection, out: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Averages by gathering every worker's payload. Collective: one gather of sizes, one padded gather of payloads.

    Payloads are added in rank order and the indices of each are unique, so no two additions meet in one place at one
    time: every worker gets the same bits, with CUDA's atomic additions too.

    Args:
        payload_format: the format of the bucket's payload.
        selection: what this worker sends.
        out: float32 or float64, shape (payload_format.num_elements,); overwritten with the average.
        group: the process group; None is the default group.
    """
    num_workers = dist.get_world_size(group)
    payload = packed(payload_format, selection)
    sizes = torch.zeros(num_workers, 1, dtype=torch.int64, device=payload.device)
    dist.all_gather(list(sizes.unbind()), sizes.new_tensor([payload.numel()]), group=group)
    size_of_rank: list[int] = sizes.flatten().tolist()
    # Gloo refuses payloads of unequal size and NCCL turns them into a broadcast each: pad to the largest.
    largest = max(size_of_rank)
    padded = torch.nn.functional.pad(payload, (0, largest - payload.numel()))
    gathered = [torch.empty_like(padded) for _ in range(num_workers)]
    dist.all_gather(gathered, padded, group=group)
    out.zero_()
    for received, size in zip(gathered, size_of_rank, strict=True):
        indices, values = payload_format.unpack(received[:size], out.dtype)
        out.index_add_(0, indices, values)
    out.div_(num_workers)


def packed(payload_format: PayloadFormat, selection: Selection) -> Tensor:
    """Returns a payload just large enough: uint8, shape (payload_bytes(k),), on the selection's device."""
    num_bytes = payload_format.payload_bytes(selection.indices.numel())
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=selection.indices.device)
    payload_format.fill(payload, selection)
    return payload
