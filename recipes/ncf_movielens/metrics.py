"""Vectorised hit rate and NDCG of one relevant candidate per user."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


def pessimistic_ranks(scores: Tensor) -> Tensor:
    """Return the rank of the first candidate of each row, 0 for the best, int64 of shape (users,).

    Ties count against the first candidate, so a model with constant scores finds nothing. A NaN score ranks before the
    first candidate, and a NaN score of the first candidate ranks it last.

    Args:
        scores: one row per user with the relevant candidate first, shape (users, candidates).

    Example:
        >>> pessimistic_ranks(torch.tensor([[0.5, 0.1, 0.9], [0.5, 0.5, 0.1], [0.5, 0.1, float("nan")]])).tolist()
        [1, 1, 1]
    """
    return (scores[:, 1:] < scores[:, :1]).logical_not().sum(dim=1)


class _RankingMetric(Metric):
    """Base of metrics that average a value of the rank over the users of all workers."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    users: Tensor

    def __init__(self, top_k: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if top_k < 1:
            raise ValueError(f"Invalid {top_k=}. Must be at least 1.")
        self.top_k = top_k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("users", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, scores: Tensor) -> None:
        """Add scores of shape (users, candidates), the relevant candidate first; ``users`` may be 0."""
        ranks = pessimistic_ranks(scores)
        self.total += torch.where(ranks < self.top_k, self._value_of_rank(ranks), 0.0).sum()
        self.users += len(scores)

    @override
    def compute(self) -> Tensor:
        return self.total / self.users

    def _value_of_rank(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError


class HitRate(_RankingMetric):
    """The share of users whose relevant candidate is among the ``top_k`` highest scores.

    Equals torchmetrics' ``RetrievalHitRate`` except for ties, without a loop over users.

    Args:
        top_k: number of candidates that count as a hit.
        **kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``top_k`` is below 1.
    """

    @override
    def _value_of_rank(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks, dtype=torch.float32)


class NDCG(_RankingMetric):
    """The mean over users of 1 / log2(2 + rank), or 0 for a rank outside ``top_k``.

    Equals torchmetrics' ``RetrievalNormalizedDCG`` except for ties, without a loop over users.

    Args:
        top_k: number of candidates that count.
        **kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``top_k`` is below 1.
    """

    @override
    def _value_of_rank(self, ranks: Tensor) -> Tensor:
        return (2.0 + ranks).log2().reciprocal()
