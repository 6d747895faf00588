"""Check through the rendezvous store whether all workers are at the same point, without a collective.

A checkpoint needs every worker's residuals, but some workers may never reach the call that saves. A worker may handle
an exception or a signal while others wait in a step for its gradients. A collective would wait for them forever, or
receive the message of a step. So workers wait for each other through the store first::

    worker k                                         rank 0
    writes its status and its arrival         ──▶    polls until all workers have arrived or patience ends
    waits for the verdict, or leaves                 claims each worker that has not left; claimed ones stay
    reads the verdict                         ◀──    all claimed, with the same status: go; else: the reason

Keys contain the set-up, the worker and the number of its attempt, so that no worker reads keys of a failed attempt.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from traceback import walk_stack
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_sparse.exchange.agreement import gather_objects
from lightning_sparse.exchange.groups import end_group, new_workers
from lightning_sparse.exchange.workers import Workers

PATIENCE = 300.0
"""Seconds that rank 0 waits for all others, which wait at most twice as long. Validation may take that long."""
SHORT_PATIENCE = 15.0
"""Seconds to wait while an exception or a signal is handled: others may never save, and the job is killed soon."""
_log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between polls of the store. Unlike a blocking wait, polling lets Python handle signals."""


class SaveBarrier:
    """Synchronises the workers of an exchange before a save. Every worker creates it at set-up. Collective.

    Attributes:
        is_saving: whether this worker gathers state for a checkpoint.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.is_saving = False
        # An exception that the program handled before set-up says nothing about the training. A reference to it would
        # keep the memory of an earlier fit.
        self._error_before = id(sys.exc_info()[1])
        self._attempts = 0
        self._told = ""
        # Unique, because torchrun's store outlives workers that it restarts.
        self._name = f"lightning_sparse/{gather_objects(uuid4().hex, workers.group)[0]}"
        self._store = PrefixStore(self._name, _get_default_store())
        self._saving: Workers | None = None
        self._generation = self._made_as = 0  # of the saving group; after a wait, the largest of all workers

    @property
    def handled_error(self) -> BaseException | None:
        """The exception that is being handled, if it was raised after set-up."""
        error = sys.exc_info()[1]
        return None if id(error) == self._error_before else error

    def patience(self, timeout: timedelta | None, *, is_exchanging: bool = False) -> float:
        """Return the seconds to wait for others, at most the process group's timeout."""
        callers = [str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe())]
        is_signal = any(name.endswith("signal_connector") for name in callers)  # of Lightning
        patience = SHORT_PATIENCE if is_exchanging or self.handled_error or is_signal else PATIENCE
        return patience if timeout is None else min(patience, timeout.total_seconds())

    def saving_workers(self) -> Workers:
        """Return the workers in a separate group for saving. Collective.

        The group's messages cannot collide with those of a step. Call this after ``wait`` returned None. The first
        call, and calls after a failure or ``close``, create a group.
        """
        if self._workers.num_workers == 1:
            return self._workers
        if self._saving is None or self._made_as != self._generation:
            self._made_as = self._generation
            name = f"{self._name}/saving {self._generation}"
            self._saving = new_workers(self._workers.group, self._workers.global_ranks, name)
            if not self._saving.is_over_gloo:
                # NCCL connects a group in its first operation, which needs all ranks; later messages have two ranks.
                self._saving.all_reduce(torch.zeros(1, device=self._saving.message_device)).wait()
        return self._saving

    def close(self) -> None:
        """End the group of ``saving_workers``, if there is one; a later save gets another."""
        if self._saving is not None:
            end_group(self._saving.group)
            self._saving = None
            self._generation += 1

    def saving_failed(self) -> None:
        """Make the next save create a group: a message may be incomplete."""
        self._generation += 1

    def wait(self, status: dict[str, Any], patience: float) -> str | None:
        """Wait for the other workers. Not collective: absent workers give a reason.

        Args:
            status: values that JSON preserves, which must be equal on all workers.
            patience: seconds to wait for the other workers.

        Returns:
            None if all workers arrive with the same status, else the reason; the same on all participating workers.
        """
        self._attempts += 1
        if self._workers.num_workers == 1:
            return None
        error = self.handled_error
        if isinstance(error, Exception) and self._told != repr(error):
            self._told = repr(error)  # Python prints it only when the save ends
            rank = self._workers.rank
            _log.error("lightning_sparse: rank %d handles %r, saves, and waits for the other ranks.", rank, error)
        try:
            return self._decide(status, patience) if self._workers.rank == 0 else self._report(status, patience)
        except dist.DistNetworkError:  # of the store, which ends with rank 0
            return "rank 0 is gone"

    def _report(self, status: dict[str, Any], patience: float) -> str | None:
        attempt = f"{self._workers.rank}/{self._attempts}"
        self._store.set(f"{self._workers.rank}/came", json.dumps([attempt, status, self._generation]))
        has_verdict = partial(self._store.check, [f"{attempt}/verdict"])
        try:
            has_come = _wait_until(has_verdict, patience)
            if not has_come and self._store.check(["rank 0 waits"]) and self._store.get("rank 0 waits") == b"True":
                has_come = _wait_until(has_verdict, patience)
        except BaseException:  # as by Ctrl-C
            with suppress(dist.DistError):
                self._store.add(f"{attempt}/end", 1)
            raise
        if not has_come and self._store.add(f"{attempt}/end", 1) == 1:
            return f"rank 0 did not reach the save, or waited for other ranks, within {patience:g} s"
        if not _wait_until(has_verdict, max(patience, SHORT_PATIENCE)):  # rank 0 claimed this worker just now
            return "rank 0 reached the save and left"
        verdict: str | None
        verdict, self._generation = json.loads(self._store.get(f"{attempt}/verdict"))
        return verdict

    def _decide(self, status: dict[str, Any], patience: float) -> str | None:
        others = range(1, self._workers.num_workers)
        arrived: dict[int, tuple[str, dict[str, Any]]] = {}  # attempt and status

        def has_ended(attempt: str) -> bool:
            return self._store.check([f"{attempt}/end"])

        def have_all_arrived() -> bool:
            for rank in others:
                if rank not in arrived and self._store.check([f"{rank}/came"]):
                    attempt, other_status, generation = json.loads(self._store.get(f"{rank}/came"))
                    self._generation = max(self._generation, generation)
                    if not has_ended(attempt):
                        arrived[rank] = attempt, other_status
            if len(arrived) < len(others):
                return False
            left = [rank for rank, (attempt, _) in arrived.items() if has_ended(attempt)]
            for rank in left:
                del arrived[rank]  # it may come again
            return not left

        self._store.set("rank 0 waits", "True")
        try:
            has_all = _wait_until(have_all_arrived, patience)
        finally:
            self._store.set("rank 0 waits", "False")
        ended = {rank: self._store.add(f"{attempt}/end", 1) for rank, (attempt, _) in arrived.items()}
        claimed = {rank: status for rank, (_, status) in arrived.items() if ended[rank] == 1}
        reason = None
        if len(claimed) == len(others):
            rank = next((rank for rank in others if claimed[rank] != status), None)
            if rank is not None:
                reason = f"workers are at different points: rank 0 at {status}, rank {rank} at {claimed[rank]}"
        else:
            absent = [str(rank) for rank in others if rank not in claimed]
            names = ", ".join(absent[:8]) + ", …" * (len(absent) > 8)
            when = "left the save" if has_all else f"did not reach the save within {patience:g} s"
            reason = f"rank{'s' * (len(absent) > 1)} {names} {when}"
        for rank in claimed:
            self._store.set(f"{arrived[rank][0]}/verdict", json.dumps([reason, self._generation]))
        return reason


def _wait_until(is_true: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    pause = FIRST_PAUSE
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
