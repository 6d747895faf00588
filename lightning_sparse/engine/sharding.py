"""Requirements, replicas and statistics of models that FSDP2 shards."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.step_stats import LayerStats, StepStats
from lightning_sparse.exchange.agreement import differing, parameter_settings, require_agreement
from lightning_sparse.exchange.groups import replica_workers
from lightning_sparse.selection.statistics import STATISTICS, combined

OF_STEP = [statistic for statistic in STATISTICS if statistic.shards]
OF_LAYER = [statistic for statistic in OF_STEP if statistic.per_layer]


class Sharding:
    """The ranks of a model that ``fully_shard`` shards. Collective: all ranks.

    Args:
        module: the model.
        mesh: the dimension of replicas, one rank per replica, of a mesh of all ranks.
        settings: plain values by name that must be equal on all ranks, as well as the parameters' shapes and dtypes.

    Attributes:
        named: the sharded parameters by name.
        device: the device of this rank.
        group: the ranks that hold the same shard as this rank, one per replica.
        replica: the ranks that hold this rank's replica.
        place: this rank and the number of all ranks, which identify saved states.

    Raises:
        TypeError: the mesh is not a DeviceMesh.
        ValueError: the mesh has several dimensions, or the module's sharding is not supported.
        RuntimeError: settings differ between ranks, or the mesh does not divide ranks into replicas (on every rank).
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
        reshard(module)
        _require_shards(module, mesh)
        self.named = dict(module.named_parameters())
        self.device = local(next(iter(self.named.values()))).device
        self.group = mesh.get_group()
        shards = {f"shard of {name}": f"{list(local(p).shape)}, {p.dtype}" for name, p in self.named.items()}
        with torch.accelerator.device_index(self.device.index):
            self.replica = replica_workers(self.group)
            # Ranks of a replica hold different shards. Compare those between replicas, and report them on all ranks.
            different = {name: shards[name] for name in differing(shards, self.group)}
            require_agreement(parameter_settings(module) | settings | different)
        self.place = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}

    def combine_shards(self, own: StepStats) -> StepStats:
        """Return the statistics of the whole model. Collective: every rank of the replica calls this.

        The bytes are those that all ranks of the replica pass to collectives between replicas. If several ranks hold
        copies of a parameter, as under tensor parallelism, it counts once per copy.
        """
        if self.replica.num_workers == 1:
            return own
        names = list(self.named) if own.layers else []
        layers = [own.layers.get(name, LayerStats(own.num_workers, 0, 0, 0.0)) for name in names]
        values = [getattr(own, statistic.name) for statistic in OF_STEP]
        values += [getattr(layer, statistic.name) for layer in layers for statistic in OF_LAYER]
        rows = self.replica.gather_numbers(values, self.device)
        totals = iter(combined(rows, OF_STEP + OF_LAYER * len(layers)))
        of_step = {statistic.name: next(totals) for statistic in OF_STEP}
        whole = [replace(layer, **{statistic.name: next(totals) for statistic in OF_LAYER}) for layer in layers]
        trained = {name: layer for name, layer in zip(names, whole, strict=True) if layer.num_elements}  # not frozen
        return replace(own, **of_step, layers=trained)


def _require_shards(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if gradients would be averaged over too many or too few ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"Invalid group={mesh!r}. Must be a DeviceMesh, mesh['replicate'] for example.")
    if mesh.ndim != 1:
        raise ValueError(
            f"Invalid group={mesh!r}. Must be the dimension of replicas alone, mesh['replicate'] for example."
        )
    named = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("The module has no parameter that requires a gradient: there is nothing to average.")
    between = dist.get_process_group_ranks(mesh.get_group())
    num_ranks = dist.get_world_size() // len(between)
    is_distributed = any(isinstance(parameter, DTensor) for parameter in named.values())  # tensor parallelism, perhaps
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    # With tensor parallelism some parameters may be on one rank each.
    if num_ranks > 1 and {p.device_mesh.size() for p in named.values() if isinstance(p, DTensor)} == {1}:
        raise ValueError(
            f"All parameters are sharded over one rank, but a replica has {num_ranks} ranks. Pass the mesh of a "
            "replica, mesh['shard'], to fully_shard, and the mesh of replicas, mesh['replicate'], to the exchange."
        )
    for name, parameter in named.items():
        if local(parameter).is_meta:
            raise ValueError(
                f"{name} is on the meta device. Call model.to_empty(device=…) and initialise it before the exchange."
            )
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.device_type != local(parameter).device.type:
                raise ValueError(
                    f"{name} is on the {local(parameter).device.type}, but its mesh is of "
                    f"{parameter.device_mesh.device_type}: offloaded gradients cannot be exchanged. Remove "
                    "CPUOffloadPolicy."
                )
            common = set(parameter.device_mesh.mesh.flatten().tolist()) & set(between)
            if len(common) > 1:
                raise ValueError(
                    f"{name} is sharded over ranks of several replicas ({sorted(common)} hold the same shard). Pass "
                    "the mesh of one replica, mesh['shard'] (with the strategy self.device_mesh['data_parallel']), to "
                    "fully_shard, and the mesh of replicas, mesh['replicate'], to the exchange."
                )
        elif num_ranks > 1 and parameter.requires_grad and (is_sharded or not is_distributed):
            raise ValueError(
                f"{name} is not sharded, so its gradient would not be averaged inside a replica. Call "
                "fully_shard(model, mesh=…) on the whole model too, after its blocks and before the exchange."
            )


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that the module shows its shards.

    FSDP2 keeps the outermost module's gathered parameters after a forward without a backward. A later forward would
    ignore values that were written to the shards.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class Resharded(nn.Module):
    """A view of a sharded model that always shows its shards between steps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = [module]  # in a list: a child's name would be a prefix of all names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters, after ``reshard``."""
        reshard(self._of[0])
        return self._of[0].named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's buffers."""
        return self._of[0].named_buffers(*args, **kwargs)
