"""Process groups that the package creates."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _world

from lightning_sparse.exchange.agreement import gather_objects
from lightning_sparse.exchange.workers import Workers

_T = TypeVar("_T")
_c10d: Any = dist.distributed_c10d
_users: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""Number of open exchanges per group."""
_cache_by_world: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], Any]]" = WeakKeyDictionary()
"""Meshes and groups by world, because a group and its threads last as long as its world."""


class _SerialGloo(getattr(dist, "ProcessGroupGloo", object)):  # type: ignore[misc]
    """Gloo with one thread for collectives instead of two.

    HACK: with two threads, gathering a DTensor corrupts the heap in rare cases. In ``ProcessGroupGloo::runLoop``, each
    thread assigns the name of its completed collective to ``pgStatus_->lastCompletedWorkName`` without a lock (torch
    2.13 and 2.15). If the kernel interrupts a thread there until the other has completed the next collective, both free
    the old name. Names of at most 15 characters are not on the heap. DTensor's ``ALLGATHER_COALESCED`` is.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        gloo: Any = dist.ProcessGroupGloo
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
        options._timeout, options._threads = timeout, 1
        for name, value in others.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def new_group(
    parent: dist.ProcessGroup | None, global_ranks: list[int], name: str, *, is_serial: bool = False
) -> dist.ProcessGroup:
    """Return a new group of these ranks with the parent's timeout. Collective for these ranks only.

    All ranks pass the same new name, the prefix of the group's keys in the store. Groups whose ranks gather DTensors
    are serial: Gloo runs one collective at a time (``_SerialGloo``).
    """
    world = dist.group.WORLD
    assert world is not None
    backend, store = _world.pg_map[world]
    group = parent or world
    device = torch.device("cuda" if torch.device("cuda") in group._device_types else "cpu")
    # None is torch's default, for a backend without a readable timeout.
    timeout: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    # Up to torch 2.14 (pull request 189073), a group reuses the keys of an ended group with the same ranks. Workers
    # would find outdated addresses there and wait for each other forever.
    _world.pg_map[world] = (backend, PrefixStore(name, store))
    gloo = getattr(dist, "ProcessGroupGloo", None)
    try:
        if is_serial:
            _c10d.ProcessGroupGloo = _SerialGloo  # torch ignores pg_options for Gloo
        made = dist.new_group(global_ranks, timeout=timeout, use_local_synchronization=True)
    finally:
        _world.pg_map[world] = (backend, store)
        _c10d.ProcessGroupGloo = gloo
    assert isinstance(made, dist.ProcessGroup)  # torch returns a number to non-members
    return made


def new_workers(parent: dist.ProcessGroup | None, global_ranks: list[int], name: str) -> Workers:
    """Return these ranks as workers in a ``new_group``. Collective for these ranks only."""
    group = new_group(parent, global_ranks, name)
    return Workers(group, dist.get_rank(group), len(global_ranks))


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group, unless the end of its world has done so."""
    if group in _world.pg_map:
        dist.destroy_process_group(group)


class OwnGroup:
    """Gives a group to its first user and new groups to others.

    Gloo matches messages by their order. If two exchanges used one Gloo group in different orders, messages of equal
    sizes would be mixed up, and others would abort the process without a Python error. In separate groups, the
    exchanges wait for each other until the timeout.

    Collective: all ranks create and release these objects in the same order.

    Args:
        group: the process group; None is the default group.

    Attributes:
        group: the group to use.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        given = dist.group.WORLD if group is None else group
        assert given is not None
        self.group = group
        self._given, self._is_released = given, False
        self._is_new = _users.get(given, 0) > 0 and dist.get_world_size(group) > 1
        _users[given] = _users.get(given, 0) + 1
        if self._is_new:
            name = gather_objects(uuid4().hex, group)[0]
            self.group = new_group(group, dist.get_process_group_ranks(given), f"lightning_sparse/exchange {name}")

    def release(self) -> None:
        """Release the group for the next user. This user takes no more steps, but may save. Idempotent."""
        if not self._is_released:
            _users[self._given] -= 1
        self._is_released = True

    def close(self) -> None:
        """Release the group, and destroy it if this object created it. Idempotent."""
        self.release()
        if self._is_new:
            end_group(self.group)
        self._is_new = False


def is_one_node(workers: Workers) -> bool:
    """Return whether all workers share a node. Collective.

    The workers of a node have the same host name and, if the launcher sets it (torchrun's GROUP_RANK, Lightning's
    NODE_RANK), the same node rank.
    """
    node = socket.gethostname(), os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", ""))
    return workers.num_workers == 1 or len(set(gather_objects(node, workers.group))) == 1


def replica_mesh(device_type: str, *shape: int) -> DeviceMesh:
    """Return a mesh of all ranks. Collective: every rank calls this.

    ``shape`` has the sizes of the dimensions "replicate", "data_parallel" and "tensor_parallel". Equal arguments return
    the same mesh. Its groups have the world's timeout, not torch's default of half an hour as in ``init_device_mesh``.
    """
    names = ("replicate", "data_parallel", "tensor_parallel")

    def make() -> DeviceMesh:
        ranks = torch.arange(dist.get_world_size()).view(shape)
        coordinates = (ranks == dist.get_rank()).nonzero()[0].tolist()
        seed = gather_objects(uuid4().hex)[0]
        groups = []
        for dimension, name in enumerate(names):
            index = tuple(slice(None) if axis == dimension else at for axis, at in enumerate(coordinates))
            name = f"lightning_sparse/{seed}/{name}"
            groups.append(new_group(None, ranks[index].tolist(), name, is_serial=dimension > 0))
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)

    return _once((device_type, shape), make)


def replica_workers(between: dist.ProcessGroup) -> Workers:
    """Return the ranks of this worker's replica. Collective: every rank.

    Equal positions in replicas hold the same shard.

    Args:
        between: the ranks, one per replica, that hold this worker's shard.

    Raises:
        RuntimeError: the groups of all ranks do not form replicas (on every rank).
    """
    members = gather_objects((dist.get_process_group_ranks(between), uuid4().hex))
    groups = sorted({tuple(ranks) for ranks, _ in members})
    is_even = len({len(ranks) for ranks in groups}) == 1 and sum(map(len, groups)) == len(members)
    if not is_even or any(list(ranks) != sorted(ranks) for ranks in zip(*groups, strict=True)):
        raise RuntimeError(
            f"The mesh does not divide {len(members)} ranks into replicas of ascending ranks: the ranks with equal "
            f"shards would be {groups}. Give the replica dimension of a mesh of all ranks, such as mesh['replicate'] "
            "of init_device_mesh."
        )
    ranks = [ranks[dist.get_rank(between)] for ranks in groups]
    if len(ranks) == 1:
        return Workers(None, 0, 1)
    name = f"lightning_sparse/replica {members[0][1]}"
    return _once(("replica", tuple(groups)), partial(new_workers, between, ranks, name))


def _once(kind: tuple[Any, ...], make: Callable[[], _T]) -> _T:
    """Return the same object for the same kind in the same world, so that later trainings reuse groups."""
    assert dist.group.WORLD is not None
    cache = _cache_by_world.setdefault(dist.group.WORLD, {})
    if kind not in cache:
        cache[kind] = make()
    return cache[kind]  # type: ignore[no-any-return]
