"""Converts flat shards to distributed tensors and full tensors, and writes and reads checkpoint folders.

A tensor with its parameter's layout can be read with any other sharding.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from lightning_sparse.exchange.workers import as_real


def sharded_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a flat local part as a DTensor sharded like the parameter.

    The part has the order of the shard's indices, with two numbers per complex element, which become a last dimension.
    Without sharding, returns ``flat`` itself. Not collective.
    """
    if not isinstance(parameter, DTensor):
        return flat
    shape, stride = parameter.shape, parameter.stride()
    if parameter.is_complex():
        shape, stride = torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
    return DTensor.from_local(
        flat.view(as_real(parameter.to_local()).shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def full_tensors(tree: Any, *, on_cpu: bool = False) -> Any:
    """Return nested containers with full instead of sharded tensors. Collective.

    ``on_cpu`` copies each full tensor to the CPU before the next one is gathered.
    """
    return tree_map_only(DTensor, lambda shard: shard.full_tensor().cpu() if on_cpu else shard.full_tensor(), tree)


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """Return this rank's flat part of a full tensor, on the parameter's device. Not collective.

    Both are in the order of the parameter's indices.
    """
    full = full.to(parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device)
    if not isinstance(parameter, DTensor):
        return full.flatten()
    mesh = parameter.device_mesh
    held = DTensor.from_local(full.view(parameter.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return held.redistribute(placements=parameter.placements).to_local().detach().flatten()


def write_folder(tree: dict[str, Any], folder: Path) -> None:
    """Write nested dicts of tensors into a folder, each rank its parts. Every rank calls this."""
    state_dict_saver.save(tree, checkpoint_id=folder)


def read_folder(tree: dict[str, Any], folder: Path) -> None:
    """Read tensors in place from a folder that all ranks have written. Every rank calls this.

    Raises:
        RuntimeError: on every rank, a file is missing or damaged.
    """
    try:
        state_dict_loader.load(tree, checkpoint_id=folder)
    except CheckpointException as error:  # torch raises it on all ranks
        reason, _ = next(iter(error.failures.values()))
        raise _unreadable(folder, reason) from error


def shapes_in_folder(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a folder by its path, such as ``"0.unsent.fc.weight"``. Not collective.

    Raises:
        RuntimeError: the file of the metadata is missing or damaged.
    """
    try:
        known = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, EOFError, UnpicklingError) as error:
        raise _unreadable(folder, error) from error
    return {path: getattr(entry, "size", torch.Size()) for path, entry in known.items()}


def _unreadable(folder: Path, reason: object) -> RuntimeError:
    return RuntimeError(
        f"lightning_sparse cannot resume: the folder {str(folder)!r} cannot be read ({reason!r}). Resume from another "
        "checkpoint, or delete the folder to continue without the workers' residuals or drifts."
    )
