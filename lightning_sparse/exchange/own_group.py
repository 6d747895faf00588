"""A process group for each exchange, so that the messages of two that step in different order never meet."""

from uuid import uuid4
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from lightning_sparse.exchange.workers import new_group

_users: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""How many open exchanges use each group."""


class OwnGroup:
    """The given process group for its first user, and a new group of the same ranks for each further one.

    Gloo aborts a process that receives a message of another size than it expects, without a Python error; messages of
    the same size would be mixed up. In groups of their own such exchanges wait for each other until the timeout.
    Collective: all ranks of the group make and release their users in the same order.

    Args:
        group: the process group; None is the default group.

    Attributes:
        group: what to use.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        given = dist.group.WORLD if group is None else group
        assert given is not None
        self.group = group
        self._given, self._is_released = given, False
        self._world = ref(dist.group.WORLD)
        self._is_new = _users.get(given, 0) > 0 and dist.get_world_size(group) > 1
        _users[given] = _users.get(given, 0) + 1
        if self._is_new:
            ranks = dist.get_process_group_ranks(given)
            name: list[object] = [uuid4().hex]
            dist.broadcast_object_list(name, ranks[0], group=group)
            self.group = new_group(group, ranks, f"lightning_sparse/exchange {name[0]}")

    def release(self) -> None:
        """Leaves the given group to the next user: this one steps no more, but may still save. Again is harmless."""
        if not self._is_released:
            _users[self._given] -= 1
        self._is_released = True

    def close(self) -> None:
        """Releases the group, and ends it if it was made here; again is harmless."""
        self.release()
        if self._is_new and self._world() is not None and self._world() is dist.group.WORLD:
            dist.destroy_process_group(self.group)
        self._is_new = False
