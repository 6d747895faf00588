"""Assigns samples to workers and indexes whole batches, without Python code per sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from recipes.ncf_movielens.ratings import Ratings


@dataclass(frozen=True)
class Shard:
    """A worker's samples of an epoch, without the negative items, which every epoch draws anew.

    Attributes:
        users: user of each sample, int32 of shape (samples,), those of positives first.
        positive_items: items of the positives, int32 of shape (positives,).
        num_batches: batches per epoch, equal on all workers.
    """

    users: Tensor
    positive_items: Tensor
    num_batches: int


def make_shard(
    ratings: Ratings,
    *,
    negatives: int,
    batch_size: int,
    rank: int,
    world_size: int,
    heterogeneous: bool,
    seed: int,
) -> Shard:
    """Return a worker's samples; all workers together hold every positive once.

    By default, each worker has a random share of the positives, fixed for the run, with ``negatives`` negatives each.
    With ``heterogeneous``, each worker takes a slice of all samples in order, positives first. With 8 workers and 4
    negatives per positive, one worker has positives only, one has both, and six have negatives only.

    Args:
        ratings: the interactions.
        negatives: negatives per positive.
        batch_size: largest number of samples per batch.
        rank: rank of the worker.
        world_size: number of workers.
        heterogeneous: whether to slice by label.
        seed: seed of the shuffling, equal on all workers.

    Raises:
        ValueError: there are more workers than positives, or batches are too small for an equal number per worker.
    """
    positives = len(ratings.users)
    if heterogeneous:
        total = positives * (1 + negatives)
        start, end = (total * edge // world_size for edge in (rank, rank + 1))
        largest = ceil(total / world_size)
        own = torch.arange(min(start, positives), min(end, positives))
        of_negatives = torch.arange(max(start, positives), max(end, positives)) % positives
    else:
        start, end = (positives * edge // world_size for edge in (rank, rank + 1))
        largest = ceil(positives / world_size) * (1 + negatives)
        # On the CPU, because generators of different GPU types may not give all workers the same order.
        shuffled = torch.randperm(positives, generator=torch.Generator().manual_seed(derive_seed(seed)))
        own = shuffled[start:end]
        of_negatives = own.repeat(negatives)
    num_batches = ceil(largest / batch_size)
    if len(own) + len(of_negatives) < num_batches:
        raise ValueError(
            f"Cannot give each of {world_size} workers {num_batches} batches of at most {batch_size} samples: there "
            f"are {positives} positives with {negatives} negatives each. Use fewer workers or larger batches."
        )
    return Shard(ratings.users[torch.cat([own, of_negatives])], ratings.items[own], num_batches)


class TrainingBatches:
    """The batches of a worker's shard, with a new order and new negatives in every epoch.

    A batch is users and items, int32, and labels, float32, each of shape (samples,) on ``device``. Batches of an epoch
    differ by at most one sample, and all workers have equally many batches.

    Negatives are drawn uniformly from all items, so a few are positives, as in the paper's code and the MLPerf code on
    which it builds. Filtering them would cost a search per sample and change little, because the mean MovieLens user
    has rated 0.5 % of the items.

    Args:
        shard: the worker's samples.
        num_items: number of items to draw from.
        epoch: returns the current epoch, which determines order and negatives together with the seeds.
        seeds: the run's seed and the rank.
        device: device for drawing and indexing.
    """

    def __init__(
        self, shard: Shard, num_items: int, epoch: Callable[[], int], seeds: Sequence[int], device: torch.device
    ) -> None:
        self.num_items = num_items
        self.epoch = epoch
        self.seeds = tuple(seeds)
        self._users = shard.users.to(device)
        self._positive_items = shard.positive_items.to(device)
        self._num_batches = shard.num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generator = torch.Generator(self._users.device).manual_seed(derive_seed(*self.seeds, self.epoch()))
        positives = len(self._positive_items)
        items = torch.empty_like(self._users)
        items[:positives] = self._positive_items
        items[positives:].random_(self.num_items, generator=generator)
        order = torch.randperm(len(items), generator=generator, device=items.device)
        for chosen in order.tensor_split(self._num_batches):
            yield self._users[chosen], items[chosen], (chosen < positives).float()


class Batches:
    """A sequence of existing batches; Lightning would treat a plain list as a list of data loaders."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


def ranking_batches(candidates: Tensor, *, batch_size: int, rank: int, world_size: int) -> Batches:
    """Return batches of a worker's users, shape (users,), and candidates, shape (users, candidates).

    Every user belongs to one worker. All workers have equally many batches, so that all log the metrics. With fewer
    users than workers, some batches are empty.

    Args:
        candidates: candidates of all users, one row per user.
        batch_size: largest product of users and candidates per batch; a batch holds at least one user.
        rank: rank of the worker.
        world_size: number of workers.
    """
    users_per_batch = max(1, batch_size // candidates.shape[1])
    num_batches = ceil(ceil(len(candidates) / world_size) / users_per_batch)
    users = torch.arange(rank, len(candidates), world_size, dtype=torch.int32)
    return Batches([(chosen, candidates[chosen]) for chosen in users.tensor_split(num_batches)])


def derive_seed(*parts: int) -> int:
    """Return a seed for a torch generator that depends on all parts.

    Example:
        >>> derive_seed(1, 2) == derive_seed(1, 2), derive_seed(1, 2) == derive_seed(2, 1)
        (True, False)
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
