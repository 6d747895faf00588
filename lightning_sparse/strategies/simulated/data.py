"""The training data of simulated workers, with one loader per worker."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch, has_iterable_dataset
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler

_NO_MORE = object()
AsWorker = Callable[[int], AbstractContextManager[None]]


class WorkerBatches(list[Any]):
    """One batch per worker, in rank order."""


class WorkerLoaders:
    """Yields one batch per worker, until a worker has no more.

    Args:
        loaders: the loaders of all workers, in rank order.
        as_worker: returns a context with a worker's rank and random numbers.
    """

    sampler = property(lambda self: self)  # Lightning calls set_epoch of this object

    def __init__(self, loaders: Sequence[Any], as_worker: AsWorker) -> None:
        self._loaders, self._as_worker = loaders, as_worker
        if all(isinstance(loader, _Stateful) for loader in loaders):
            # By these methods, Lightning saves the position of a loader: rank 0's, as in DDP.
            self.state_dict, self.load_state_dict = loaders[0].state_dict, self._load_state_dict

    def __len__(self) -> int:
        return min(map(len, self._loaders))

    def __iter__(self) -> Iterator[WorkerBatches]:
        # Not a generator: a DataLoader draws a seed for its processes when its iterator is made, and Lightning makes
        # iterators that it never reads.
        iterators = self._of_each(lambda rank: iter(self._loaders[rank]))
        return self._batches(iterators)

    def _batches(self, iterators: Sequence[Iterator[Any]]) -> Iterator[WorkerBatches]:
        while True:  # without processes, a data set may draw random numbers for every batch
            batches = self._of_each(lambda rank: next(iterators[rank], _NO_MORE))
            if any(batch is _NO_MORE for batch in batches):
                return
            yield batches

    def close(self) -> None:
        """End persistent processes of loaders."""
        for loader in self._loaders:
            _shutdown_workers_and_reset_iterator(loader)

    def _of_each(self, function: Callable[[int], Any]) -> WorkerBatches:
        found = WorkerBatches()
        for rank in range(len(self._loaders)):
            with self._as_worker(rank):
                found.append(function(rank))
        return found

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all workers' samplers, as Lightning does for its loaders."""
        for loader in self._loaders:
            _set_sampler_epoch(loader, epoch)

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        for loader in self._loaders:
            loader.load_state_dict(copy.deepcopy(state))


def make_worker_loaders(trainer: Trainer, as_worker: AsWorker, num_workers: int) -> WorkerLoaders:
    """Return all workers' training data, from one ``train_dataloader`` call for each.

    Lightning first calls ``train_dataloader`` once, as the only worker, and discards the result. If that call draws
    random numbers, data differ from those of processes: give ``random_split`` a generator with a seed, for example.

    Raises:
        ValueError: ``train_dataloader`` returns several loaders, or the same iterator for several workers.
    """
    loaders: list[Any] = []
    for rank in range(num_workers):
        with as_worker(rank):
            loader = _request_dataloader(trainer.fit_loop._data_source)
        if isinstance(loader, (CombinedLoader, dict, list, tuple)):
            raise ValueError(
                f"train_dataloader returned {type(loader).__name__}. Simulated workers read one loader: use a dataset "
                "that returns all parts of a sample."
            )
        if isinstance(loader, Iterator) and any(loader is other for other in loaders):
            raise ValueError(
                f"All simulated workers have the same {type(loader).__name__} and would take each other's batches. "
                "Make a new one in train_dataloader, which is called for each worker."
            )
        loaders.append(_of_worker(loader, trainer, num_workers, rank) if isinstance(loader, DataLoader) else loader)
    return WorkerLoaders(loaders, as_worker)


def _of_worker(loader: DataLoader[Any], trainer: Trainer, num_workers: int, rank: int) -> DataLoader[Any]:
    """Return a loader of one worker's data, prepared as Lightning prepares loaders."""
    loader = copy.copy(loader)  # workers that share a loader would share its persistent iterator
    loader._iterator = None
    has_sampler = isinstance(loader.sampler, DistributedSampler) or has_iterable_dataset(loader)
    if trainer._accelerator_connector.use_distributed_sampler and not has_sampler:
        sampler = _get_distributed_sampler(
            loader,
            True,  # Lightning shuffles for several workers, regardless of the loader's own sampler
            overfit_batches=trainer.overfit_batches,  # type: ignore[attr-defined]
            mode=RunningStage.TRAINING,
            num_replicas=num_workers,
            rank=rank,
        )
        loader = _update_dataloader(loader, sampler, mode=RunningStage.TRAINING)
    _auto_add_worker_init_fn(loader, rank)
    return loader
