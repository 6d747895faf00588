"""What of a parameter is in a flat bucket: its local part, as real numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
