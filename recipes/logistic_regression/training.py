"""Distributed SGD with error feedback in one process: all workers' residuals in one tensor, the package's selection."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse import HardThreshold, LayerLayout, Sparsifier
from recipes.logistic_regression.objective import Objective

Sharding = Literal["shuffled", "sorted"]
TUNING_RUNS = 16
TUNING_TOLERANCE = 0.01


def shards(labels: Tensor, num_workers: int, sharding: Sharding) -> Tensor:
    """Returns the numbers of each worker's examples, int64, shape (n, N // n): all workers have as many.

    The same in every call. With ``"shuffled"`` they are in random order, with ``"sorted"`` after that in the order of
    their labels, so that all workers but one have a single class. That f is the mean of the workers' f_i takes an N
    that is a multiple of n, as ``without_remainder`` makes it.

    Raises:
        ValueError: an N that is not.
    """
    if len(labels) % num_workers:
        raise ValueError(f"Got {len(labels)} examples for {num_workers} workers. Give each as many as the others.")
    order = _random_order(len(labels))
    if sharding == "sorted":
        order = order[labels[order].argsort(stable=True)]
    return order.view(num_workers, -1)


def without_remainder(num_examples: int, num_workers: int) -> Tensor:
    """Returns the numbers of N − N mod n examples, drawn the same in every call, int64."""
    return _random_order(num_examples)[: num_examples // num_workers * num_workers]


def _random_order(num_examples: int) -> Tensor:
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(0))


def draws(shards: Tensor, iterations: int, seed: int) -> Tensor:
    """Returns the example that each worker takes in each iteration: uniform of its shard, with replacement.

    Args:
        shards: numbers of examples, shape (n, m).
        iterations: T.
        seed: of all draws.

    Returns:
        int64, shape (T, n).
    """
    n, m = shards.shape
    places = torch.randint(m, (iterations, n), generator=torch.Generator().manual_seed(seed))
    return shards[torch.arange(n), places]


class State(NamedTuple):
    """A training after some iterations. The tensors are those of the training, which go on changing: copy them to keep.

    Attributes:
        iteration: iterations made.
        x: shape (d,).
        residuals: e_i of all workers in gradient units, shape (n, d).
        sent: coordinates that all workers have sent in all iterations.
    """

    iteration: int
    x: Tensor
    residuals: Tensor
    sent: int


def training(
    objective: Objective, drawn: Tensor, sparsifier: Sparsifier, learning_rate: float, every: int
) -> Iterator[State]:
    """Yields the state before the first iteration, after ``every`` iterations, and so on, and after the last.

    From x = 0 and e_i = 0, in each iteration:

    1. Worker i adds its gradient to its residual, p_i = e_i + g_i.
    2. It sends what the sparsifier selects of p_i and keeps the rest, e_i.
    3. x ← x − γ (1/n) Σ_i out_i.

    Algorithm 1 of the paper keeps γ e_i instead of e_i. With a constant γ that is the same, with λ in units of γ · g.

    Args:
        objective: f, with batches of one example.
        drawn: of ``draws``, shape (T, n).
        sparsifier: one that keeps nothing from step to step, as Dense, HardThreshold and TopK do not.
        learning_rate: γ.
        every: iterations from one state to the next.
    """
    num_workers, d = drawn.shape[1], objective.num_elements
    x = torch.zeros(d, dtype=torch.float64)
    residuals = torch.zeros(num_workers, d, dtype=torch.float64)
    sent = 0
    select = _selection(sparsifier, num_workers, d)
    yield State(0, x, residuals, 0)
    for iteration, examples in enumerate(drawn, start=1):
        residuals += objective.gradients(x, examples)
        indices = select(residuals)
        flat = residuals.view(-1)
        x.index_add_(0, indices % d, flat[indices], alpha=-learning_rate / num_workers)
        flat[indices] = 0
        sent += len(indices)
        if iteration % every == 0 or iteration == len(drawn):
            yield State(iteration, x, residuals, sent)


def _selection(sparsifier: Sparsifier, num_workers: int, num_elements: int) -> Callable[[Tensor], Tensor]:
    """Returns a function from p of all workers, (n, d), to the places of what is selected in it, read row by row."""
    layout = LayerLayout(("x",), (num_elements,))
    # For a sparsifier that looks at layers one by one, workers are layers of one bucket: a tenth of the time.
    all_workers = LayerLayout(tuple(map(str, range(num_workers))), (num_elements,) * num_workers)

    def together(compensated: Tensor) -> Tensor:
        return sparsifier.select(compensated.view(-1), all_workers).indices

    def one_by_one(compensated: Tensor) -> Tensor:
        selected = [sparsifier.select(row, layout).indices for row in compensated]
        return torch.cat([worker * num_elements + indices for worker, indices in enumerate(selected)])

    return one_by_one if sparsifier.needs_survey else together


def tuned_threshold(objective: Objective, drawn: Tensor, learning_rate: float, budget: int) -> float:
    """Returns λ in gradient units with which a training sends about ``budget`` coordinates in all.

    Doubled or halved until the budget lies between two, then halved on a logarithmic scale: at most 16 trainings beside
    the first, to within 1 % of the budget if that is reached, else the nearest of all. The number sent need not fall
    steadily with λ, and where it jumps, as with binary features, no λ may come so near.

    Raises:
        ValueError: a budget below 1, or not below everything.
    """
    everything = drawn.numel() * objective.num_elements
    if not 1 <= budget < everything:
        raise ValueError(f"Invalid {budget=}. Must be at least 1 and below {everything}, everything.")
    found: dict[float, int] = {}

    def sends_more(threshold: float) -> bool:
        *_, last = training(objective, drawn, HardThreshold(threshold=threshold), learning_rate, every=len(drawn))
        found[threshold] = last.sent
        return last.sent > budget

    low = high = 1.0
    more = sends_more(1.0)
    for _ in range(TUNING_RUNS):
        if abs(min(found.values(), key=lambda sent: abs(sent - budget)) - budget) <= TUNING_TOLERANCE * budget:
            break
        if low == high:
            tried = low * 2 if more else high / 2
            if sends_more(tried) == more:
                low = high = tried
            else:
                low, high = sorted((low, tried))
        else:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if sends_more(middle) else (low, middle)
    return min(found, key=lambda threshold: abs(found[threshold] - budget))
