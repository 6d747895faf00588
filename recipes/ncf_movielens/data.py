"""Loads MovieLens as implicit feedback, or interactions of a known model without a download."""

import os
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from recipes import MissingDataError
from recipes.missing_data import failing_together, fetch_error
from recipes.ncf_movielens.archive import SERVER, fetch_ratings, ratings_path
from recipes.ncf_movielens.low_rank import draw_low_rank_ratings
from recipes.ncf_movielens.ratings import Ratings, load_ratings
from recipes.ncf_movielens.sampling import Batches, TrainingBatches, make_shard, ranking_batches


class MovieLensDataModule(LightningDataModule):
    """Interactions of users with items, and a ranking of each user's last rating among 100 unrated items.

    ``movielens`` reads ``<root>/<dataset>/ratings.csv``, downloads it if it is missing, and caches the parsed ratings
    beside it. You may provide another file with these columns. ``builtin`` draws 1,000 users and 400 items from a known
    low-rank model with the best possible hit rate ``best_hit_rate``.

    A training sample is a user, an item and a label. The label is 1 for a rating, whatever its value, and 0 for each of
    its ``negatives`` items, which every epoch draws anew. Over all workers, an epoch holds every rating once. Order,
    negatives and shards depend on the seed of ``seed_everything``. Validation and test rank the held-out items of all
    users, and depend on the ratings only.

    Args:
        root: folder of the data sets.
        source: source of the interactions.
        dataset: name of GroupLens' data set, for ``movielens``.
        batch_size: largest number of samples per worker and step. Batches of an epoch have about equal size.
        negatives: negatives per positive.
        heterogeneous: gives each worker a slice of the samples ordered by label, positives first, instead of a random
            share. The paper's code does this by accident.

    Attributes:
        ratings: the interactions; None before ``setup``.
        best_hit_rate: the best expected HR@10 of any model; None if it is unknown.

    Raises:
        ValueError: a number is too small.
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
        """The number of users; available after ``setup``."""
        return self._loaded().num_users

    @property
    def num_items(self) -> int:
        """The number of items; available after ``setup``."""
        return self._loaded().num_items

    @override
    def prepare_data(self) -> None:
        """Download the ratings unless they exist, and cache them; Lightning calls this once per node."""
        if self.source != "builtin":
            self._failure = fetch_error("MovieLens", lambda: load_ratings(fetch_ratings(self.root, self.dataset)))

    @override
    def setup(self, stage: str) -> None:
        """Read the ratings; with a process group, every rank calls this.

        Raises:
            MissingDataError: the ratings are missing on any worker.
            InvalidRatingsError: the file is invalid; the message names file and row.
        """
        if self.ratings is not None:
            return
        if self.source == "builtin":
            known = draw_low_rank_ratings()
            self.ratings, self.best_hit_rate = known.ratings, known.best_hit_rate()
            rank_zero_info(f"The best expected HR@10 of any model is {self.best_hit_rate:.3f}.")
            return
        with failing_together():
            ratings = self._read()
        self.ratings = ratings

    def _read(self) -> Ratings:
        path = ratings_path(self.root, self.dataset)
        if path.exists():
            return load_ratings(path)
        raise self._failure or MissingDataError(
            f"{path.absolute()} is missing. Put {self.dataset}.zip from {SERVER}/{self.dataset}.zip into "
            f"{self.root.absolute()}, or try the recipe with --data.source=builtin."
        )

    @override
    def train_dataloader(self) -> TrainingBatches:
        trainer, ratings = self.trainer, self._loaded()
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
    def val_dataloader(self) -> Batches:
        return ranking_batches(
            self._loaded().candidates,
            batch_size=self.batch_size,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )

    @override
    def test_dataloader(self) -> Batches:
        return self.val_dataloader()

    def _loaded(self) -> Ratings:
        if self.ratings is None:
            raise RuntimeError("The ratings are not loaded yet. Call setup() first, or use a Trainer.")
        return self.ratings


def _seed() -> int:
    """Return the seed of ``seed_everything``, which Lightning passes to all workers, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
