"""Draws a text with a known best perplexity from a Markov chain."""

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor


class MarkovChain:
    """A random Markov chain over words in which every word has a few successors.

    Args:
        num_words: size of the vocabulary.
        successors: number of words that can follow a word.
        seed: seed of the transition matrix.

    Attributes:
        transitions: float64, shape (num_words, num_words); row i holds the probabilities of the words after word i.

    Raises:
        ValueError: fewer than two words or successors, or more successors than words.

    Example:
        >>> chain = MarkovChain(num_words=50, successors=4, seed=0)
        >>> 1 < chain.perplexity() < 4
        True
    """

    def __init__(self, num_words: int = 200, successors: int = 5, seed: int = 0) -> None:
        if not 2 <= successors <= num_words:
            raise ValueError(f"Invalid {successors=}. Must be within [2, {num_words=}].")
        generator = torch.Generator().manual_seed(seed)
        # Each word's first successor is its neighbour in a ring, so that every word is reachable from every other.
        ring = torch.eye(num_words, dtype=torch.float64).roll(1, dims=1)
        others = torch.rand(num_words, num_words, generator=generator, dtype=torch.float64)
        chosen = (others - ring).topk(successors - 1, dim=1).indices
        follows = ring.scatter(1, chosen, 1.0)
        weights = follows * torch.empty_like(follows).exponential_(generator=generator)
        self.transitions = weights / weights.sum(1, keepdim=True)

    def stationary(self) -> Tensor:
        """Return the frequency of each word in a long text, float64, shape (num_words,), summing to 1."""
        num_words = len(self.transitions)
        # π P = π has a redundant equation; replace it by Σ π = 1.
        equations = self.transitions.T - torch.eye(num_words, dtype=torch.float64)
        equations[-1] = 1.0
        right_side = torch.zeros(num_words, dtype=torch.float64)
        right_side[-1] = 1.0
        return torch.linalg.solve(equations, right_side)

    def perplexity(self) -> float:
        """Return the best perplexity on a long text, exp of the entropy rate −Σ_i π_i Σ_j P_ij ln P_ij."""
        entropies = torch.special.entr(self.transitions).sum(1)
        return float((self.stationary() @ entropies).exp())

    def sample(self, num_tokens: int, seed: int) -> Tensor:
        """Return a text as word indices, int64, shape (num_tokens,), starting after word 0."""
        rows = []
        for probabilities in self.transitions:
            successors = probabilities.nonzero().flatten().tolist()
            bounds = list(accumulate(probabilities[successors].tolist()))
            rows.append((successors, bounds[:-1]))  # without the last bound, which rounding may leave below 1
        draws = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        text, word = [], 0
        for draw in draws.tolist():
            successors, bounds = rows[word]
            word = successors[bisect_right(bounds, draw)]
            text.append(word)
        return torch.tensor(text)
