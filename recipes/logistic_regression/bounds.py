"""The theory beside the measurement: the bound on the mean suboptimality of a convex f, and what f came to."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from lightning_sparse import HardThreshold
from lightning_sparse.theory import Problem, convex_bound, measured_noise, squared_error_bound
from recipes.logistic_regression.curves import Setting
from recipes.logistic_regression.objective import Objective, minimiser

NOISE_DRAWS = 100
NOISE_POINTS = 5
SHARES_OF_THRESHOLD = (0.0, 0.1, 1.0)
"""Of the λ that sends what Top-k does: 0 sends everything, and the last is mostly beyond what the bound is good for."""


class Bounded(NamedTuple):
    """What ``bounds`` found.

    Attributes:
        problem: L exactly; σ² and ζ², the largest of all points at which they were measured.
        frame: a row for each threshold, seed and record.
    """

    problem: Problem
    frame: pd.DataFrame


def allowed_learning_rate(objective: Objective, learning_rate: float) -> float:
    """Returns the learning rate, or the largest for which the bound holds, 1 / (4 L), if that is smaller."""
    problem = Problem(objective.smoothness, num_workers=1, noise=0.0)
    return min(learning_rate, problem.largest_learning_rate(is_convex=True))


def noise_at(objective: Objective, shards: Tensor, x: Tensor, seed: int) -> tuple[float, float]:
    """Returns estimates of σ² and ζ² at x, of 100 single-example gradients of each worker."""
    n, m = shards.shape
    places = torch.randint(m, (n, NOISE_DRAWS), generator=torch.Generator().manual_seed(seed))
    return measured_noise([objective.gradients(x, own[some]) for own, some in zip(shards, places, strict=True)])


def bounds(setting: Setting, thresholds: Iterable[float], seeds: Sequence[int]) -> Bounded:
    """Returns the bound and the mean of f(x_t) − f* over the records so far, for each threshold and seed.

    The mean is over the records before ``iteration``, the first iterate among them: while f falls it is a little above
    the mean over all iterations.

    Columns of the frame:
        threshold: λ in gradient units.
        seed, iteration: which.
        average_suboptimality: of the records up to here.
        bound: what the theory allows, the sum of the next three.
        start_term, noise_term, threshold_term: 2 ‖x_0 − x*‖² / (γ T), 2 γ σ² / n and 4 L γ² d λ², where T is
            ``iteration``.
        squared_shift: ‖ē‖² of the workers' mean residual in gradient units, the mean of the records after the first.
            The proof puts d λ² in its place.
        density: share of coordinates sent so far, in 0…1.

    Raises:
        ValueError: a learning rate for which the bound does not hold.
    """
    objective, rate = setting.objective, setting.learning_rate
    solution = minimiser(objective)
    minimum, squared_distance = objective.value(solution), float(solution.square().sum())
    points = max(1, setting.iterations // setting.every // NOISE_POINTS)
    noises, measured = [], []
    for threshold in thresholds:
        for seed in seeds:
            total = shifts = 0.0
            for number, state in enumerate(setting.training(HardThreshold(threshold=threshold), seed)):
                if number % points == 0:
                    noises.append(noise_at(objective, setting.shards, state.x, seed))
                if number:
                    shifts += float(state.residuals.mean(dim=0).square().sum())
                    density = state.sent / (state.iteration * state.residuals.numel())
                    measured.append((threshold, seed, state.iteration, total / number, shifts / number, density))
                total += objective.value(state.x) - minimum
    noise, heterogeneity = (max(values) for values in zip(*noises, strict=True))
    # An estimate without bias, below 0 where workers hardly differ.
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
    return Bounded(problem, pd.DataFrame(rows))
