"""Workers that are threads of one process: the exchange's collectives without a process group."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.workers import Workers


class ThreadWorkers:
    """As many workers as asked for, each in a thread of its own, who meet in their collectives.

    Args:
        num_workers: n, at least 1.
    """

    def __init__(self, num_workers: int) -> None:
        self._barrier = Barrier(num_workers)
        self._parts: list[Any] = [None] * num_workers
        self.workers = [_InProcess(None, rank, num_workers, self) for rank in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Returns ``[function(rank) for every rank]``, all called at once; collectives in it meet each other.

        Without gradients being recorded. What the first of them raised is raised again, once all have ended.
        """
        self._barrier.reset()
        futures = [self._threads.submit(self._call, function, worker.rank) for worker in self.workers]
        errors = [future.exception() for future in futures]
        raised = [error for error in errors if error]
        for error in sorted(raised, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _call(self, function: Callable[[int], Any], rank: int) -> Any:
        try:
            with torch.no_grad():
                return function(rank)
        except BaseException:
            self._barrier.abort()  # nobody waits for this one
            raise

    def swap(self, rank: int, part: Any) -> list[Any]:
        """Returns what all gave, in rank order. Nobody goes on before all have taken it: see ``taken``."""
        self._parts[rank] = part
        self._barrier.wait()
        return self._parts

    def taken(self) -> None:
        """Waits until all have taken what they need of what ``swap`` returned."""
        self._barrier.wait()


@dataclass(frozen=True)
class _InProcess(Workers):
    """A worker that is a thread. Sums are in rank order, and the same bits for all."""

    threads: ThreadWorkers = field(repr=False, compare=False)

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        places = out.view(self.num_workers, -1)
        for place, given in zip(places, self.threads.swap(self.rank, part), strict=True):
            place.copy_(given)
        self.threads.taken()
        return Pending([])

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        places = out.view(self.num_workers, -1)
        for place, given in zip(places, self.threads.swap(self.rank, parts), strict=True):
            place.copy_(given.view(self.num_workers, -1)[self.rank])
        self.threads.taken()
        return Pending([])

    def all_reduce(self, tensor: Tensor) -> Pending:
        total = torch.zeros_like(tensor)
        for given in self.threads.swap(self.rank, tensor):
            total += given
        self.threads.taken()
        tensor.copy_(total)
        return Pending([])

    def sends_messages(self, tensor: Tensor) -> bool:
        return False

    @property
    def is_over_gloo(self) -> bool:
        return False
