"""Simulates distributed SGD with error feedback in one process, with the package's sparsifiers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse import HardThreshold, LayerLayout, Sparsifier
from recipes.logistic_regression.data import load
from recipes.logistic_regression.objective import Objective

Sharding = Literal["shuffled", "sorted"]
TUNING_RUNS = 16
TUNING_TOLERANCE = 0.01


def shards(labels: Tensor, num_workers: int, sharding: Sharding) -> Tensor:
    """Return the indices of each worker's examples, int64, shape (n, N // n).

    The result is deterministic. ``"shuffled"`` examples are in random order. ``"sorted"`` examples follow their labels,
    so all workers but one have a single class. N must be a multiple of n, as ``drop_remainder`` makes it, so that f is
    the mean of the workers' f_i.

    Raises:
        ValueError: N is not a multiple of n.
    """
    if len(labels) % num_workers:
        raise ValueError(f"Got {len(labels)} examples for {num_workers} workers. Must be a multiple of the workers.")
    order = _random_order(len(labels))
    if sharding == "sorted":
        order = order[labels[order].argsort(stable=True)]
    return order.view(num_workers, -1)


def drop_remainder(num_examples: int, num_workers: int) -> Tensor:
    """Return the indices of N − N mod n examples, int64, in a fixed random order."""
    return _random_order(num_examples)[: num_examples // num_workers * num_workers]


def _random_order(num_examples: int) -> Tensor:
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(0))


def load_objective(root: Path, dataset: str, num_workers: int) -> Objective:
    """Return f of a data set, without the examples that workers cannot share equally."""
    examples = load(root, dataset)
    kept = drop_remainder(len(examples.labels), num_workers)
    return Objective(examples.features[kept], examples.labels[kept])


def draw_examples(shards: Tensor, iterations: int, seed: int) -> Tensor:
    """Return each worker's example in each iteration, drawn uniformly from its shard with replacement.

    Args:
        shards: indices of examples, shape (n, m).
        iterations: T.
        seed: seed of all draws.

    Returns:
        int64, shape (T, n).
    """
    n, m = shards.shape
    positions = torch.randint(m, (iterations, n), generator=torch.Generator().manual_seed(seed))
    return shards[torch.arange(n), positions]


class State(NamedTuple):
    """The state of a training. The training continues to modify the tensors, so copy them to keep them.

    Attributes:
        iteration: number of finished iterations.
        x: shape (d,).
        residuals: e_i of all workers in gradient units, shape (n, d).
        sent: coordinates that all workers have sent so far.
    """

    iteration: int
    x: Tensor
    residuals: Tensor
    sent: int


def training(
    objective: Objective, examples_by_step: Tensor, sparsifier: Sparsifier, learning_rate: float, every: int
) -> Iterator[State]:
    """Yield the initial state, the state after every ``every`` iterations, and the final state.

    From x = 0 and e_i = 0, in each iteration:

    1. Worker i adds its gradient to its residual, p_i = e_i + g_i.
    2. It sends out_i, the coordinates of p_i that the sparsifier selects, and keeps the rest as e_i.
    3. x ← x − γ (1/n) Σ_i out_i.

    Algorithm 1 of the paper keeps γ e_i instead of e_i. With a constant γ both are equivalent if you multiply λ by γ.

    Args:
        objective: f, with batches of one example.
        examples_by_step: result of ``draw_examples``, shape (T, n).
        sparsifier: a stateless sparsifier, such as Dense, HardThreshold and TopK.
        learning_rate: γ.
        every: iterations between states.
    """
    num_workers, d = examples_by_step.shape[1], objective.num_elements
    x = torch.zeros(d, dtype=torch.float64)
    residuals = torch.zeros(num_workers, d, dtype=torch.float64)
    sent = 0
    select = _make_select(sparsifier, num_workers, d)
    yield State(0, x, residuals, 0)
    for iteration, examples in enumerate(examples_by_step, start=1):
        residuals += objective.gradients(x, examples)
        indices = select(residuals)
        flat = residuals.view(-1)
        x.index_add_(0, indices % d, flat[indices], alpha=-learning_rate / num_workers)
        flat[indices] = 0
        sent += len(indices)
        if iteration % every == 0 or iteration == len(examples_by_step):
            yield State(iteration, x, residuals, sent)


def _make_select(sparsifier: Sparsifier, num_workers: int, num_elements: int) -> Callable[[Tensor], Tensor]:
    """Return a function that maps p of all workers, (n, d), to the selected positions in row-major order."""
    layout = LayerLayout(("x",), (num_elements,))
    # A sparsifier that treats layers separately takes workers as layers of one bucket, in a tenth of the time.
    all_workers = LayerLayout(tuple(map(str, range(num_workers))), (num_elements,) * num_workers)

    def select_at_once(compensated: Tensor) -> Tensor:
        return sparsifier.select(compensated.view(-1), all_workers).indices

    def select_by_worker(compensated: Tensor) -> Tensor:
        selected = [sparsifier.select(row, layout).indices for row in compensated]
        return torch.cat([worker * num_elements + indices for worker, indices in enumerate(selected)])

    return select_by_worker if sparsifier.needs_survey else select_at_once


def tune_threshold(objective: Objective, examples_by_step: Tensor, learning_rate: float, budget: int) -> float:
    """Return the λ, in gradient units, with which a training sends about ``budget`` coordinates.

    Doubles or halves λ until two values enclose the budget, then bisects on a logarithmic scale. Stops within 1 % of
    the budget or after 17 trainings, and returns the best λ. The number of sent coordinates can jump, for example with
    binary features, so the result may miss the budget by more.

    Raises:
        ValueError: the budget is below 1 or not below the dense number of coordinates.
    """
    everything = examples_by_step.numel() * objective.num_elements
    if not 1 <= budget < everything:
        raise ValueError(f"Invalid {budget=}. Must be at least 1 and below {everything}, which a dense run sends.")
    sent_by_threshold: dict[float, int] = {}

    def sends_more(threshold: float) -> bool:
        *_, last = training(
            objective, examples_by_step, HardThreshold(threshold=threshold), learning_rate, every=len(examples_by_step)
        )
        sent_by_threshold[threshold] = last.sent
        return last.sent > budget

    low = high = 1.0
    more = sends_more(1.0)
    for _ in range(TUNING_RUNS):
        if (
            abs(min(sent_by_threshold.values(), key=lambda sent: abs(sent - budget)) - budget)
            <= TUNING_TOLERANCE * budget
        ):
            break
        if low == high:
            candidate = low * 2 if more else high / 2
            if sends_more(candidate) == more:
                low = high = candidate
            else:
                low, high = sorted((low, candidate))
        else:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if sends_more(middle) else (low, middle)
    return min(sent_by_threshold, key=lambda threshold: abs(sent_by_threshold[threshold] - budget))
