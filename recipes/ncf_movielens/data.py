"""MovieLens as implicit feedback with negative sampling, or interactions from a known model without a download."""

import os
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from recipes import MissingDataError
from recipes.missing_data import failing_together, fetch_error
from recipes.ncf_movielens.archive import SERVER, fetch_ratings, ratings_file
from recipes.ncf_movielens.low_rank import low_rank_ratings
from recipes.ncf_movielens.ratings import Ratings, load_ratings
from recipes.ncf_movielens.sampling import Batches, TrainingBatches, make_shard, ranking_batches


class MovieLensDataModule(LightningDataModule):
    """Who watched what: each user's last rating is held out and to be found among 100 movies not rated.

    ``movielens``: the ratings in ``<root>/<dataset>/ratings.csv``, fetched if missing, read once and then cached beside
    the file. Any file of that layout will do. ``builtin``: 1,000 users and 400 items drawn from a known low-rank model,
    whose best possible hit rate is ``best_hit_rate``.

    A training sample is a user, an item and a label: 1 for a rating, whatever its value, and 0 for each of the
    ``negatives`` items that every epoch draws anew for it. An epoch holds every rating once, over all workers; order,
    negatives and shards depend on the seed of ``seed_everything``. Validation and test are the same ranking of the
    held-out items, over all users, and depend on nothing but the ratings.

    Args:
        root: folder of the data sets.
        source: which interactions.
        dataset: which of GroupLens' data sets, for ``movielens``.
        batch_size: samples per worker and step, at most: an epoch is cut into batches of about equal size.
        negatives: negatives a positive.
        heterogeneous: gives each worker a slice of the samples ordered by label, positives first, as the paper's code
            does by accident, instead of a random share.

    Attributes:
        ratings: the interactions; None before ``setup``.
        best_hit_rate: the best HR@10 that can be expected of any model; None where it is not known.

    Raises:
        ValueError: a number that is too small.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Literal["movielens", "builtin"] = "movielens",
        dataset: Literal["ml-20m", "ml-latest-small"] = "ml-20m",
        batch_size: int = 131_072,
        negatives: int = 4,
        heterogeneous: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"Invalid {batch_size=}. Must be at least 1; the paper's is 131072.")
        if negatives < 1:
            raise ValueError(f"Invalid {negatives=}. Must be at least 1; the paper's is 4.")
        self.root = Path(root)
        self.source = source
        self.dataset = dataset
        self.batch_size = batch_size
        self.negatives = negatives
        self.heterogeneous = heterogeneous
        self.ratings: Ratings | None = None
        self.best_hit_rate: float | None = None
        self._failure: MissingDataError | None = None

    @property
    def num_users(self) -> int:
        """How many users; known after ``setup``."""
        return self._loaded().num_users

    @property
    def num_items(self) -> int:
        """How many items; known after ``setup``."""
        return self._loaded().num_items

    @override
    def prepare_data(self) -> None:
        """Fetches the ratings unless they are there, and makes their cache; Lightning calls this once per node."""
        if self.source != "builtin":
            self._failure = fetch_error("MovieLens", lambda: load_ratings(fetch_ratings(self.root, self.dataset)))

    @override
    def setup(self, stage: str) -> None:
        """Reads the ratings; collective where there is a process group.

        Raises:
            MissingDataError: they are not there, on this worker or another one.
            InvalidRatingsError: the file is not as it should be; with file and row.
        """
        if self.ratings is not None:
            return
        if self.source == "builtin":
            known = low_rank_ratings()
            self.ratings, self.best_hit_rate = known.ratings, known.best_hit_rate()
            rank_zero_info(f"The best HR@10 that a model can be expected to reach is {self.best_hit_rate:.3f}.")
            return
        with failing_together():
            ratings = self._read()
        self.ratings = ratings

    def _read(self) -> Ratings:
        path = ratings_file(self.root, self.dataset)
        if path.exists():
            return load_ratings(path)
        raise self._failure or MissingDataError(
            f"{path.absolute()} is not there. Put {self.dataset}.zip from {SERVER}/{self.dataset}.zip into "
            f"{self.root.absolute()}, or try the recipe with --data.source=builtin."
        )

    @override
    def train_dataloader(self) -> TrainingBatches:
        trainer, ratings = self._trainer(), self._loaded()
        shard = make_shard(
            ratings,
            negatives=self.negatives,
            batch_size=self.batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            heterogeneous=self.heterogeneous,
            seed=_seed(),
        )
        return TrainingBatches(
            shard,
            ratings.num_items,
            epoch=lambda: trainer.current_epoch,
            seeds=(_seed(), trainer.global_rank),
            device=trainer.strategy.root_device,
        )

    @override
    def val_dataloader(self) -> Batches[tuple[Tensor, Tensor]]:
        trainer = self._trainer()
        return ranking_batches(
            self._loaded().candidates,
            batch_size=self.batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )

    @override
    def test_dataloader(self) -> Batches[tuple[Tensor, Tensor]]:
        return self.val_dataloader()

    def _loaded(self) -> Ratings:
        if self.ratings is None:
            raise RuntimeError("The ratings are not loaded yet: call setup() first, or let a Trainer do so.")
        return self.ratings

    def _trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer


def _seed() -> int:
    """The number given to ``seed_everything``, which Lightning hands to all workers this way; 0 without."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
