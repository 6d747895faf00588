"""Interactions drawn from a known low-rank model: no download, and the best possible hit rate is known."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipes.ncf_movielens.ratings import Ratings, split


@dataclass(frozen=True)
class LowRankRatings:
    """Ratings, and what they were drawn from.

    Attributes:
        ratings: the interactions and the candidates.
        scores: float32 of shape (num_users, num_items); users take item after item, each with probability
            proportional to exp(score) among those they have not taken yet, and the last one is held out.
    """

    ratings: Ratings
    scores: Tensor

    def best_hit_rate(self, top_k: int = 10) -> float:
        """Returns the expected hit rate of the best ranking there is, which no model exceeds but by luck.

        Given a user's candidates, of which one was taken and the others are a uniform draw from the rest, each is the
        one taken with probability proportional to exp(score). The best ranking is by that probability, and it hits
        with the sum of its ``top_k`` largest. Over n users the rate of a ranking deviates from its expectation by
        sqrt(p (1 - p) / n).
        """
        taken = self.scores.gather(1, self.ratings.candidates.long()).softmax(dim=1)
        return float(taken.topk(top_k, dim=1).values.sum(dim=1).mean())


def low_rank_ratings(
    num_users: int = 1000, num_items: int = 400, ratings_per_user: int = 41, rank: int = 2, seed: int = 0
) -> LowRankRatings:
    """Returns interactions of users with items, always the same for the same arguments.

    Scores are inner products of normal factors, of standard deviation 2, plus a popularity of each item.

    Args:
        num_users: how many users.
        num_items: how many items.
        ratings_per_user: interactions of each user, one of which is held out.
        rank: length of the factors.
        seed: of everything that is drawn.
    """
    generator = np.random.default_rng(seed)
    users, items = generator.normal(size=(num_users, rank)), generator.normal(size=(num_items, rank))
    scores = 2 / np.sqrt(rank) * users @ items.T + 0.5 * generator.normal(size=num_items)
    # With Gumbel noise on the scores the items in falling order are such a draw without replacement.
    taken = np.argsort(-(scores + generator.gumbel(size=scores.shape)), axis=1)[:, :ratings_per_user]
    # Last in the file for users and items alike to be numbered without gaps, an item that nobody took must not be.
    numbers = np.unique(taken)
    ratings = split(
        users=np.repeat(np.arange(num_users), ratings_per_user),
        items=np.searchsorted(numbers, taken).ravel(),
        timestamps=np.tile(np.arange(ratings_per_user), num_users),
    )
    return LowRankRatings(ratings, torch.from_numpy(scores[:, numbers]).float())
