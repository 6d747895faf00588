"""Sorts articles of WikiText-2 by topic, for workers with different texts."""

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfTransformer
from torch import Tensor


def article_starts(tokens: Tensor, end_of_line: int, heading: int) -> Tensor:
    """Return the positions of titles, lines of the form ``= title =``; section headings have two ``=``.

    Args:
        tokens: the text as word indices, int64, one-dimensional.
        end_of_line: index of the word that ends a line.
        heading: index of ``=``.

    Example:
        >>> article_starts(torch.tensor([0, 1, 5, 1, 0, 7, 0, 1, 1, 6, 1, 1, 0, 1, 8, 1, 0, 9, 0]), 0, 1)
        tensor([ 1, 13])
    """
    ends = (tokens == end_of_line).nonzero().flatten()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])
    starts, ends = (edge[ends - starts > 2] for edge in (starts, ends))
    return starts[(tokens[starts] == heading) & (tokens[starts + 1] != heading) & (tokens[ends - 1] == heading)]


def sort_by_topic(tokens: Tensor, end_of_line: int, heading: int) -> Tensor:
    """Return the text with its articles sorted by topic.

    Uses latent semantic analysis of the articles' tf-idf weights. The first singular vector is common to all articles,
    so the second determines the order. Text before the first article stays in place.

    Raises:
        ValueError: the text has fewer than three articles.
    """
    starts = article_starts(tokens, end_of_line, heading)
    if len(starts) < 3:
        raise ValueError(f"Got {len(starts)} articles to sort by topic. Must have at least three lines '= title ='.")
    ends = torch.cat([starts[1:], torch.tensor([len(tokens)])])
    lengths = (ends - starts).numpy()
    rows, words = np.repeat(np.arange(len(starts)), lengths), tokens[starts[0] :].numpy()
    counts = csr_matrix((np.ones(len(words)), (rows, words)))
    weights = TfidfTransformer(sublinear_tf=True).fit_transform(counts)
    topic = np.linalg.eigh((weights @ weights.T).toarray()).eigenvectors[:, -2]
    topic *= np.sign(topic[np.abs(topic).argmax()])  # the sign is arbitrary, and must be equal on all workers
    order = topic.argsort(kind="stable")
    pieces = [tokens[starts[article] : ends[article]] for article in order]
    return torch.cat([tokens[: starts[0]], *pieces])
