"""Which worker sees which samples, and in which batches: whole batches by indexing, no Python per sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from recipes.ncf_movielens.ratings import Ratings

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Shard:
    """One worker's samples of an epoch, but for the items of the negatives, which every epoch draws anew.

    Attributes:
        users: the user of each sample, int32 of shape (samples,), the positives' first.
        positive_items: the items of the positives, int32 of shape (positives,).
        num_batches: batches of an epoch, the same on all workers.
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
    """Returns the samples of one worker; those of all workers together hold every positive once.

    Shuffled, each worker has its share of the positives, drawn once for the run, and ``negatives`` negatives for each.
    Heterogeneous, all samples lie in one row, first the positives and then the negatives, and each worker takes a
    slice: with 8 workers and 4 negatives a positive, one has positives only, one has both, six have negatives only.

    Args:
        ratings: the interactions.
        negatives: negatives a positive.
        batch_size: samples of a batch at most.
        rank: whose shard.
        world_size: how many workers.
        heterogeneous: whether slices are by label.
        seed: of the shuffling; the same on all workers.

    Raises:
        ValueError: more workers than positives, or batches too small to give all workers equally many.
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
        # On the CPU, whose generator gives all workers the same order; GPUs of two kinds might not.
        shuffled = torch.randperm(positives, generator=torch.Generator().manual_seed(derived_seed(seed)))
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
    """The batches of one worker's shard, in a new order and with new negatives every epoch; to be iterated anew.

    A batch is users and items, int32, and labels, float32, each of shape (samples,) and on ``device``, where they are
    also drawn. Batches of an epoch differ by one sample at most, and there are equally many on all workers.

    Negatives are drawn uniformly from all items, so that now and then one is a positive: so do the paper's code and
    the MLPerf code that it builds on. Filtering them would cost a search per sample and change little: the mean
    MovieLens user has rated 0.5 % of the items.

    Args:
        shard: the worker's samples.
        num_items: how many items there are to draw from.
        epoch: gives the number of the epoch that begins; with it and the seeds, order and negatives are determined.
        seeds: what distinguishes the run and the worker: the run's seed, and the rank.
        device: where to draw and to index.
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
        generator = torch.Generator(self._users.device).manual_seed(derived_seed(*self.seeds, self.epoch()))
        positives = len(self._positive_items)
        items = torch.empty_like(self._users)
        items[:positives] = self._positive_items
        items[positives:].random_(self.num_items, generator=generator)
        order = torch.randperm(len(items), generator=generator, device=items.device)
        for chosen in order.tensor_split(self._num_batches):
            yield self._users[chosen], items[chosen], (chosen < positives).float()


class Batches(Generic[Batch]):
    """Batches that are there already. Lightning would take a plain list of them for a list of data loaders."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def ranking_batches(
    candidates: Tensor, *, batch_size: int, rank: int, world_size: int
) -> Batches[tuple[Tensor, Tensor]]:
    """Returns one worker's users, shape (users,), with their candidates, shape (users, candidates), in batches.

    Every user is on one worker. All workers have equally many batches, so that all log the metrics; if there are fewer
    users than workers, some are empty.

    Args:
        candidates: of all users, one row each.
        batch_size: users times candidates of a batch at most, but one user at least.
        rank: whose users.
        world_size: how many workers.
    """
    users_per_batch = max(1, batch_size // candidates.shape[1])
    num_batches = ceil(ceil(len(candidates) / world_size) / users_per_batch)
    users = torch.arange(rank, len(candidates), world_size, dtype=torch.int32)
    return Batches([(chosen, candidates[chosen]) for chosen in users.tensor_split(num_batches)])


def derived_seed(*parts: int) -> int:
    """Returns a seed for a torch generator that differs wherever one of the parts does.

    Example:
        >>> derived_seed(1, 2) == derived_seed(1, 2), derived_seed(1, 2) == derived_seed(2, 1)
        (True, False)
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
