"""What of a parameter is in a flat bucket, and which share one, where that is ours to say."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, as DDP's buckets. A parameter is never cut, so one that is larger has a bucket of its own."""


def grouped(
    tensors: Mapping[str, Tensor], dtype_of: Callable[[Tensor], torch.dtype]
) -> dict[tuple[torch.dtype, torch.device], list[list[str]]]:
    """Returns the names of those that go together, by dtype and device, in the order given.

    Args:
        tensors: by name, in the same order on all workers.
        dtype_of: returns what a tensor's bucket holds.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
    for name, tensor in tensors.items():
        runs = groups.setdefault((dtype_of(tensor), tensor.device), [[]])
        room = BUCKET_ELEMENTS - sum(as_real(tensors[one]).numel() for one in runs[-1])
        if runs[-1] and as_real(tensor).numel() > room:
            runs.append([])
        runs[-1].append(name)
    return groups


def require_one_device(tensors: Mapping[str, Tensor]) -> None:
    """Raises where a process has its share of a model on several devices: all buckets' numbers travel together.

    Raises:
        ValueError: names the devices, and a parameter on each.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ValueError(
            f"The module's parameters are on several devices: {places}. Every process must have all on one. For a "
            "model that does not fit, see HSDPHardThresholdStrategy and shard_exchange."
        )


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """Returns float64 where a tensor is that or complex128, else float32, also for half precisions."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def as_real(tensor: Tensor) -> Tensor:
    """Returns a view with a last dimension of two more where the tensor is complex."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, detached: the memory itself. All of it, where it is not sharded."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()
