"""Converts flat shards to distributed tensors and full tensors, and writes and reads checkpoint folders.

A tensor with its parameter's layout can be read with any other sharding.
"""

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from lightning_sparse.exchange.agreement import gather_objects
from lightning_sparse.exchange.workers import as_real


def like_parameter(parameter: Tensor, flat: Tensor) -> Tensor:
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


def write_folder(tree: dict[str, Any], folder: Path) -> dict[str, int]:
    """Write nested dicts of tensors into a folder, each rank its parts. Every rank calls this.

    Return the CRC-32 of every file by its name.
    """
    state_dict_saver.save(tree, checkpoint_id=folder)
    rank = dist.get_rank()
    own = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    return dict(ChainMap(*gather_objects({file.name: _crc(file) for file in own})))


def changed(folder: Path, crcs: Mapping[str, int]) -> str | None:
    """Return the name of a changed file, or None. Not collective.

    Each rank checks its share of the files and ignores missing ones.
    """
    own = [name for name in sorted(crcs)[dist.get_rank() :: dist.get_world_size()] if (folder / name).exists()]
    return next((name for name in own if _crc(folder / name) != crcs[name]), None)


def _crc(file: Path) -> int:
    return crc32(torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8).numpy().data)  # memory-mapped


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
    """Return the shape of every tensor in a folder by its path, such as ``"0.unsent.fc.weight"``. Not collective."""
    known = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {path: getattr(entry, "size", torch.Size()) for path, entry in known.items()}
