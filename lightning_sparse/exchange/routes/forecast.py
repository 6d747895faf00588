"""How much room a payload should have: the last step's largest selection, with slack learnt from its changes."""

from lightning_sparse.exchange.payload import CAPACITY_STEP

SMALLEST_CAPACITY = 16
MEAN_WEIGHT = 0.2
DEVIATION_WEIGHT = 0.1
SLACK_DEVIATIONS = 2.0
"""In mean absolute deviations: for Gaussian noise 1.6 standard deviations, an overflow in twenty steps."""


class Forecast:
    """Forecasts a count that all workers saw in every step so far.

    Room for the running mean and twice the running mean deviation from it. So a steady count costs next to no padding.
    A restless one overflows now and then, which costs another round and not correctness: rarer overflows would cost
    more bytes than they save (docs/performance.md). A count that halves or doubles from one step to the next begins
    anew.

    Attributes:
        last: the count of the last step.
    """

    def __init__(self, count: int) -> None:
        self.last = 0
        self._mean = self._deviation = 0.0
        self._begin(count)

    def observe(self, count: int) -> None:
        """Adds the count of a step."""
        if not self._mean / 2 <= count <= 2 * self._mean:
            self._begin(count)
            return
        self.last = count
        deviation = abs(count - self._mean)
        self._mean += MEAN_WEIGHT * (count - self._mean)
        self._deviation += DEVIATION_WEIGHT * (deviation - self._deviation)

    def state(self) -> list[float]:
        """Returns all that the next forecast follows from."""
        return [self.last, self._mean, self._deviation]

    def load_state(self, state: list[float]) -> None:
        """Continues from a state."""
        last, self._mean, self._deviation = state
        self.last = int(last)

    def _begin(self, count: int) -> None:
        self.last = count
        self._mean = float(count)
        self._deviation = count / 16

    def capacity(self, limit: int) -> int:
        """Returns the room for the next step, a multiple of CAPACITY_STEP; at most ``limit`` rounded up."""
        room = max(self._mean, self.last) + SLACK_DEVIATIONS * self._deviation
        return aligned(min(max(SMALLEST_CAPACITY, round(room)), limit))


def aligned(count: int) -> int:
    """Returns the count rounded up to a multiple of CAPACITY_STEP."""
    return -(-count // CAPACITY_STEP) * CAPACITY_STEP
