"""Several sparsifiers on one problem: what each reaches, sends and keeps, as a table with a row for each record."""

from collections.abc import Iterator, Sequence
from math import ceil, log2, nan
from typing import NamedTuple

import pandas as pd
import torch

from lightning_sparse import Dense, HardThreshold, Sparsifier, TopK
from lightning_sparse.theory import squared_error_bound
from recipes.logistic_regression.objective import Objective, minimiser
from recipes.logistic_regression.training import State, draws, training, tuned_threshold

VALUE_BITS = 32
TUNING_SEED = 0


class Setting(NamedTuple):
    """What all methods share.

    Attributes:
        objective: f.
        shards: numbers of each worker's examples, shape (n, m).
        learning_rate: γ.
        iterations: T.
        every: iterations from one record to the next.
    """

    objective: Objective
    shards: torch.Tensor
    learning_rate: float
    iterations: int
    every: int

    def training(self, sparsifier: Sparsifier, seed: int) -> Iterator[State]:
        """Yields the states of a training whose examples are drawn with this seed, the same for every sparsifier."""
        drawn = draws(self.shards, self.iterations, seed)
        return training(self.objective, drawn, sparsifier, self.learning_rate, self.every)


def sparsifiers(density: float, threshold: float) -> dict[str, Sparsifier]:
    """Returns one sparsifier for each method's name.

    The model is a single vector, so Top-k of each layer and of the model differ in ties only: the latter sends all that
    equal the k-th.
    """
    return {
        "dense": Dense(),
        "top_k": TopK(density),
        "top_k_model": TopK(density, granularity="model"),
        "hard_threshold": HardThreshold(threshold=threshold),
    }


METHODS = tuple(sparsifiers(1.0, 0.0))


def threshold_of_density(setting: Setting, density: float) -> float:
    """Returns λ that sends as many coordinates in all as Top-k of each layer, tuned on draws of a seed of its own."""
    drawn = draws(setting.shards, setting.iterations, TUNING_SEED)
    k = max(1, int(density * setting.objective.num_elements))
    return tuned_threshold(setting.objective, drawn, setting.learning_rate, drawn.numel() * k)


def coordinate_bits(method: str, num_elements: int) -> int:
    """Returns what a coordinate costs: 32 bits for its value and ⌈log2 d⌉ for its index, which dense does without."""
    return VALUE_BITS + (0 if method == "dense" else ceil(log2(num_elements)))


def curves(
    setting: Setting, methods: Sequence[str], seeds: Sequence[int], density: float, threshold: float
) -> pd.DataFrame:
    """Returns a row for each method, seed and record.

    Columns:
        method, seed, iteration: which.
        epoch: iterations · n / N.
        suboptimality: f(x) − f*.
        bits: sent by a worker so far, the mean of all.
        squared_error: ‖e_i‖² in gradient units, the mean of all workers.
        density: share of coordinates sent so far, in 0…1.
        threshold: λ in gradient units; NaN for Top-k.
        squared_error_bound: d λ²; likewise.
    """
    objective, num_workers = setting.objective, len(setting.shards)
    d = objective.num_elements
    minimum = objective.value(minimiser(objective))
    available = sparsifiers(density, threshold)
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
