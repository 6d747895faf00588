"""Workers as threads of a process, with the exchange's collectives but without a process group."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.exchange.workers import Pending, Workers


class ThreadWorkers:
    """Runs workers in threads that synchronise in their collectives.

    One thread computes at a time, because threads that compete for the GIL need twice the CPU time.
    """

    def __init__(self, num_workers: int) -> None:
        self._barrier = Barrier(num_workers)
        self._turn = Lock()
        self._parts: list[Any] = [None] * num_workers
        self.workers = [_ThreadWorker(None, rank, num_workers, self) for rank in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers)  # its threads end with this object

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return the results of ``function(rank)``, called in one thread per rank.

        Gradients are not recorded. If workers fail, raises the lowest rank's error after all have ended.
        """
        self._barrier.reset()
        futures = [self._threads.submit(self._call, function, worker.rank) for worker in self.workers]
        raised = [error for future in futures if (error := future.exception())]
        for error in sorted(raised, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _call(self, function: Callable[[int], Any], rank: int) -> Any:
        try:
            with torch.no_grad(), self._turn:
                return function(rank)
        except BaseException:
            self._barrier.abort()  # so that other workers do not wait for this one
            raise

    @contextmanager
    def gather_parts(self, rank: int, part: Any) -> Iterator[list[Any]]:
        """Yield all workers' parts in rank order. Collective.

        No worker leaves the context before all have read the parts.
        """
        self._parts[rank] = part
        self._wait_for_others()
        yield self._parts
        self._wait_for_others()

    def _wait_for_others(self) -> None:
        if len(self.workers) == 1:
            return
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


@dataclass(frozen=True)
class _ThreadWorker(Workers):
    """A worker in a thread. Sums are in rank order, with the same bits on all workers."""

    threads: ThreadWorkers = field(repr=False, compare=False)

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        with self.threads.gather_parts(self.rank, part) as parts:
            rows = out.view(self.num_workers, -1)
            if not self.sends_messages(out):
                torch.stack(parts, out=rows)
            else:  # of different lengths
                for row, given in zip(rows, parts, strict=True):
                    row[: given.numel()].copy_(given)
        return Pending()

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        with self.threads.gather_parts(self.rank, parts.view(self.num_workers, -1)) as parts_of_all:
            torch.stack([given[self.rank] for given in parts_of_all], out=out.view(self.num_workers, -1))
        return Pending()

    def all_reduce(self, tensor: Tensor) -> Pending:
        total = None
        with self.threads.gather_parts(self.rank, tensor) as (first, *others):
            if self.rank == 0:  # once for all workers
                total = first.clone()
                for other in others:
                    total += other
        with self.threads.gather_parts(self.rank, total) as (total, *_):
            tensor.copy_(total)
        return Pending()

    def gather_objects_to_first(self, local_value: Any) -> list[Any]:
        with self.threads.gather_parts(self.rank, local_value) as parts:
            return [*parts] if self.rank == 0 else []

    def sends_messages(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    @property
    def reads_averages(self) -> bool:  # type: ignore[override]
        return self.rank == 0
