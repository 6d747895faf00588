"""Ask through the rendezvous store whether all workers are at the same point, without a collective.

A checkpoint needs every worker's residuals, but some workers may never reach the call that saves. A worker that handles
an exception or a signal is alone with it, while others wait in the middle of a step for its gradients. A collective
would wait for them for ever, or worse, take the message of a step for its own. So workers wait for each other first::

    worker k                                         rank 0
    writes its status and its arrival         ──▶    looks for arrivals until all are there or patience ends
                                                     takes each worker that arrived, which then may not leave
    waits for the verdict                     ◀──    all have the same status: go; else: why not
    … or leaves, if rank 0 did not take it in time

Keys name the set-up, the worker and the number of its attempt, so that no worker reads keys of a failed attempt.
"""

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_sparse.exchange.agreement import gather_objects
from lightning_sparse.exchange.groups import apart
from lightning_sparse.exchange.workers import Workers

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between two looks at the store. Looking, unlike waiting in the store, lets signals through."""


class SaveBarrier:
    """Lets the workers of an exchange wait for each other before a save. Collective: every worker makes one at set-up.

    Args:
        workers: all of them.

    Attributes:
        is_saving: whether this worker gathers state for a checkpoint.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.is_saving = False
        self._attempts = 0
        name = uuid4().hex  # a store may outlive its workers: torchrun's own does, when it starts new ones
        if workers.num_workers > 1:
            name = gather_objects(name, workers.group)[0]
        self._name = f"lightning_sparse/{name}"
        self._store = PrefixStore(self._name, _get_default_store())
        self._apart: Workers | None = None
        self._times_apart = 0

    def workers_apart(self) -> Workers:
        """Return the same workers in a group of their own, whose messages can meet no step's. Collective.

        The first call after a wait of all workers makes the group.
        """
        if self._apart is None:
            self._times_apart += 1
            self._apart = apart(self._workers, f"{self._name}/apart {self._times_apart}")
        return self._apart

    def close(self) -> None:
        """End the group of ``workers_apart``, if there is one."""
        if self._apart is not None:
            dist.destroy_process_group(self._apart.group)
            self._apart = None

    def give_up_apart(self) -> None:
        """Forget the group of ``workers_apart`` after a failure in it; the next one is new."""
        self._apart = None

    def wait(self, status: dict[str, Any], patience: float) -> str | None:
        """Wait for the other workers. Not collective: a worker that is alone learns that.

        Args:
            status: plain values, which must be the same on all.
            patience: seconds to wait for the others.

        Returns:
            None if all workers are here with the same status, else what is wrong; the same on all that took part.
        """
        self._attempts += 1
        if self._workers.num_workers == 1:
            return None
        return self._lead(status, patience) if self._workers.rank == 0 else self._follow(status, patience)

    def _follow(self, status: dict[str, Any], patience: float) -> str | None:
        mine = f"{self._workers.rank}/{self._attempts}"
        self._store.set(f"{mine}/status", json.dumps(status))
        self._store.set(f"{self._workers.rank}/came", str(self._attempts))
        if not self._comes(f"{mine}/verdict", patience):
            if self._store.add(f"{mine}/taken", 1) == 1:
                return "the first worker did not come to save"
            if not self._comes(f"{mine}/verdict", patience):  # it took this worker just now
                return "the first worker began to save and left"
        verdict: str | None = json.loads(self._store.get(f"{mine}/verdict"))
        return verdict

    def _lead(self, status: dict[str, Any], patience: float) -> str | None:
        taken: dict[int, str] = {}
        others = range(1, self._workers.num_workers)

        def all_came() -> bool:
            for rank in others:
                if rank not in taken and self._store.check([f"{rank}/came"]):
                    attempt = f"{rank}/{self._store.get(f'{rank}/came').decode()}"
                    if self._store.add(f"{attempt}/taken", 1) == 1:
                        taken[rank] = attempt
            return len(taken) == len(others)

        why_not = None
        if _until(all_came, patience):
            said = {rank: json.loads(self._store.get(f"{taken[rank]}/status")) for rank in others}
            rank = next((rank for rank in others if said[rank] != status), None)
            if rank is not None:
                why_not = f"workers are at different points: rank 0 at {status}, rank {rank} at {said[rank]}"
        else:
            absent = [str(rank) for rank in others if rank not in taken]
            named = ", ".join(absent[:8]) + ", …" * (len(absent) > 8)
            why_not = f"rank{'s' * (len(absent) > 1)} {named} did not come to save within {patience:g} s"
        for attempt in taken.values():
            self._store.set(f"{attempt}/verdict", json.dumps(why_not))
        return why_not

    def _comes(self, key: str, patience: float) -> bool:
        return _until(lambda: bool(self._store.check([key])), patience)


def _until(is_true: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    pause = FIRST_PAUSE
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
