"""Measures the time of steps with dense and with sparse exchanges during training."""

import weakref
from collections import deque
from statistics import median
from time import perf_counter

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.step_stats import StepStats

MAX_SAMPLES = 1000
"""Number of newest exchanges of each kind in a median."""
MIN_SAMPLES = 2
LIKE, LIKE_FEW = 1.1, 2.0
"""Steps whose times differ by less than the first factor count as equally long. With fewer than ``FEW`` dense steps, a
difference below the second factor says nothing."""
FEW = 10
DENSE, SPARSE, WAIT = "sparse/median_dense_step_ms", "sparse/median_step_ms", "sparse/median_wait_ms"
LABELS = {DENSE: "median dense step", SPARSE: "median sparse step", WAIT: "  waited for the exchange"}
"""The rows of the table, by the names under which medians are logged."""


class StepTimes:
    """Medians of the time of a step and of its wait for an exchange.

    Calibration steps and other steps that were sent whole are dense. The first interval between two exchanges does not
    count, because it includes set-up.

    Args:
        steps_per_exchange: steps over which the time between two exchanges is averaged.
    """

    def __init__(self, steps_per_exchange: int = 1) -> None:
        self._steps_per_exchange = steps_per_exchange
        self._seconds = {name: deque[float](maxlen=MAX_SAMPLES) for name in LABELS}
        self._last: float | None = None
        self._has_interval = False

    def follow(self, averager: Averager) -> None:
        """Add each of an averager's exchanges from now on, without keeping the averager alive."""
        exchanging = weakref.proxy(averager)
        averager.subscribe(lambda step: self.add(step, exchanging.wait_seconds))

    def add(self, step: StepStats, wait_seconds: float) -> None:
        """Add an exchange that has just ended, and this worker's wait for it."""
        now = perf_counter()
        if self._last is not None and self._has_interval:
            is_dense = step.is_calibration or step.dense_elements >= step.num_elements
            self._seconds[DENSE if is_dense else SPARSE].append(now - self._last)
            if not is_dense:
                self._seconds[WAIT].append(wait_seconds)
        self._has_interval |= self._last is not None  # the first one includes set-up
        self._last = now

    def pause(self) -> None:
        """Exclude the time until the next exchange, for example because of a validation."""
        self._last = None

    def scalars(self) -> dict[str, float]:
        """Return the medians in milliseconds, by the names under which they are logged."""
        samples, scale = self._seconds.items(), 1e3 / self._steps_per_exchange
        return {name: scale * median(seconds) for name, seconds in samples if len(seconds) >= MIN_SAMPLES}

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        counts = {name: self._steps_per_exchange * len(seconds) for name, seconds in self._seconds.items()}
        return [(LABELS[name], f"{value:.4g} ms ({counts[name]} steps)") for name, value in self.scalars().items()]

    def verdict(self) -> str | None:
        """Return the gain of the sparse exchange in a sentence; None if steps of one kind are missing.

        Example:
            >>> times = StepTimes()
            >>> times._seconds[DENSE].extend([0.3, 0.3]), times._seconds[SPARSE].extend([0.1, 0.1])
            (None, None)
            >>> times.verdict()
            'A sparse step is 3 times as fast as a dense one.'
        """
        milliseconds = self.scalars()
        if not milliseconds.keys() >= {DENSE, SPARSE}:
            return None
        dense, sparse, count = milliseconds[DENSE], milliseconds[SPARSE], len(self._seconds[DENSE])
        if count < FEW and max(dense, sparse) < LIKE_FEW * min(dense, sparse):
            return f"Only {count} dense steps were timed: compare a run with 'ddp'."
        if dense > LIKE * sparse:
            return f"A sparse step is {dense / sparse:.2g} times as fast as a dense one."
        if sparse > LIKE * dense:
            return "A sparse step takes longer than a dense one: compare a run with 'ddp'."
        return "Communication is not the bottleneck: sparse and dense steps take equally long."
