"""Measures the time of steps and of their waits for the exchange during training."""

import weakref
from collections import deque
from statistics import median
from time import perf_counter

from lightning_sparse.engine.averager import Averager

MAX_SAMPLES = 1000
"""Number of newest exchanges in a median."""
MIN_SAMPLES = 2
STEP, WAIT = "sparse/median_step_ms", "sparse/median_wait_ms"
LABELS = {STEP: "median step", WAIT: "  waited for the exchange"}
"""The rows of the table, by the names under which medians are logged."""


class StepTimes:
    """Medians of the time of a step and of its wait for an exchange.

    The first interval between two exchanges does not count, because it includes set-up.

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
        averager.subscribe(lambda _: self.add(exchanging.wait_seconds))

    def add(self, wait_seconds: float) -> None:
        """Add an exchange that has just ended, and this worker's wait for it."""
        now = perf_counter()
        if self._last is not None and self._has_interval:
            self._seconds[STEP].append(now - self._last)
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
        return [(LABELS[name], f"{value:.4g} ms") for name, value in self.scalars().items()]
