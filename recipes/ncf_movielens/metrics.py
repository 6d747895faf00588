"""Hit rate and NDCG of one relevant candidate among many: vectorised, for all users in one pass."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


def pessimistic_ranks(scores: Tensor) -> Tensor:
    """Returns the rank of the first candidate of each row, 0 for the best; int64 of shape (users,).

    Whoever has the same score is ranked before it, so that a model that scores everything alike finds nothing. So is a
    candidate whose score is NaN, and all of them where the first one's is.

    Args:
        scores: one row a user, the relevant candidate first; shape (users, candidates).

    Example:
        >>> pessimistic_ranks(torch.tensor([[0.5, 0.1, 0.9], [0.5, 0.5, 0.1], [0.5, 0.1, float("nan")]])).tolist()
        [1, 1, 1]
    """
    return (scores[:, 1:] < scores[:, :1]).logical_not().sum(dim=1)


class _MeanOverUsers(Metric):
    """Mean over the users of all workers of what a rank is worth; workers may have seen different numbers of users."""

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
        """Adds users: scores of shape (users, candidates), the relevant candidate first. No user is fine too."""
        ranks = pessimistic_ranks(scores)
        self.total += torch.where(ranks < self.top_k, self._worth(ranks), 0.0).sum()
        self.users += len(scores)

    @override
    def compute(self) -> Tensor:
        return self.total / self.users

    def _worth(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError


class HitRate(_MeanOverUsers):
    """The share of users whose relevant candidate is among the ``top_k`` of highest score.

    Equals torchmetrics' ``RetrievalHitRate`` where no scores are equal, without a loop over users.

    Args:
        top_k: how many candidates are looked at.
        **kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError: a ``top_k`` below 1.
    """

    @override
    def _worth(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks, dtype=torch.float32)


class NDCG(_MeanOverUsers):
    """Mean over users of 1 / log2(2 + rank) of the relevant candidate, 0 outside the ``top_k`` of highest score.

    Equals torchmetrics' ``RetrievalNormalizedDCG`` where no scores are equal, without a loop over users.

    Args:
        top_k: how many candidates are looked at.
        **kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError: a ``top_k`` below 1.
    """

    @override
    def _worth(self, ranks: Tensor) -> Tensor:
        return (2.0 + ranks).log2().reciprocal()
