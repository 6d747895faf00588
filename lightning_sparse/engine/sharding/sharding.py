"""How a sharded model is divided: which ranks hold a replica together, and which exchange with each other."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.engine import Engine
from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.sharding.combined import of_all_shards
from lightning_sparse.engine.sharding.requirements import require_shards, shard_settings
from lightning_sparse.engine.sharding.resharded import reshard
from lightning_sparse.exchange import current_device, require_agreement
from lightning_sparse.exchange.agreement import differing
from lightning_sparse.exchange.groups import replica_workers


class Sharding:
    """The ranks of a model that ``fully_shard`` shards. Collective: all ranks make it at set-up.

    Args:
        module: the model.
        mesh: the dimension of replicas, one rank each, of a mesh of all ranks.
        settings: plain values by name that all ranks must agree on.

    Attributes:
        named: the parameters by name, as the module has them when they are sharded.
        device: this rank's.
        group: the ranks that hold the same shard as this rank, one per replica.
        is_alone: whether there is one replica, which has nothing to exchange.
        replica: the ranks that hold this rank's replica.
        place: of this rank among all, by which states saved per rank are told apart.

    Raises:
        TypeError: the mesh is none.
        ValueError: a mesh of several dimensions, or a module that is not sharded as it must be.
        RuntimeError: ranks disagree on the settings, or the mesh does not divide them into replicas (on every rank).
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
        reshard(module)
        require_shards(module, mesh)
        self.named = dict(module.named_parameters())
        self.device = local(next(iter(self.named.values()))).device
        self.group = mesh.get_group()
        self.is_alone = dist.get_world_size(self.group) == 1
        with current_device(self.device):
            # Shards are compared between ranks in the same place; all ranks are told where they differ.
            different = differing(shard_settings(self.named), self.group)
            require_agreement(settings | {"shards that differ between replicas": different})
            self.replica = replica_workers(self.group)
        self.place = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}

    def add_up(self, engine: Engine) -> None:
        """Have an engine report the numbers of the whole model. Not collective."""
        engine.of_whole_model = partial(of_all_shards, names=list(self.named), workers=self.replica, device=self.device)
