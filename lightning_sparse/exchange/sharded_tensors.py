"""Converts flat shards to distributed tensors and full tensors, and writes and reads checkpoint folders.

A tensor with its parameter's layout can be read with any other sharding.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only


def like_parameter(parameter: Tensor, flat: Tensor) -> Tensor:
    """Return this rank's flat part, in the order of the shard's indices, as a tensor sharded like the parameter.

    Without sharding return the flat tensor itself. Not collective.
    """
    if not isinstance(parameter, DTensor):
        return flat
    return DTensor.from_local(
        flat.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tree: Any) -> Any:
    """Return nested containers with full tensors instead of sharded ones. Collective for their ranks."""
    return tree_map_only(DTensor, DTensor.full_tensor, tree)


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


def read_folder(tree: dict[str, Any], folder: Path) -> str | None:
    """Read tensors in place from a folder that all ranks have written. Every rank calls this.

    Return None, or the reason for a failure, which is the same on every rank.
    """
    try:
        state_dict_loader.load(tree, checkpoint_id=folder)
    except CheckpointException as error:  # torch raises it on all ranks
        reason, _ = next(iter(error.failures.values()))
        return str(reason)
    return None


def shapes_in_folder(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a folder by its path, such as ``"0.residual.weight"``. Not collective."""
    known = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {path: getattr(entry, "size", torch.Size()) for path, entry in known.items()}
