"""What a model must be so that the gradients of its shards can be averaged between replicas."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sparse.engine.grouping import local


def shard_settings(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns what must be the same of the shards of all ranks in the same place, as settings."""
    return {f"shard of {name}": f"{list(local(one).shape)}, {one.dtype}" for name, one in named.items()}


def require_shards(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raises ValueError where gradients would be averaged over too many ranks, or over too few.

    Args:
        module: the model.
        mesh: of replicas.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"Expected a mesh, mesh['replicate'] for example, got {mesh!r}.")
    if mesh.ndim != 1:
        raise ValueError(
            f"Expected the dimension of replicas alone, mesh['replicate'] for example, got a mesh of {mesh.ndim} "
            f"dimensions: {mesh.mesh_dim_names}."
        )
    named = dict(module.named_parameters())
    if not any(one.requires_grad for one in named.values()):
        raise ValueError("The module has no parameter that requires a gradient: there is nothing to average.")
    between = dist.get_process_group_ranks(mesh.get_group())
    num_ranks = dist.get_world_size() // len(between)
    is_distributed = any(isinstance(one, DTensor) for one in named.values())  # by tensor parallelism alone, perhaps
    is_sharded = any(isinstance(one, FSDPModule) for one in module.modules())
    for name, one in named.items():
        if local(one).is_meta:
            raise ValueError(
                f"{name} is on no device (meta). Call model.to_empty(device=…) and initialise it before this."
            )
        if isinstance(one, DTensor):
            if one.device_mesh.device_type != local(one).device.type:
                raise ValueError(
                    f"{name} is on the {local(one).device.type}, and its mesh is of {one.device_mesh.device_type}: "
                    "gradients that are offloaded cannot be exchanged. Leave CPUOffloadPolicy out."
                )
            also = set(one.device_mesh.mesh.flatten().tolist()) & set(between)
            if len(also) > 1:
                raise ValueError(
                    f"{name} is sharded over ranks of several replicas ({sorted(also)} hold the same shard). Give "
                    "fully_shard the mesh of one replica, mesh['shard'] (with the strategy "
                    "self.device_mesh['data_parallel']), and what exchanges that of replicas, mesh['replicate']."
                )
        elif num_ranks > 1 and one.requires_grad and (is_sharded or not is_distributed):
            raise ValueError(
                f"{name} is not sharded, so that its gradient would not be averaged inside a replica. Call "
                "fully_shard(model, mesh=…) on the whole model too, after its blocks and before this."
            )
