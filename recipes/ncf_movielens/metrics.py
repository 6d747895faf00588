"""Vectorised hit rate and NDCG of one relevant candidate per user."""

from torch import Tensor


def pessimistic_ranks(scores: Tensor) -> Tensor:
    """Return the rank of the first candidate of each row, 0 for the best, int64 of shape (users,).

    Ties count against the first candidate, so a model with constant scores finds nothing. A NaN score ranks before the
    first candidate, and a NaN score of the first candidate ranks it last.

    Args:
        scores: one row per user with the relevant candidate first, shape (users, candidates).

    Example:
        >>> import torch
        >>> pessimistic_ranks(torch.tensor([[0.5, 0.1, 0.9], [0.5, 0.5, 0.1], [0.5, 0.1, float("nan")]])).tolist()
        [1, 1, 1]
    """
    return (scores[:, 1:] < scores[:, :1]).logical_not().sum(dim=1)


def hits_and_gains(scores: Tensor, top_k: int = 10) -> tuple[Tensor, Tensor]:
    """Return the values per user whose means are HR@k and NDCG@k: float32, shape (users,).

    They equal torchmetrics' ``RetrievalHitRate`` and ``RetrievalNormalizedDCG`` except for ties, without a loop over
    users. A hit is 1 if the relevant candidate is among the ``top_k`` highest scores; its gain is 1 / log2(2 + rank).

    Args:
        scores: one row per user with the relevant candidate first, shape (users, candidates).
        top_k: number of candidates that count.

    Example:
        >>> import torch
        >>> hits_and_gains(torch.tensor([[0.5, 0.1, 0.9], [0.1, 0.5, 0.9]]), top_k=2)
        (tensor([1., 0.]), tensor([0.6309, 0.0000]))
    """
    ranks = pessimistic_ranks(scores)
    hits = (ranks < top_k).float()
    return hits, hits / (2.0 + ranks).log2()
