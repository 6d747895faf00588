"""Compares the measured mean suboptimality of a convex f with its bound."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from lightning_sparse import HardThreshold
from lightning_sparse.theory import Problem, convex_bound, measured_noise, squared_error_bound
from recipes.logistic_regression.curves import Setting
from recipes.logistic_regression.objective import Objective, find_minimiser

NOISE_DRAWS = 100
NOISE_POINTS = 5
SHARES_OF_THRESHOLD = (0.0, 0.1, 1.0)
"""Multiples of the λ that matches Top-k's volume; 0 is dense, and at 1 the bound is mostly loose."""


class BoundResult(NamedTuple):
    """The result of ``compute_bounds``.

    Attributes:
        problem: the exact L, and the largest measured σ² and ζ².
        frame: one row per threshold, seed and record.
    """

    problem: Problem
    frame: pd.DataFrame


def limit_learning_rate(objective: Objective, learning_rate: float) -> float:
    """Return the learning rate, limited to 1 / (4 L), the largest for which the bound holds."""
    problem = Problem(objective.smoothness, num_workers=1, noise=0.0)
    return min(learning_rate, problem.largest_learning_rate(is_convex=True))


def estimate_noise(objective: Objective, shards: Tensor, x: Tensor, seed: int) -> tuple[float, float]:
    """Return estimates of σ² and ζ² at x, from 100 single-example gradients per worker."""
    n, m = shards.shape
    positions = torch.randint(m, (n, NOISE_DRAWS), generator=torch.Generator().manual_seed(seed))
    return measured_noise(
        [objective.gradients(x, examples[positions]) for examples, positions in zip(shards, positions, strict=True)]
    )


def compute_bounds(setting: Setting, thresholds: Iterable[float], seeds: Sequence[int]) -> BoundResult:
    """Return the bound and the running mean of f(x_t) − f* for each threshold and seed.

    The mean includes the initial record and excludes that of ``iteration``. While f falls, it is slightly above the
    mean over all iterations.

    Columns of the frame:
        threshold: λ in gradient units.
        seed, iteration: seed and iteration of the record.
        average_suboptimality: mean of f(x_t) − f* over the earlier records.
        bound: sum of the next three columns.
        start_term, noise_term, threshold_term: 2 ‖x_0 − x*‖² / (γ T), 2 γ σ² / n and 4 L γ² d λ², where T is
            ``iteration``.
        squared_shift: ‖ē‖² of the workers' mean residual in gradient units, averaged over the records after the first.
            The proof bounds it by d λ².
        density: share of coordinates sent so far, in 0…1.

    Raises:
        ValueError: the bound does not hold for the learning rate.
    """
    objective, rate = setting.objective, setting.learning_rate
    solution = find_minimiser(objective)
    minimum, squared_distance = objective.value(solution), float(solution.square().sum())
    points = max(1, setting.iterations // setting.every // NOISE_POINTS)
    noises, measured = [], []
    for threshold in thresholds:
        for seed in seeds:
            total = shifts = 0.0
            for number, state in enumerate(setting.training(HardThreshold(threshold=threshold), seed)):
                if number % points == 0:
                    noises.append(estimate_noise(objective, setting.shards, state.x, seed))
                if number:
                    shifts += float(state.residuals.mean(dim=0).square().sum())
                    density = state.sent / (state.iteration * state.residuals.numel())
                    measured.append((threshold, seed, state.iteration, total / number, shifts / number, density))
                total += objective.value(state.x) - minimum
    noise, heterogeneity = (max(values) for values in zip(*noises, strict=True))
    # The estimate is unbiased and can fall below 0 if workers hardly differ.
    problem = Problem(objective.smoothness, len(setting.shards), noise, max(0.0, heterogeneity))
    rows = []
    for threshold, seed, iteration, average, squared_shift, density in measured:
        squared_error = squared_error_bound(objective.num_elements, threshold, rate)
        rows.append(
            {
                "threshold": threshold,
                "seed": seed,
                "iteration": iteration,
                "average_suboptimality": average,
                "bound": convex_bound(problem, squared_distance, rate, iteration, squared_error),
                "start_term": 2 * squared_distance / (rate * iteration),
                "noise_term": 2 * rate * problem.variance_of_mean,
                "threshold_term": 4 * problem.smoothness * squared_error,
                "squared_shift": squared_shift,
                "density": density,
            }
        )
    return BoundResult(problem, pd.DataFrame(rows))
