"""Draws interactions from a low-rank model with a known best hit rate, without a download."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipes.ncf_movielens.ratings import Ratings, split


@dataclass(frozen=True)
class LowRankRatings:
    """Ratings and the scores that generated them.

    Attributes:
        ratings: the interactions and the candidates.
        scores: float32 of shape (num_users, num_items). Each user takes items without replacement, with probability
            proportional to exp(score). The last item is held out.
    """

    ratings: Ratings
    scores: Tensor

    def best_hit_rate(self, top_k: int = 10) -> float:
        """Return the expected hit rate of the best possible ranking.

        A user's candidates are the taken item and a uniform draw of other items. Each candidate is the taken item with
        probability proportional to exp(score). The best ranking follows this probability, and its hit rate is the sum
        of the ``top_k`` largest. Over n users, a measured rate deviates from its expectation by sqrt(p (1 - p) / n).
        """
        taken = self.scores.gather(1, self.ratings.candidates.long()).softmax(dim=1)
        return float(taken.topk(top_k, dim=1).values.sum(dim=1).mean())


def draw_low_rank_ratings(
    num_users: int = 1000, num_items: int = 400, ratings_per_user: int = 41, rank: int = 2, seed: int = 0
) -> LowRankRatings:
    """Return interactions of users with items, determined by the arguments.

    Scores are inner products of normal factors, with standard deviation 2, plus a popularity of each item.

    Args:
        num_users: number of users.
        num_items: number of items.
        ratings_per_user: interactions per user, including the held-out interaction.
        rank: length of the factors.
        seed: seed of all draws.
    """
    generator = np.random.default_rng(seed)
    users, items = generator.normal(size=(num_users, rank)), generator.normal(size=(num_items, rank))
    scores = 2 / np.sqrt(rank) * users @ items.T + 0.5 * generator.normal(size=num_items)
    # Sorting scores with Gumbel noise draws items without replacement, with probability proportional to exp(score).
    taken = np.argsort(-(scores + generator.gumbel(size=scores.shape)), axis=1)[:, :ratings_per_user]
    # Drop items that nobody took, because indices must have no gaps.
    numbers = np.unique(taken)
    ratings = split(
        users=np.repeat(np.arange(num_users), ratings_per_user),
        items=np.searchsorted(numbers, taken).ravel(),
        timestamps=np.tile(np.arange(ratings_per_user), num_users),
    )
    return LowRankRatings(ratings, torch.from_numpy(scores[:, numbers]).float())
