"""The time of a step with a dense and with a sparse exchange, measured in the training itself."""

import weakref
from collections import deque
from statistics import median
from time import perf_counter

from lightning_sparse.engine import Averager, StepStats

MOST_STEPS = 1000
"""The newest steps of each kind that count."""
FEWEST_STEPS = 2
LIKE = 1.1
"""Steps whose times differ by less than this factor count as equally long."""
DENSE, SPARSE, WAIT = "sparse/median_dense_step_ms", "sparse/median_step_ms", "sparse/median_wait_ms"
WORDS = {DENSE: "median dense step", SPARSE: "median sparse step", WAIT: "  waited for the exchange"}
"""The rows of the table, by the names under which medians are logged."""


class StepTimes:
    """Medians of the time from one exchange to the next, and of the wait for it.

    Calibration sends everything, so its steps are dense. The first interval does not count: it contains set-up.
    """

    def __init__(self) -> None:
        self._seconds = {name: deque[float](maxlen=MOST_STEPS) for name in WORDS}
        self._last: float | None = None
        self._is_first = True

    def follow(self, averager: Averager) -> None:
        """Add each of an averager's exchanges from now on, without keeping the averager alive."""
        exchanging = weakref.proxy(averager)
        averager.subscribe(lambda step: self.add(step, exchanging.wait_seconds))

    def add(self, step: StepStats, wait_seconds: float) -> None:
        """Add an exchange that ended just now, and for which this worker waited so long."""
        now = perf_counter()
        if self._last is not None and not self._is_first:
            self._seconds[DENSE if step.is_calibration else SPARSE].append(now - self._last)
            if not step.is_calibration:
                self._seconds[WAIT].append(wait_seconds)
        self._is_first = self._is_first and self._last is None
        self._last = now

    def pause(self) -> None:
        """Leave out the time until the next exchange, in which other work runs, such as validation."""
        self._last = None

    def scalars(self) -> dict[str, float]:
        """Return the medians in milliseconds, by the names under which they are logged."""
        found = self._seconds.items()
        return {name: 1e3 * median(seconds) for name, seconds in found if len(seconds) >= FEWEST_STEPS}

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        return [(WORDS[name], f"{value:.4g} ms") for name, value in self.scalars().items()]

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
        dense, sparse = milliseconds[DENSE], milliseconds[SPARSE]
        if dense > LIKE * sparse:
            return f"A sparse step is {dense / sparse:.2g} times as fast as a dense one."
        if sparse > LIKE * dense:
            return "A sparse step takes longer than a dense one: use strategy='ddp' here."
        return "Communication is not the bottleneck: sparse and dense steps take equally long."
