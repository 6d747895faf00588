"""Whether all workers are in one place: asked through the rendezvous store, without a collective.

A checkpoint needs every worker's residuals, but not every worker may come to save one. One that raised an exception or
was sent a signal is alone with it, while others wait in the middle of a step for its gradients. A collective would
wait for them for ever, or worse, take the message of a step for its own. So workers wait for each other first::

    worker k                                         first worker
    writes its status, says that it has come  ──▶    looks who has come, until all have or patience ends
                                                     takes each who has: from then on that one may not leave
    waits for the verdict                     ◀──    all have, with the same status: go; else: why not
    … or leaves, if nobody took it in time

Keys name the set-up, the worker and how often it came, so that nothing of an attempt that failed is read again.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_sparse.exchange.workers import Workers

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between two looks at the store. Looking, unlike waiting in the store, lets signals through."""


@dataclass(frozen=True)
class Verdict:
    """What came of waiting; the same on all workers that took part.

    Attributes:
        why_not: None if all workers are here with the same status, else what is wrong.
    """

    why_not: str | None


class SaveBarrier:
    """Where the workers of an exchange wait for each other before a save. Collective: every worker makes one at set-up.

    Args:
        workers: all of them.

    Attributes:
        is_saving: whether this worker gathers state for a checkpoint.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.is_saving = False
        self._attempts = 0
        name = [uuid4().hex]  # a store may outlive its workers: torchrun's own does, when it starts new ones
        if workers.num_workers > 1:
            workers.broadcast_object(name)
        self._name = f"lightning_sparse/{name[0]}"
        self._store = PrefixStore(self._name, _get_default_store())
        self._apart: Workers | None = None
        self._times_apart = 0

    def workers_apart(self) -> Workers:
        """Returns the same workers in a group of their own, whose messages can meet no step's. Collective.

        Made when it is first needed, after a wait that all came to.
        """
        if self._apart is None:
            self._times_apart += 1
            self._apart = self._workers.apart(f"{self._name}/apart {self._times_apart}")
        return self._apart

    def close(self) -> None:
        """Ends the group of ``workers_apart``, if there is one."""
        if self._apart is not None:
            dist.destroy_process_group(self._apart.group)
            self._apart = None

    def wait(self, status: dict[str, Any], patience: float) -> Verdict:
        """Waits for the other workers. Not collective: a worker that is alone learns that.

        Args:
            status: plain values, which must be the same on all.
            patience: seconds to wait for the others.
        """
        self._attempts += 1
        if self._workers.num_workers == 1:
            return Verdict(None)
        return self._lead(status, patience) if self._workers.rank == 0 else self._follow(status, patience)

    def give_up_apart(self) -> None:
        """Forgets the group of ``workers_apart``, in which something failed; the next one is new."""
        self._apart = None

    def _follow(self, status: dict[str, Any], patience: float) -> Verdict:
        mine = f"{self._workers.rank}/{self._attempts}"
        self._store.set(f"{mine}/status", json.dumps(status))
        self._store.set(f"{self._workers.rank}/came", str(self._attempts))
        if not _until(lambda: self._has(f"{mine}/verdict"), patience):
            if self._store.add(f"{mine}/taken", 1) == 1:
                return Verdict("the first worker did not come to save")
            _until(lambda: self._has(f"{mine}/verdict"), patience)  # it took this worker just now
            if not self._has(f"{mine}/verdict"):
                return Verdict("the first worker came to save and went away")
        return Verdict(json.loads(self._store.get(f"{mine}/verdict")))

    def _lead(self, status: dict[str, Any], patience: float) -> Verdict:
        taken: dict[int, str] = {}
        others = range(1, self._workers.num_workers)

        def all_came() -> bool:
            for rank in others:
                if rank not in taken and self._has(f"{rank}/came"):
                    attempt = f"{rank}/{self._store.get(f'{rank}/came').decode()}"
                    if self._store.add(f"{attempt}/taken", 1) == 1:
                        taken[rank] = attempt
            return len(taken) == len(others)

        _until(all_came, patience)
        absent = [rank for rank in others if rank not in taken]
        why_not = None
        if absent:
            why_not = f"{_ranks(absent)} did not come to save within {patience:g} s"
        else:
            said = {rank: json.loads(self._store.get(f"{attempt}/status")) for rank, attempt in taken.items()}
            different = [rank for rank, other in said.items() if other != status]
            if different:
                rank = different[0]
                why_not = f"workers are at different points: rank 0 at {status}, rank {rank} at {said[rank]}"
        for attempt in taken.values():
            self._store.set(f"{attempt}/verdict", json.dumps(why_not))
        return Verdict(why_not)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


def _until(is_true: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    pause = FIRST_PAUSE
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def _ranks(ranks: list[int]) -> str:
    return (
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}" + ", …" * (len(ranks) > 8)
    )
