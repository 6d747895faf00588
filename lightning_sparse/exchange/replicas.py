"""Who holds one replica of a sharded model together."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.exchange.workers import Workers, new_group

_T = TypeVar("_T")
_made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""What was made with groups, and of which world each is: a group, with its threads, lasts as long as that."""


def _once(kind: tuple[Any, ...], make: Callable[[], _T]) -> _T:
    """Returns the same for the same kind in the same world: a training after another needs no groups of its own."""
    world = dist.group.WORLD
    if kind not in _made or _made[kind][0]() is not world:
        made = make()
        _made[kind] = weakref.ref(world), made
    return _made[kind][1]  # type: ignore[no-any-return]


def replica_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of all ranks, as ``init_device_mesh`` does; the same for the same. Collective: world.

    That gives its groups torch's own timeout of half an hour; these have the world's.

    Args:
        device_type: of its devices.
        shape: ranks along each dimension.
        names: of the dimensions.
    """
    return _once((device_type, shape, names), partial(_new_mesh, device_type, shape, names))


def _new_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).view(shape)
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    seed: list[object] = [uuid4().hex]
    dist.broadcast_object_list(seed)
    groups = []
    for dimension, name in enumerate(names):
        line = ranks[tuple(slice(None) if axis == dimension else at for axis, at in enumerate(place))]
        groups.append(new_group(None, line.tolist(), f"lightning_sparse/{seed[0]}/{name}"))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def replica_workers(between: dist.ProcessGroup) -> Workers:
    """Returns the ranks that hold this worker's replica, as workers in a group for that. Collective: world.

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
    name = f"lightning_sparse/replica {everyone[0][1]}"
    group = _once(("replica", tuple(groups)), partial(new_group, between, ranks, name))
    return Workers(group, ranks.index(dist.get_rank()), len(ranks))


def summed(numbers: Sequence[float], workers: Workers, device: torch.device) -> list[float]:
    """Returns the sums of all workers' numbers, added in rank order: the same bits for the same numbers. Collective.

    Args:
        numbers: this worker's, as many on all.
        workers: of whom.
        device: on which the group works.
    """
    total: list[float] = everyones(numbers, workers, device).sum(0).tolist()
    return total


def largest(number: float, workers: Workers, device: torch.device) -> float:
    """Returns the largest of all workers' numbers. Collective.

    Args:
        number: this worker's.
        workers: of whom.
        device: on which the group works.
    """
    return float(everyones([number], workers, device).max())


def everyones(numbers: Sequence[float], workers: Workers, device: torch.device) -> Tensor:
    """Returns all workers' numbers: float64, shape (n, numbers), on the CPU. Collective.

    Args:
        numbers: this worker's, as many on all.
        workers: of whom.
        device: on which the group works.
    """
    own = torch.tensor(numbers, dtype=torch.float64)
    if workers.num_workers == 1:
        return own.view(1, -1)
    own = own.to(device)
    everyone = own.new_empty(workers.num_workers * own.numel())
    workers.all_gather(everyone, own).wait()
    return everyone.view(workers.num_workers, -1).cpu()
