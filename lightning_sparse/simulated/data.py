"""The training data of workers that are simulated: a loader of each, read side by side."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, has_iterable_dataset
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler

_NO_MORE = object()
AsWorker = Callable[[int], AbstractContextManager[None]]


class BatchesOfWorkers(list[Any]):
    """A batch of each worker, in rank order."""


class LoaderOfWorkers:
    """Yields a batch of each worker at a time, as long as all have one.

    Args:
        loaders: of the workers, in rank order.
        as_worker: within what it returns random numbers are that worker's.
    """

    def __init__(self, loaders: Sequence[Any], as_worker: AsWorker) -> None:
        self._loaders, self._as_worker = loaders, as_worker

    def __len__(self) -> int:
        return min(map(len, self._loaders))

    def __iter__(self) -> Iterator[BatchesOfWorkers]:
        # A DataLoader draws a seed for its processes, now and not when the first batch is asked for: Lightning makes
        # iterators that it never reads. Without processes its data set may draw for every batch.
        iterators = self._of_each(lambda rank: iter(self._loaders[rank]))
        return self._batches(iterators)

    def _batches(self, iterators: Sequence[Iterator[Any]]) -> Iterator[BatchesOfWorkers]:
        while True:
            batches = self._of_each(lambda rank: next(iterators[rank], _NO_MORE))
            if any(one is _NO_MORE for one in batches):
                return
            yield batches

    def close(self) -> None:
        """Ends processes that loaders keep from epoch to epoch."""
        for loader in self._loaders:
            _shutdown_workers_and_reset_iterator(loader)

    def _of_each(self, function: Callable[[int], Any]) -> BatchesOfWorkers:
        found = BatchesOfWorkers()
        for rank in range(len(self._loaders)):
            with self._as_worker(rank):
                found.append(function(rank))
        return found

    @property
    def sampler(self) -> "LoaderOfWorkers":
        """What Lightning tells of each epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Tells every sampler that has an interest in it."""
        for loader in self._loaders:
            for place in ("sampler", "batch_sampler"):
                sampler = getattr(loader, place, None)
                for one in (sampler, getattr(sampler, "sampler", None)):
                    tell = getattr(one, "set_epoch", None)
                    if callable(tell):
                        tell(epoch)


class StatefulLoaderOfWorkers(LoaderOfWorkers):
    """The same of loaders that say where they are: a checkpoint holds the first worker's place, as of processes."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the first worker's."""
        state: dict[str, Any] = self._loaders[0].state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives it to all, as every process gets it."""
        for loader in self._loaders:
            loader.load_state_dict(copy.deepcopy(state))


def loader_of_workers(trainer: Trainer, as_worker: AsWorker, num_workers: int) -> LoaderOfWorkers:
    """Returns the training data of all workers, each asked for as by that worker.

    Args:
        trainer: that fits.
        as_worker: within what it returns the trainer is of that rank, and random numbers are that worker's.
        num_workers: n.

    Raises:
        ValueError: a combination of several loaders, or one iterator for all.
    """
    loaders: list[Any] = []
    for rank in range(num_workers):
        with as_worker(rank):
            loader = _request_dataloader(trainer.fit_loop._data_source)
        if isinstance(loader, (CombinedLoader, dict, list, tuple)):
            raise ValueError(
                f"train_dataloader returned {type(loader).__name__}. Simulated workers read one loader: have its "
                "dataset return what belongs together."
            )
        if isinstance(loader, Iterator) and any(loader is one for one in loaders):
            raise ValueError(
                f"The {type(loader).__name__} for training is one for all simulated workers, who would take batches "
                "from one another. Make one in train_dataloader, which is called for each of them."
            )
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)  # one that was handed out to all keeps the iterator that it made last
            loader._iterator = None
        if _needs_sampler(trainer, loader):
            sampler = _get_distributed_sampler(
                loader,
                True,  # whatever its own sampler does: so Lightning trains with several workers
                overfit_batches=trainer.overfit_batches,  # type: ignore[attr-defined]
                mode=RunningStage.TRAINING,
                num_replicas=num_workers,
                rank=rank,
            )
            loader = _update_dataloader(loader, sampler, mode=RunningStage.TRAINING)
        if isinstance(loader, DataLoader):
            _auto_add_worker_init_fn(loader, rank)  # which Lightning does for a loader that it knows
        loaders.append(loader)
    is_stateful = all(isinstance(loader, _Stateful) for loader in loaders)
    return (StatefulLoaderOfWorkers if is_stateful else LoaderOfWorkers)(loaders, as_worker)


def _needs_sampler(trainer: Trainer, loader: object) -> bool:
    return (
        trainer._accelerator_connector.use_distributed_sampler
        and isinstance(loader, DataLoader)
        and not isinstance(loader.sampler, DistributedSampler)
        and not has_iterable_dataset(loader)
    )
