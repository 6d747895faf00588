"""Who holds one replica of a sharded model together."""

from collections.abc import Sequence
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from lightning_sparse.exchange.workers import Workers, new_group


def replica_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of all ranks, as ``init_device_mesh`` does. Collective: world.

    That gives its groups torch's own timeout of half an hour; these have the world's.

    Args:
        device_type: of its devices.
        shape: ranks along each dimension.
        names: of the dimensions.
    """
    ranks = torch.arange(dist.get_world_size()).view(shape)
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    seed: list[object] = [uuid4().hex]
    dist.broadcast_object_list(seed)
    groups = []
    for dimension, name in enumerate(names):
        line = ranks[tuple(slice(None) if one == dimension else at for one, at in enumerate(place))]
        groups.append(new_group(None, line.tolist(), f"lightning_sparse/{seed[0]}/{name}"))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def replica_workers(between: dist.ProcessGroup) -> Workers:
    """Returns the ranks that hold this worker's replica, as workers in a group of their own. Collective: world.

    In an order of ranks that all replicas have: by the shards that they hold.

    Args:
        between: the ranks, one of each replica, that hold the same shard as this one.

    Raises:
        RuntimeError: the groups of all ranks do not make up replicas (on every rank).
    """
    everyone: list[tuple[list[int], str]] = [([], "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (dist.get_process_group_ranks(between), uuid4().hex))
    groups = sorted({tuple(ranks) for ranks, _ in everyone})
    if len({len(ranks) for ranks in groups}) > 1 or sum(map(len, groups)) != len(everyone):
        raise RuntimeError(
            f"The mesh does not divide {len(everyone)} ranks into replicas: those that hold the same shard would be "
            f"{groups}. Give the dimension of replicas of one mesh of all ranks, mesh['replicate']."
        )
    ranks = [ranks[dist.get_rank(between)] for ranks in groups]
    if len(ranks) == 1:
        return Workers(None, 0, 1)
    _, name = everyone[0]
    group = new_group(between, ranks, f"lightning_sparse/replica {name}")
    return Workers(group, ranks.index(dist.get_rank()), len(ranks))


def end_group(workers: Workers) -> None:
    """Ends the group of ``replica_workers``, if it has one that has not ended with the world's."""
    if workers.group in _world.pg_map:
        dist.destroy_process_group(workers.group)


def summed(numbers: Sequence[float], workers: Workers, device: torch.device) -> list[float]:
    """Returns the sums of all workers' numbers, added in rank order: the same bits for the same numbers. Collective.

    Args:
        numbers: this worker's, as many on all.
        workers: of whom.
        device: on which the group works.
    """
    if workers.num_workers == 1:
        return list(numbers)
    own = torch.tensor(numbers, dtype=torch.float64).to(device)
    everyone = own.new_empty(workers.num_workers * own.numel())
    workers.all_gather(everyone, own).wait()
    total: list[float] = everyone.view(workers.num_workers, -1).sum(0).tolist()
    return total
