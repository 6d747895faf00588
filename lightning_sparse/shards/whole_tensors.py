"""Shards as what they are shards of: distributed tensors, which any other sharding can be read from."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_sparse.engine.grouping import local


def like_parameter(parameter: Tensor, flat: Tensor) -> Tensor:
    """Returns this rank's part of something as large as a parameter, sharded as that is. Not collective.

    Args:
        parameter: the parameter.
        flat: the part, in the order of the shard's indices, shape (elements of the shard,).
    """
    held = flat.view(local(parameter).shape)
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor that is sharded, on every rank that holds a part. Collective for these."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """Returns this rank's part of something as large as a parameter, flat, on its device. Not collective.

    Args:
        parameter: the parameter.
        full: all of it, of the parameter's shape.
    """
    full = full.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return full.flatten()
    mesh = parameter.device_mesh
    held = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(held.redistribute(placements=parameter.placements)).flatten()
