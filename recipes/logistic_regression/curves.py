"""Trains with several sparsifiers and returns suboptimality, volume and residual norms as a table."""

from collections.abc import Iterator, Sequence
from math import ceil, log2, nan
from typing import NamedTuple

import pandas as pd
import torch

from lightning_sparse import Dense, HardThreshold, Sparsifier, TopK
from lightning_sparse.sparsifiers.top_k import k_of
from lightning_sparse.theory import squared_error_bound
from recipes.logistic_regression.objective import Objective, find_minimiser
from recipes.logistic_regression.training import State, draw_examples, training, tune_threshold

VALUE_BITS = 32
TUNING_SEED = 0


class Setting(NamedTuple):
    """The problem and the options that all methods share.

    Attributes:
        objective: f.
        shards: indices of each worker's examples, shape (n, m).
        learning_rate: γ.
        iterations: T.
        every: iterations between records.
    """

    objective: Objective
    shards: torch.Tensor
    learning_rate: float
    iterations: int
    every: int

    def training(self, sparsifier: Sparsifier, seed: int) -> Iterator[State]:
        """Yield the states of a training; ``seed`` determines the examples, for any sparsifier."""
        drawn = draw_examples(self.shards, self.iterations, seed)
        return training(self.objective, drawn, sparsifier, self.learning_rate, self.every)


def make_sparsifiers(density: float, threshold: float) -> dict[str, Sparsifier]:
    """Return a sparsifier for each method's name.

    The model is a single vector, so Top-k of each layer and of the model differ in ties only. Top-k of the model sends
    all values that equal the k-th.
    """
    return {
        "dense": Dense(),
        "top_k": TopK(density),
        "top_k_model": TopK(density, granularity="model"),
        "hard_threshold": HardThreshold(threshold=threshold),
    }


METHODS = tuple(make_sparsifiers(1.0, 0.0))


def tune_threshold_to_density(setting: Setting, density: float) -> float:
    """Return the λ that sends as many coordinates as Top-k of each layer, tuned with a separate seed."""
    drawn = draw_examples(setting.shards, setting.iterations, TUNING_SEED)
    k = k_of(density, setting.objective.num_elements)
    return tune_threshold(setting.objective, drawn, setting.learning_rate, drawn.numel() * k)


def coordinate_bits(method: str, num_elements: int) -> int:
    """Return the bits per coordinate: 32 for its value and, except for dense, ⌈log2 d⌉ for its index."""
    return VALUE_BITS + (0 if method == "dense" else ceil(log2(num_elements)))


def compute_curves(
    setting: Setting, methods: Sequence[str], seeds: Sequence[int], density: float, threshold: float
) -> pd.DataFrame:
    """Return one row per method, seed and record.

    Columns:
        method, seed, iteration: method, seed and iteration of the record.
        epoch: iterations · n / N.
        suboptimality: f(x) − f*.
        bits: bits sent so far, averaged over workers.
        squared_error: ‖e_i‖² in gradient units, averaged over workers.
        density: share of coordinates sent so far, in 0…1.
        threshold: λ in gradient units; NaN for Top-k.
        squared_error_bound: d λ²; NaN for Top-k.
    """
    objective, num_workers = setting.objective, len(setting.shards)
    d = objective.num_elements
    minimum = objective.value(find_minimiser(objective))
    available = make_sparsifiers(density, threshold)
    rows = []
    for seed in seeds:
        for method in methods:
            own = available[method].current_threshold
            for state in setting.training(available[method], seed):
                sent = state.sent / num_workers
                rows.append(
                    {
                        "method": method,
                        "seed": seed,
                        "iteration": state.iteration,
                        "epoch": state.iteration / setting.shards.shape[1],
                        "suboptimality": objective.value(state.x) - minimum,
                        "bits": sent * coordinate_bits(method, d),
                        "squared_error": float(state.residuals.square().sum()) / num_workers,
                        "density": sent / (d * state.iteration) if state.iteration else nan,
                        "threshold": nan if own is None else own,
                        "squared_error_bound": nan if own is None else squared_error_bound(d, own),
                    }
                )
    return pd.DataFrame(rows)
